"""Memory runs out on one of two ranks: where under FSDP2, all ranks told, and a run that goes on by another plan."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from hf_osdp.modeling.units import find_units
from hf_osdp.preparation.out_of_memory import place_of
from hf_osdp.sharding.apply import apply_plan
from tests.helpers.distributed import TORCHRUN, run_program
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.output import ends_of


def fail(*args: object, **kwargs: object) -> None:
    """As the allocator of CUDA says it."""
    raise torch.OutOfMemoryError("Tried to allocate 512.00 KiB.")


class Fails(torch.autograd.Function):
    """An operator whose backward finds no memory."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail()


PLACES = {
    "forward": "forward of transformer.h.1",
    "backward": "backward of transformer.h.1",
    "recompute": "recomputation of transformer.h.1",
    "gather": "gathering of transformer.h.1",
    "gather again": "gathering of transformer.h.1",
    "reduce": "reducing the gradients of transformer.h.1",
    "step": "the optimizer's step",
}  # fmt: skip


def place(moment: str) -> str:
    model = tiny_model("gpt2", layers=2)
    units = find_units(model)
    if moment == "recompute":
        model.gradient_checkpointing_enable()
    apply_plan(model, plan_of(units, 2, "zero3"), units)
    optimizer = torch.optim.AdamW(model.parameters())
    inner, group, kept, passes = model.transformer.h[1].mlp, _fsdp_param_group, dict(vars(_fsdp_param_group)), []
    match moment:
        case "forward":
            inner.register_forward_pre_hook(fail)
        case "backward":
            inner.register_forward_hook(lambda module, args, output: Fails.apply(output))
        case "recompute":
            inner.register_forward_pre_hook(lambda *args: passes.append(1) or (fail() if len(passes) == 2 else None))
        case "gather":
            model.transformer.h[1].register_forward_pre_hook(
                lambda *args: setattr(group, "foreach_all_gather", fail), prepend=True
            )
        case "gather again":
            model.register_forward_hook(lambda *args: setattr(group, "foreach_all_gather", fail))
        case "reduce":
            group.foreach_reduce = fail
        case "step":
            optimizer._init_group = fail
    try:
        tiny_loss(model, tiny_batch(0, part=0, parts=2)).backward()
        optimizer.step()
    except torch.OutOfMemoryError as error:
        return place_of(error, model, units)
    finally:
        for name in ("foreach_all_gather", "foreach_reduce"):
            setattr(group, name, kept[name])
    return "nowhere"


@pytest.mark.on_ranks(2, shared=True)
def test_place_of_error_under_fsdp_is_found_everywhere():
    assert {moment: place(moment) for moment in PLACES} == PLACES


TRAINS = """
import os, sys
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed
from hf_osdp import OSDPConfig, Trainer
from hf_osdp.integrations.launch import run_script

OUTPUT, ON_OOM, FAILS = sys.argv[1:]


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 61, (32,), generator=torch.Generator().manual_seed(index % 16))
        return {"input_ids": ids, "labels": ids}


class Shortage(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if FAILS == "yes" and state.global_step == 5 and args.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            def fail(*args):
                raise torch.OutOfMemoryError("Tried to allocate 100.00 KiB. Of the allocated memory 3.90 MiB is allocated by PyTorch")
            model.transformer.h[1].mlp.register_forward_pre_hook(fail)


def main():
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        n_layer=3, n_embd=64, n_head=2, vocab_size=61, n_positions=32, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    ))
    args = TrainingArguments(
        output_dir=OUTPUT, use_cpu=True, per_device_train_batch_size=4, max_steps=8, save_steps=2, logging_steps=1, report_to="none",
        disable_tqdm=True, learning_rate=1e-2,
    )
    osdp = OSDPConfig(memory_limit="4MiB", hardware="cpu", on_oom=ON_OOM)
    trainer = Trainer(model=model, args=args, train_dataset=Tokens(), osdp=osdp, callbacks=[Shortage()])
    trainer.train()
    if args.process_index == 0:
        print("LOSSES", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], flush=True)


if __name__ == "__main__":
    run_script(main)
"""  # noqa: E501


def train(
    tmp_path: Path, name: str, *, on_oom: str, fails: bool, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", script]
    return run_program([*command, tmp_path / name, on_oom, "yes" if fails else "no"], timeout_s=280)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, ends_of(done.stderr)
    return json.loads(re.findall(r"LOSSES (\[.*\])", done.stdout)[-1])


@pytest.mark.slow
def test_a_run_goes_on_by_a_safer_plan(tmp_path):
    """The steps after the last checkpoint are taken again under another plan, with the same losses."""
    undisturbed = train(tmp_path, "undisturbed", on_oom="raise", fails=False)
    done = train(tmp_path, "replan", on_oom="replan", fails=True, restarts=1)
    assert losses(done) == pytest.approx(losses(undisturbed), rel=1e-3) and len(losses(done)) == 8
    message = re.findall(r"OutOfMemoryError: (Out of memory on rank 1 .*)", done.stderr)
    assert len(message) == 1
    assert re.search(
        r"in forward of transformer\.h\.\S+: the plan was estimated to need 3\.\d MiB of a limit of 4\.0 MiB, 3\.9 MiB were allocated and"  # noqa: E501
        r" 100\.0 KiB more requested\. Plan again with memory_limit=\d+\. The launcher restarts all ranks with it\."
        r" \(Tried to",
        message[0],
    ), message
    plans = re.findall(r"OSDP plan ([0-9a-f]{16})", done.stdout + done.stderr)
    assert len(plans) == 2 and plans[0] != plans[1]
    assert plans[0] in undisturbed.stdout + undisturbed.stderr


@pytest.mark.slow
def test_without_replan_all_ranks_end_with_the_error(tmp_path):
    done = train(tmp_path, "raise", on_oom="raise", fails=True)
    assert done.returncode != 0
    assert re.search(
        r"OutOfMemoryError: Out of memory on rank 1 .* Plan again with memory_limit=\d+\..* \(Tried to",
        done.stderr,
    )
