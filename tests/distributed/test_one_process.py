"""One process in bf16 or fp16 computes as the stock stack does there, under autocast, or FSDP2 where units live on
the host, and is estimated so.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer as StockTrainer
from transformers import TrainingArguments

from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.units import find_units
from hf_osdp.preparation.config import OSDPConfig
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.sampling import slow_but


def forget_the_launcher() -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def prepared(precision: str, osdp: dict[str, Any], rows: int) -> tuple[OSDPAccelerator, nn.Module, Any, Any]:
    """Return what trains without a launcher, and without a process group before the plan is made."""
    forget_the_launcher()
    model = tiny_model("gpt2", dtype=torch.float32)
    accelerator = OSDPAccelerator(cpu=True, mixed_precision=precision, osdp={"sequence_length": 12, **osdp})
    assert not accelerator.is_fsdp2
    samples = [{name: value[row] for name, value in tiny_batch(0).items()} for row in range(rows)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(samples))


def epoch(accelerator: OSDPAccelerator, model: nn.Module, optimizer: Any, loader: Any) -> tuple[float, float]:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return loss.item(), norm.item()


def what_ran(accelerator: OSDPAccelerator) -> tuple[bool, bool, bool]:
    run = accelerator.planned_run
    return accelerator.is_fsdp2, run.inputs.job.precision.autocast, "under autocast" in run.inputs.description.trace


@pytest.mark.on_ranks(1, init=False)
def test_estimate_of_one_process_in_bf16_counts_autocast():
    accelerator, *rest = prepared("bf16", {"hardware": "cpu"}, rows=8)
    epoch(accelerator, *rest)
    accelerator.end_training()
    run = accelerator.planned_run
    assert what_ran(accelerator) == (False, True, True)
    estimated = run.inputs.estimate(run.plan).memory.peak_bytes
    assert estimated == pytest.approx(accelerator.measured.peak_bytes, rel=0.02)


@pytest.mark.on_ranks(1, init=False)
def test_one_process_with_units_on_host_is_fsdp2_saves_and_goes_on_exactly(tmp_path):
    plan = plan_of(find_units(tiny_model("gpt2", dtype=torch.float32)), 1, "zero3")
    halves = tuple(replace(unit, on_host=number % 2 == 0) for number, unit in enumerate(plan.units))
    accelerator, model, *rest = prepared("bf16", {"plan": replace(plan, sequence_length=12, units=halves)}, rows=2)
    assert what_ran(accelerator) == (True, False, False)
    epoch(accelerator, model, *rest)
    accelerator.save_state(tmp_path)
    once = epoch(accelerator, model, *rest)
    accelerator.load_state(tmp_path)
    assert epoch(accelerator, model, *rest) == once
    assert "DTensor" in {type(parameter).__name__ for parameter in model.parameters()}
    assert set(accelerator.get_state_dict(model)) == tiny_model("gpt2").state_dict().keys()


def by_hand(model: nn.Module, owner: nn.Module, scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
    """Train two steps of two micro-steps with clipping; return losses, logits, gradients and parameters."""
    optimizer, seen = torch.optim.AdamW(owner.parameters(), lr=1e-2), []
    clip = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, list(owner.parameters())))
    for step in range(2):
        for part in range(2):
            outputs = model(**tiny_batch(step, part=part, parts=2))
            scaler.scale(outputs.loss / 2).backward()
            seen += [outputs.loss, outputs.logits.float()]
        scaler.unscale_(optimizer)
        seen += [clip(0.5), *(p.grad.clone() for p in owner.parameters())]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [value.detach() for value in (*seen, *owner.parameters())]


def by_accelerate(accelerator: Accelerator) -> list[torch.Tensor]:
    """Train as `by_hand`."""
    model, seen = tiny_model("gpt2", dtype=torch.float32), []
    owner, optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(2):
        for part in range(2):
            outputs = model(**tiny_batch(step, part=part, parts=2))
            accelerator.backward(outputs.loss)
            assert outputs.logits.dtype is torch.float32
            seen += [outputs.loss, outputs.logits]
        seen += [accelerator.clip_grad_norm_(model.parameters(), 0.5), *(p.grad.clone() for p in owner.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach() for value in (*seen, *owner.parameters())]


def assert_same_bits(ours: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    assert len(ours) == len(stock) > 50
    for number, (one, other) in enumerate(zip(ours, stock, strict=True)):
        assert one.dtype == other.dtype and torch.equal(one, other), number


def stock_amp(precision: str) -> list[torch.Tensor]:
    """Train as Accelerate does in one process; in fp16, which it ignores on the CPU, as it does on a GPU."""
    if precision == "bf16":
        seen = by_accelerate(Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2))
        AcceleratorState._reset_state(True)
        return seen
    model = tiny_model("gpt2", dtype=torch.float32)
    return by_hand(torch.autocast("cpu", torch.float16)(model.__call__), model, torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("launched", "precision"),
    slow_but([(True, "bf16"), (False, "bf16"), (False, "fp16")], [(True, "bf16"), (False, "fp16")]),
)
@pytest.mark.on_ranks(1, init=False)
def test_one_process_has_the_bits_of_stock_autocast(launched, precision):
    """In a plain loop and with Accelerate; the model's own forward too, which `generate` and an averaged copy run."""
    environment = dict(os.environ)
    forget_the_launcher()
    stock = stock_amp(precision)
    os.environ.update(environment if launched else {})
    model = tiny_model("gpt2", dtype=torch.float32)
    plan = plan_of(find_units(model), 1, "mixed", accumulation_steps=2)
    ours = OptimalShardedDataParallel(model, {"plan": plan}, mixed_precision=precision)
    assert dist.is_initialized() == launched
    assert_same_bits(by_hand(ours, model, ours.grad_scaler()), stock)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    averaged, ids = copy.deepcopy(model), tiny_batch(0)["input_ids"]
    assert torch.equal(averaged(ids).logits, ours(ids).logits) and ours(ids).logits.dtype is torch.float32
    with torch.no_grad():
        averaged.lm_head.weight.zero_()
    assert averaged(ids).logits.abs().max() == 0 < model(ids).logits.abs().max()
    sizes = {"sequence_length": plan.sequence_length, "global_batch_size": plan.global_batch_size}
    accelerator = OSDPAccelerator(cpu=True, mixed_precision=precision, osdp={"plan": plan, **sizes})
    assert_same_bits(by_accelerate(accelerator), stock)
    assert dist.is_initialized() == launched and not accelerator.is_fsdp2


def by_trainer(trainer: type[StockTrainer], folder: Path, **osdp: Any) -> list[torch.Tensor]:
    """Return losses, norms and parameters of three steps of two micro-steps in bf16."""
    model = tiny_model("gpt2", dtype=torch.float32)
    rows = [{name: value[row] for name, value in tiny_batch(step).items()} for step in range(3) for row in range(4)]
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        bf16=True, use_cpu=True, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    made = trainer(model=model, args=arguments, train_dataset=rows, **osdp)
    made.train()
    AcceleratorState._reset_state(True)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    figures = [torch.tensor(row[name]) for row in made.state.log_history[:3] for name in ("loss", "grad_norm")]
    return [*figures, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.on_ranks(1, init=False)
def test_trainer_in_one_process_has_the_bits_of_the_stock_one(tmp_path):
    forget_the_launcher()
    stock = by_trainer(StockTrainer, tmp_path)
    ours = by_trainer(Trainer, tmp_path, osdp=OSDPConfig(hardware="cpu", micro_batch_size=2))
    assert not dist.is_initialized()
    assert_same_bits(ours, stock)
