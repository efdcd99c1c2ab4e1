"""The search equals brute force: every layout of every unit, at every batch, on small random instances."""

from __future__ import annotations

import itertools
import random

import pytest

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.hardware import Backend, DeviceSpec, Hardware, Link
from hf_osdp.planner.job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.planner.memory import estimate_memory
from hf_osdp.planner.search import search
from hf_osdp.planner.strategies import Strategy, batches, search_spaces
from hf_osdp.planner.timing import estimate_time
from tests.helpers.descriptions import at_random

INSTANCES = 240
SAMPLE = 120
"""So many run by default; the others are slow."""


def small_hardware(dice: random.Random) -> Hardware:
    nodes, per_node = dice.choice([(1, 2), (1, 3), (1, 4), (2, 2), (2, 1)])
    return Hardware(
        device=DeviceSpec(name="toy", memory_bytes=10**9, flops_per_s={DType.FLOAT32: 1e9}, memory_bytes_per_s=1e9, source="made up"),
        nodes=nodes,
        devices_per_node=per_node,
        intra_node=Link(latency_s=1e-6, bytes_per_s=dice.choice([1e7, 1e8]), source="made up"),
        inter_node=Link(latency_s=1e-5, bytes_per_s=1e6, source="made up"),
        backend=dice.choice(list(Backend)),
    )


def small_job(dice: random.Random, hardware: Hardware) -> TrainingJob:
    return TrainingJob(
        global_batch_size=hardware.world_size * dice.choice([1, 2, 4]),
        precision=Precision.named(dice.choice(["no", "no", "bf16"])),
        optimizer=OptimizerSpec(states=dice.choice([0, 2]), step=dice.choice(list(OptimizerStep))),
    )


def every_plan(description: ModelDescription, hardware: Hardware, job: TrainingJob):
    """Peak and step time of every plan there is."""
    (space,) = search_spaces(Strategy.OSDP, description, hardware.world_size, hardware.devices_per_node)
    for batch in batches(job, hardware.world_size):
        for choices in itertools.product(*space):
            peak = estimate_memory(description, choices, hardware.world_size, job, batch).peak_bytes
            yield peak, estimate_time(description, choices, hardware, job, batch).step_s


def instance(seed: int):
    dice = random.Random(seed)
    hardware = small_hardware(dice)
    # Two nodes of two devices know two stages, which makes eight choices a unit.
    blocks = {(1, 2): 4, (2, 1): 4, (1, 3): 3, (1, 4): 3, (2, 2): 2}[hardware.nodes, hardware.devices_per_node]
    description = at_random(seed, kinds=dice.choice([1, 1, 2]), blocks=blocks, tied=dice.random() < 0.3)
    return description, hardware, small_job(dice, hardware), dice


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= SAMPLE else []) for seed in range(INSTANCES)])
def test_search_equals_brute_force(seed):
    description, hardware, job, dice = instance(seed)
    plans = list(every_plan(description, hardware, job))
    peaks = sorted({peak for peak, _ in plans})
    limits = {peaks[0], dice.choice(peaks), peaks[len(peaks) // 3], dice.randint(peaks[0], peaks[-1])}
    for limit in limits:
        best_s = min(step_s for peak, step_s in plans if peak <= limit)
        result = search(description, hardware, job, limit)
        assert result.memory.peak_bytes <= limit
        assert result.plan.proven_optimal
        assert result.time.step_s == pytest.approx(best_s, rel=1e-9)
    with pytest.raises(InfeasibleError) as caught:
        search(description, hardware, job, peaks[0] - 1)
    assert caught.value.least_peak_bytes == peaks[0]
