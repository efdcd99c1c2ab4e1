"""The Trainer, an Accelerate loop and checkpoints in one process, compared with the stock stack."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from hf_osdp import OSDPAccelerator, OSDPConfig, Trainer
from hf_osdp.quantities import format_bytes

from .step import Bench, step

STEPS, BATCH = 6, 8
TOLERANCES = {"no": 1e-4, "bf16": 0.02, "fp16": 0.02}
"""Relative tolerances of losses; FSDP2 rounds in other places than autocast."""
MEMORY_AIM = 0.03
APART = 0.02
"""Largest allowed difference of losses and weights of a resumed training on CUDA."""


def model_of(bench: Bench, seed: int = 0) -> GPT2LMHeadModel:
    """Return a model without dropout, so that two trainings can be compared."""
    set_seed(seed)
    sizes = (
        {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}
        if bench.rehearses
        else {"n_layer": 12, "n_embd": 768, "n_head": 12}
    )
    return GPT2LMHeadModel(GPT2Config(
        **sizes, n_positions=length_of(bench), bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    ))  # fmt: skip


def length_of(bench: Bench) -> int:
    return 32 if bench.rehearses else 512


def tokens(bench: Bench, count: int = STEPS * BATCH) -> list[dict[str, torch.Tensor]]:
    """Return generated text with few distinct tokens, so that a model can learn it."""
    rows = torch.randint(0, 61, (count, length_of(bench)), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(
    bench: Bench, precision: str, name: str, *, osdp: OSDPConfig | None, resume: str | None = None, **changes: Any
) -> Any:
    """Return a Trainer after training; the stock Trainer if `osdp` is None."""
    folder = bench.folder / name
    options = {
        "output_dir": str(folder), "max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-3,
        "per_device_train_batch_size": BATCH,
        "bf16": precision == "bf16", "fp16": precision == "fp16", "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 5, "optim": "adamw_torch", "use_cpu": bench.on_cpu, **changes,
    }  # fmt: skip
    classes = {True: transformers.Trainer, False: Trainer}
    more = {} if osdp is None else {"osdp": osdp}
    trainer = classes[osdp is None](
        model=model_of(bench), args=TrainingArguments(**options), train_dataset=tokens(bench), **more
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compare(
    bench: Bench, name: str, precision: str, ours: list[float], stock: list[float], folder: Path | None
) -> None:
    """Write a row of losses, and of memory if there is a report."""
    worst = max((abs(a - b) / abs(b) for a, b in zip(ours, stock, strict=False)), default=float("inf"))
    estimated, measured = memory_of(folder) if folder is not None else (None, None)
    error = "" if not (estimated and measured) else f"{estimated / measured - 1:+.1%}"
    bench.row(
        training=name, precision=precision, loss=f"{ours[0]:.4f} to {ours[-1]:.4f}", off_stock=f"{worst:.1e}",
        estimated="" if estimated is None else format_bytes(estimated),
        measured="" if measured is None else format_bytes(measured),
        error=error,
    )  # fmt: skip
    bench.aim(len(ours) == len(stock), f"{name} {precision}: {len(ours)} losses logged, stock logs {len(stock)}")
    bench.aim(
        worst <= TOLERANCES[precision],
        f"{name} {precision}: a loss is {worst:.1e} off stock's ({TOLERANCES[precision]:g} allowed)",
    )
    if not bench.rehearses and estimated and measured:
        bench.aim(
            abs(estimated / measured - 1) <= MEMORY_AIM, f"{name} {precision}: the estimated peak is {error} off"
        )


def memory_of(folder: Path) -> tuple[int | None, int | None]:
    """Return the estimated and measured peak of a report."""
    report = json.loads((folder / "osdp_report.json").read_text(encoding="utf-8"))
    return report["estimated"]["peak_bytes"], (report.get("measured") or {}).get("peak_bytes")


@step(
    part=1,
    expected_s=45,
    limit_s=240,
    rehearsal_s=15,
    proves="the Trainer under a plan in float32, bf16 and fp16: stock losses, estimated memory",
)
def trainer(bench: Bench) -> None:
    for precision in ("no", "bf16") if bench.rehearses else ("bf16", "fp16", "no"):
        ours = trained(bench, precision, f"ours-{precision}", osdp=OSDPConfig())
        stock = trained(bench, precision, f"stock-{precision}", osdp=None)
        compare(bench, "Trainer", precision, losses(ours), losses(stock), bench.folder / f"ours-{precision}")
        bench.note(
            f"{precision}: plan {ours.plan.fingerprint}, {ours.plan.micro_batch_size} x {ours.plan.accumulation_steps}"
            " samples"
        )
        del ours, stock


@step(
    part=1,
    expected_s=45,
    limit_s=150,
    rehearsal_s=10,
    proves="an Accelerate loop under a plan in bf16 and fp16: stock losses, estimated memory",
)
def accelerator(bench: Bench) -> None:
    from accelerate.state import AcceleratorState

    for precision in ("bf16",) if bench.rehearses else ("bf16", "fp16"):
        found = {}
        for name in ("ours", "stock"):
            AcceleratorState._reset_state(reset_partial_state=True)
            reset_memory(bench)
            found[name] = accelerated(bench, precision, ours=name == "ours")
        compare(bench, "Accelerator", precision, found["ours"], found["stock"], bench.folder / f"loop-{precision}")


def reset_memory(bench: Bench) -> None:
    """Free memory and reset peaks, so that earlier tensors do not count."""
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def accelerated(bench: Bench, precision: str, *, ours: bool) -> list[float]:
    """Return the losses of a loop in one process."""
    if ours:
        made = OSDPAccelerator(
            mixed_precision=precision, cpu=bench.on_cpu, osdp=OSDPConfig(micro_batch_size=BATCH),
            project_dir=str(bench.folder / f"loop-{precision}"),
        )  # fmt: skip
    else:
        made = Accelerator(mixed_precision=precision, cpu=bench.on_cpu)
    model = model_of(bench)
    rows = [row["input_ids"] for row in tokens(bench)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = made.prepare(model, optimizer, DataLoader(rows, batch_size=BATCH))
    seen = []
    for batch in loader:
        with made.accumulate(model):
            output = model(input_ids=batch, labels=batch)  # kept through backward, as in the estimate
            loss = output.loss
            made.backward(loss)
            del output
            if made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.item())
    made.end_training()
    return seen


@step(
    part=1,
    expected_s=60,
    limit_s=180,
    rehearsal_s=15,
    proves="a checkpoint in shards and a whole one, saved half-way, go on to the same losses",
)
def checkpoint(bench: Bench) -> None:
    for layout in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        options = {"save_strategy": "steps", "save_steps": STEPS // 2, "fsdp_config": {"state_dict_type": layout}}
        whole = trained(bench, "bf16", layout, osdp=OSDPConfig(), **options)
        weights = {
            name: value.detach().clone() for name, value in whole.accelerator.get_state_dict(whole.model).items()
        }
        saved = bench.folder / layout / f"checkpoint-{STEPS // 2}"
        plan = OSDPConfig(plan=whole.plan)
        again = trained(bench, "bf16", f"{layout}-again", osdp=plan, resume=str(saved), **options)
        state = again.accelerator.get_state_dict(again.model)
        worst = max((state[name].double() - value.double()).abs().max().item() for name, value in weights.items())
        off = max(abs(a - b) for a, b in zip(losses(whole)[-2:], losses(again)[-2:], strict=True))
        bench.row(
            layout=layout,
            steps_again=STEPS - STEPS // 2,
            loss_differs_by=f"{off:.1e}",
            weights_differ_by=f"{worst:.1e}",
        )
        most = 1e-6 if bench.rehearses else APART  # some CUDA kernels sum in no fixed order
        bench.aim(
            off <= most and worst <= most,
            f"{layout}: a training that went on differs by {off:.1e} in its loss, {worst:.1e} in weights",
        )
