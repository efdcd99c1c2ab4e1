"""The estimate of plans with units on the host against FSDP2's real step on fake tensors, device and host apart."""

from __future__ import annotations

import pytest

from hf_osdp.planner.cost.memory import MemoryEstimate, estimate_memory
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import GatherSpan
from hf_osdp.planner.job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.planner.plan import Plan
from hf_osdp.planning.simulate import Simulation, simulate
from tests.helpers.sampling import slow_but
from tests.simulation.test_memory_estimate import MODELS, described

ONCE = Batch(micro_batch_size=1, accumulation_steps=1)
PICKS = {"all": lambda index: True, "some": lambda index: index % 2 == 1, "none": lambda index: False}


def both(
    name: str, pick: str, *, world: int, g: int, precision: str = "no", batch: Batch = ONCE, hold: bool = False,
    step: OptimizerStep = OptimizerStep.FUSED,
) -> tuple[MemoryEstimate, Simulation]:  # fmt: skip
    config, auto = MODELS[name]
    job = TrainingJob(global_batch_size=world, precision=Precision.named(precision), optimizer=OptimizerSpec(step=step))
    description = described(name, 64, precision, "cuda", False)
    choices = [
        UnitLayout(
            shard_size=g,
            reshard_after_forward=unit.span is not GatherSpan.STEP,
            reduce_every_micro_step=not hold,
            on_host=PICKS[pick](index),
        )
        for index, unit in enumerate(description.units)
    ]
    plan = Plan.of(description, choices, batch, world_size=world)
    simulated = simulate(config, plan, description=description, job=job, auto_class=auto, device_type="cuda")
    assert simulated.breakdown.total == simulated.peak_bytes
    return estimate_memory(description, choices, world, job, batch), simulated


CASES = [
    ("gpt2", "all", 1, 1, "no"), ("llama", "all", 1, 1, "bf16"), ("gpt2", "some", 8, 1, "bf16"), ("llama", "some", 8, 4, "no"),
    ("llama", "all", 8, 8, "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "pick", "world", "g", "precision"),
    slow_but(CASES, daily=CASES[1:3]),
)  # fmt: skip
def test_peaks_of_device_and_host(name, pick, world, g, precision):
    estimate, simulated = both(name, pick, world=world, g=g, precision=precision)
    assert -0.005 <= estimate.peak_bytes / simulated.peak_bytes - 1 <= 0.01
    assert -0.005 <= estimate.host_bytes / simulated.host_bytes - 1 <= 0.01


@pytest.mark.parametrize(("hold", "g"), slow_but([(True, 1), (True, 4), (False, 1), (False, 4)], daily=[(True, 4), (False, 1)]))
def test_peaks_with_accumulation(hold, g):
    batch = Batch(micro_batch_size=1, accumulation_steps=3)
    estimate, simulated = both("gpt2", "all", world=4, g=g, batch=batch, hold=hold)
    assert -0.005 <= estimate.peak_bytes / simulated.peak_bytes - 1 <= 0.03


def test_the_host_takes_the_optimizers_scratch():
    estimate, simulated = both("gpt2", "all", world=2, g=2, step=OptimizerStep.FOREACH)
    assert -0.005 <= estimate.peak_bytes / simulated.peak_bytes - 1 <= 0.01


def test_a_plan_without_units_on_the_host_leaves_it_empty():
    estimate, simulated = both("gpt2", "none", world=2, g=2)
    assert simulated.host_bytes == estimate.host_bytes == 0
    offloaded = both("gpt2", "all", world=2, g=2)[1]
    assert offloaded.peak_bytes < 0.7 * simulated.peak_bytes and offloaded.breakdown.parameters == offloaded.breakdown.optimizer == 0
