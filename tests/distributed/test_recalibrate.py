"""recalibrate on two ranks: what runs was tried, and trains as the plan alone does."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from hf_osdp.distributed.consensus import on_rank_zero
from hf_osdp.distributed.launcher import launched_rank
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig

LENGTH, VOCABULARY, LIMIT = 24, 173, "4MiB"
"""Under this limit some units are sharded; replicas of all would need more."""
BLOCK_BYTES = 4 * (12 * 64**2 + 13 * 64)
"""Of one gathered block in fp32. Gloo's thread lets go of a collective's buffer a moment after the collective has
ended, so that one more may be alive at the peak: a peak varies by this from step to step."""


def tiny_model(seed: int = 0) -> GPT2LMHeadModel:
    set_seed(seed)
    config = GPT2Config(
        n_layer=4, n_head=2, n_embd=64, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def tokens(count: int = 64) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(folder: str, osdp: OSDPConfig) -> tuple[Plan, list[float], list[torch.Tensor], Trainer]:
    """With dropout and a shuffled data set, so that a generator that was moved shows."""
    args = TrainingArguments(
        output_dir=folder, max_steps=4, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", seed=5,
        per_device_train_batch_size=4, optim="adamw_torch",
    )  # fmt: skip
    losses: list[float] = []

    class Recording(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    trainer = Recording(model=tiny_model(), args=args, train_dataset=tokens(), osdp=osdp)
    trainer.train()
    return trainer.plan, losses, [p.detach().to_local().clone() for p in trainer.model.parameters()], trainer


def loop(folder: str) -> dict:
    """An Accelerate loop that evaluates between steps."""
    hardware = preset("cpu", devices_per_node=2)
    osdp = OSDPConfig(hardware=hardware, memory_limit=LIMIT, operator_splitting=False, compare=False)
    accelerator = OSDPAccelerator(osdp=osdp, project_dir=f"{folder}/loop", gradient_accumulation_steps=2)
    model = tiny_model()
    batches = DataLoader([row["input_ids"] for row in tokens()], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), batches)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            with torch.no_grad():
                model.eval()(input_ids=batch)
                model.train()
    accelerator.end_training()
    estimated = accelerator.planned_run.search
    return {"measured": accelerator.measured, "estimated": None if estimated is None else estimated.memory.peak_bytes}


def plain_loop() -> dict:
    """Here operators may be split, too."""
    model = OptimalShardedDataParallel(
        tiny_model(),
        OSDPConfig(
            memory_limit=LIMIT, sequence_length=LENGTH, global_batch_size=8, recalibrate=True,
            hardware=preset("cpu", devices_per_node=2),
        ),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.stack([row["input_ids"] for row in tokens(model.plan.micro_batch_size)])
    for _ in range(8):
        for number in range(1, model.plan.accumulation_steps + 1):
            model.backward(model(input_ids=batch, labels=batch).loss, is_last=number == model.plan.accumulation_steps)
        optimizer.step()
        optimizer.zero_grad()
    return {"measured": model.measured, "rounds": model.rounds, "plan": model.plan.fingerprint}


def same_on_all(found: object) -> bool:
    return on_rank_zero(lambda: found) == found


@pytest.mark.slow  # half a minute of trials; tests/unit/preparation/test_recalibrate.py has the rules
@pytest.mark.on_ranks(2, init=False, timeout_s=200)
def test_training_after_trials_equals_the_plan_alone_bit_by_bit(tmp_path):
    hardware = preset("cpu", devices_per_node=2)
    osdp = OSDPConfig(
        recalibrate=True, hardware=hardware, memory_limit=LIMIT, micro_batch_size=2, operator_splitting=False,
        compare=False
    )  # fmt: skip
    plan, losses, weights, trainer = trained(f"{tmp_path}/with", osdp)
    given, plain_losses, plain_weights, _ = trained(f"{tmp_path}/without", OSDPConfig(plan=plan))
    assert plan.fingerprint == given.fingerprint and same_on_all(plan.fingerprint)
    assert losses == plain_losses and len(losses) >= 4
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))
    tried = [(r.plan.fingerprint, r.fits, r.observed.peak_bytes) for r in trainer._run.rounds]
    assert same_on_all(tried)
    report, plain = (json.loads((tmp_path / name / "osdp_report.json").read_text()) for name in ("with", "without"))
    rounds = report["recalibration"]
    assert [(r["plan"], r["fits"], r["measured"]["peak_bytes"]) for r in rounds] == tried
    (running,) = [r for r in rounds if r["runs"]]
    assert running["plan"] == plan.fingerprint and running["fits"] and running["measured"]["peak_bytes"] <= 4 * 2**20
    for figures in (report["measured"], running["measured"]):
        assert figures["peak_bytes"] > 0 and figures["median_step_s"] > 0
        assert all(c["seconds"] > 0 and c["nbytes"] > 0 and c["group_size"] == 2 for c in figures["collectives"])
    kinds = {c["collective"] for c in report["measured"]["collectives"]}
    assert kinds == {name for name, seconds in report["estimated"]["collectives"].items() if seconds > 0}
    assert plain["recalibration"] == [] and plain["measured"]["collectives"]


@pytest.mark.slow
@pytest.mark.on_ranks(2, init=False, timeout_s=200)
def test_loops_are_measured_without_a_word_from_them(tmp_path):
    plain, prepared = plain_loop(), None
    for name in ("plain", "prepared"):  # the second gives the process group up
        measured = plain["measured"] if name == "plain" else (prepared := loop(str(tmp_path)))["measured"]
        assert measured.steps == 8 and measured.median_step_s > 0 and measured.collectives
        assert name == "prepared" or same_on_all(measured)
    tried = next(past.observed.peak_bytes for past in plain["rounds"] if past.plan.fingerprint == plain["plan"])
    assert plain["measured"].peak_bytes == pytest.approx(tried, rel=0.02, abs=BLOCK_BYTES), (
        "training needs what the trial showed"
    )
    if launched_rank() == 0:
        assert prepared["measured"].peak_bytes == pytest.approx(prepared["estimated"], rel=0.05, abs=BLOCK_BYTES)
        report = json.loads((tmp_path / "loop" / "osdp_report.json").read_text())
        assert report["measured"]["peak_bytes"] == prepared["measured"].peak_bytes
