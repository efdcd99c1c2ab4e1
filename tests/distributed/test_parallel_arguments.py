"""OptimalShardedDataParallel's arguments: each is used, or refused in one line. One process, and two for fp16."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_osdp
from hf_osdp.errors import PlanError
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.split import WHOLE_BLOCKS
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.plan_run import check_given_plan
from hf_osdp.sharding.gradients import OSDPGradScaler
from tests.helpers.layouts import plan_of
from tests.helpers.models import SAMPLES, SEQUENCE_LENGTH, tiny_batch, tiny_loss, tiny_model

PLANNING = {
    "sequence_length": SEQUENCE_LENGTH, "global_batch_size": SAMPLES, "hardware": "cpu", "compare": False,
    "operator_splitting": False,
}  # fmt: skip


def planned(model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> OptimalShardedDataParallel:
    return OptimalShardedDataParallel(model or tiny_model("gpt2"), {**PLANNING, **options}, optimizer=optimizer)


def given(optimizer: Any = None, **options: Any) -> OptimalShardedDataParallel:
    """A plan for 1 sample of 12 tokens at once, 2 a step."""
    model = tiny_model("gpt2")
    plan = replace(
        plan_of(find_units(model), 1, "replicate", accumulation_steps=2),
        sequence_length=SEQUENCE_LENGTH,
    )
    return OptimalShardedDataParallel(model, OSDPConfig(plan=plan, **options), optimizer=optimizer)


def refusal(error: type[Exception], make, **arguments: Any) -> str:
    with pytest.raises(error) as caught:
        make(**arguments)
    assert type(caught.value) is error and "\n" not in str(caught.value)
    return str(caught.value)


# ---- a given plan


def test_given_plan_is_described_and_held_against_the_run():
    """The lines of those that `OSDPConfig` refuses, and of other batches and limits, are on docs/bad_inputs.md."""
    assert "so recompute=False" in refusal(ValueError, given, recompute=False)
    too_low = refusal(PlanError, given, memory_limit=2**16)
    assert re.search(r"The plan needs .*iB, more than memory_limit=64\.0 KiB", too_low)
    assert "runs 1 samples at once, but batches hold 2. Plan again" in refusal(PlanError, given, micro_batch_size=2)
    given(memory_limit="1GiB", global_batch_size=2, micro_batch_size=1, sequence_length=SEQUENCE_LENGTH - 1)


def test_reducing_otherwise_than_the_plan_is_refused():
    plan = plan_of(find_units(tiny_model("gpt2")), 1, "replicate")
    check_given_plan(plan, OSDPConfig(reduce_every_micro_step=True), 0)
    with pytest.raises(PlanError, match="units with reduce_every_micro_step=True"):
        check_given_plan(plan, OSDPConfig(reduce_every_micro_step=False), 0)
    mixed = plan_of(find_units(tiny_model("gpt2")), 1, "replicate", accumulation_steps=2, reduce_every_micro_step=None)
    check_given_plan(mixed, OSDPConfig(), 0)
    for every in (True, False):
        with pytest.raises(PlanError, match=f"units with reduce_every_micro_step={not every}"):
            check_given_plan(mixed, OSDPConfig(reduce_every_micro_step=every), 0)


# ---- planning


def problems_of(monkeypatch) -> list[PlanningProblem]:
    """Return the problems that are searched from here on."""
    from hf_osdp.preparation import find_plan as module

    calls, search = [], module.search

    def recorded(problem: PlanningProblem):
        calls.append(problem)
        return search(problem)

    monkeypatch.setattr(module, "search", recorded)
    return calls


def test_the_optimizer_counted_by_default_is_plain_adamw(monkeypatch):
    calls = problems_of(monkeypatch)
    planned()
    planned(optimizer=OptimizerSpec(name="sgd", states=0))
    assert [call.job.optimizer for call in calls] == [
        OptimizerSpec(name="adamw", states=2, step=OptimizerStep.FOR_LOOP),
        OptimizerSpec(name="sgd", states=0),
    ]


def test_a_limit_above_the_device_is_refused():
    planned(memory_limit="8GiB")
    message = refusal(ValueError, planned, memory_limit=8 * 2**30 + 1)
    assert "memory_limit=8589934593 is more than the 8.0 GiB of CPU; use at most 8192MiB, or" in message


class Perceptrons(nn.Module):
    """Not from transformers: no config, arguments of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            features = block(features).relu()
        return {"loss": nn.functional.mse_loss(features, labels)}


def test_inputs_of_a_model_that_is_not_from_transformers():
    def inputs(samples: int) -> dict[str, torch.Tensor]:
        return {"features": torch.zeros(samples, 8), "labels": torch.zeros(samples, 8)}

    parallel = planned(Perceptrons(), sequence_length=1, inputs=inputs)
    parallel.backward(parallel(**inputs(2))["loss"])
    assert parallel.report.memory.peak_bytes > 0


# ---- fp16


def test_the_scaler_is_public_and_off_without_fp16():
    assert hf_osdp.OSDPGradScaler is OSDPGradScaler
    scaler = given().grad_scaler(init_scale=8.0)
    assert type(scaler) is OSDPGradScaler and not scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == 1
    assert given().grad_scaler(enabled=True, init_scale=8.0).get_scale() == 8


@pytest.mark.on_ranks(2, shared=True)
def test_fp16_in_plain_loop_skips_same_steps_on_every_rank():
    """The docstring's loop; one rank's shard overflows before the second of three steps."""
    model = tiny_model("gpt2", dtype=torch.float32)
    plan = plan_of(find_units(model), dist.get_world_size(), "mixed")
    parallel = OptimalShardedDataParallel(model, OSDPConfig(plan=plan), mixed_precision="fp16")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    scaler = parallel.grad_scaler(init_scale=64.0)
    assert scaler.is_enabled()
    scales, moved = [], []
    for step in range(3):
        with parallel.micro_step():
            scaler.scale(tiny_loss(parallel, tiny_batch(step, part=dist.get_rank(), parts=2)).float()).backward()
        if step == 1 and dist.get_rank() == 1:
            next(p for p in parallel.parameters() if p.grad._local_tensor.numel()).grad._local_tensor.view(-1)[0] = (
                torch.inf
            )
        before = [p._local_tensor.clone() for p in parallel.parameters()]
        scaler.unscale_(optimizer)
        parallel.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(
            any(not torch.equal(a, p._local_tensor) for a, p in zip(before, parallel.parameters(), strict=True))
        )
        scales.append(scaler.get_scale())
    assert scales == [64, 32, 32] and moved == [True, False, True]


# ---- decisions


def test_decisions_that_are_fixed_are_the_plans():
    plan = planned(recompute=True, reduce_every_micro_step=True, micro_batch_size=1).plan
    blocks = [unit for unit in plan.units if ".h." in unit.fqn]
    assert blocks and all(unit.activations == Activations.RECOMPUTE for unit in blocks)
    assert all(unit.reduce_every_micro_step for unit in plan.units) and plan.split == WHOLE_BLOCKS
