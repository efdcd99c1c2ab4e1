"""The estimate of plans whose activations wait on the host, against FSDP2's step on fake tensors, device and host apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hf_osdp.planner.cost.memory import MemoryEstimate, estimate_memory
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.description import Activations
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.split import WHOLE_BLOCKS
from hf_osdp.planning.simulate import Simulation, simulate
from tests.helpers.sampling import slow_but
from tests.helpers.simulation import choices_of_layout
from tests.simulation.test_ways_estimate import LENGTH, WORLD, built, described

SAVE, RECOMPUTE, OFFLOAD, RECOMPUTE_OFFLOAD = Activations
MOST_UNDER, MOST_OVER = -0.005, 0.015
"""Over by one hidden state, 1.2 % of a model as small as this: the model's forward holds the first block's input until it ends."""


def both(
    name: str, layout: str, kinds: Sequence[Activations], *, samples: int = 1, accumulation: int = 1, precision: str = "no"
) -> tuple[MemoryEstimate, Simulation]:
    """Estimate and simulation where the blocks take the choices in turns."""
    job = TrainingJob(global_batch_size=WORLD * samples * accumulation, precision=Precision.named(precision))
    batch = Batch(micro_batch_size=samples, accumulation_steps=accumulation)
    description = described(name, WHOLE_BLOCKS, precision, LENGTH)
    choices = choices_of_layout(layout, description, WORLD)
    for turn, index in enumerate(sorted(description.recomputable)):
        choices[index] = replace(choices[index], activations=kinds[turn % len(kinds)])
    plan = Plan.of(description, choices, batch, world_size=WORLD)
    simulated = simulate(built(name), plan, description=description, job=job, device_type="cuda")
    assert simulated.breakdown.total == simulated.peak_bytes
    return estimate_memory(description, choices, WORLD, job, batch), simulated


def error(estimate: MemoryEstimate, simulated: Simulation) -> float:
    return estimate.peak_bytes / simulated.peak_bytes - 1


CASES = [
    ("gpt2", "zero3", (OFFLOAD,), 8, 1, "no"), ("gpt2", "mixed", (SAVE, OFFLOAD), 8, 1, "bf16"),
    ("gpt2", "mixed", (RECOMPUTE_OFFLOAD,), 1, 3, "no"), ("llama", "zero3", (RECOMPUTE_OFFLOAD,), 8, 1, "bf16"),
    ("llama", "mixed", (OFFLOAD, RECOMPUTE_OFFLOAD), 1, 3, "bf16"), ("llama", "mixed", (RECOMPUTE_OFFLOAD, RECOMPUTE), 8, 1, "no"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout", "kinds", "samples", "accumulation", "precision"),
    slow_but(CASES, daily=CASES[4:5]),
)  # fmt: skip
def test_peaks_of_device_and_host(name, layout, kinds, samples, accumulation, precision):
    estimate, simulated = both(name, layout, kinds, samples=samples, accumulation=accumulation, precision=precision)
    assert MOST_UNDER <= error(estimate, simulated) <= MOST_OVER, f"{error(estimate, simulated):+.2%}"
    if OFFLOAD in kinds:  # how many tensors share the bytes is not known, and each takes a power of two
        assert simulated.host_bytes <= estimate.host_bytes <= 2.1 * simulated.host_bytes
    else:
        assert estimate.host_bytes == simulated.host_bytes > 0


def test_first_block_offloaded_in_low_precision():
    """Known and small: its input leaves the device in the estimate, but Llama's own forward holds that as well until it ends."""
    estimate, simulated = both("llama", "zero3", (OFFLOAD,), samples=8, precision="bf16")
    assert -0.01 <= error(estimate, simulated) <= MOST_OVER, f"{error(estimate, simulated):+.2%}"


def test_the_device_is_relieved_of_what_the_host_holds():
    (_, saved), (_, away), (_, inputs_away) = (
        both("gpt2", "zero3", (kind,), samples=8) for kind in (SAVE, OFFLOAD, RECOMPUTE_OFFLOAD)
    )  # fmt: skip
    assert saved.host_bytes == 0 < inputs_away.host_bytes < away.host_bytes
    assert max(away.peak_bytes, inputs_away.peak_bytes) < 0.75 * saved.peak_bytes
