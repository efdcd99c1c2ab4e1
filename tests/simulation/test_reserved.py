"""Reserved memory of an estimated plan against the simulated step's, both by the model of the allocator."""

from __future__ import annotations

from itertools import product

import pytest

from hf_osdp.planner.cost.step_events import replay_of
from hf_osdp.planner.description import Activations
from hf_osdp.planning.simulate import Simulation
from tests.helpers.sampling import slow_but
from tests.helpers.simulation import LAYOUTS, Trial

MOST_ERROR, MOST_ERROR_ALLOCATED = 0.03, 0.01
HOLD, REDUCE, HOST = {"hold": (True,)}, {"hold": (False,)}, {"on_host": (True,)}
MODELS = ("gpt2", "bert", "llama")


def compare(name: str, layout: str, *, precision: str = "bf16", **options) -> Simulation:
    """Check both peaks of a plan."""
    trial = Trial(model=f"deep {name}", layout=layout, precision=precision, **options)
    estimate, simulated = trial.run()
    reserved = replay_of(trial.description, tuple(trial.layouts), trial.world, trial.job, trial.batch).unlimited
    assert reserved.traced
    assert reserved.peak_allocated_bytes == pytest.approx(simulated.peak_bytes, rel=MOST_ERROR_ALLOCATED)
    assert reserved.peak_allocated_bytes == pytest.approx(estimate.peak_bytes, rel=MOST_ERROR_ALLOCATED)
    assert reserved.peak_reserved_bytes == pytest.approx(simulated.reserved_bytes, rel=MOST_ERROR)
    return simulated


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_but(product(MODELS, LAYOUTS), daily=[("gpt2", "zero3"), ("gpt2", "mixed"), ("bert", "ddp"), ("llama", "hsdp")]),
)
def test_reserved_of_each_layout(name, layout):
    assert compare(name, layout).reserved_bytes > 0


@pytest.mark.parametrize(
    ("name", "layout", "activations"),
    slow_but(
        product(MODELS, ("zero2", "mixed"), Activations.BASIC[1:]),
        daily=[("llama", "zero2", Activations.RECOMPUTE), ("gpt2", "mixed", Activations.OFFLOAD)],
    ),
)
def test_reserved_where_activations_are_recomputed_or_offloaded(name, layout, activations):
    compare(name, layout, activations=(activations,))


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    slow_but(
        product(MODELS, ("zero3", "mixed"), [HOLD, REDUCE, HOST]),
        daily=[("gpt2", "zero3", HOLD), ("gpt2", "mixed", REDUCE), ("bert", "zero3", HOST)],
    ),
)
def test_reserved_over_three_micro_steps_and_with_states_on_the_host(name, layout, options):
    compare(name, layout, steps=3, **options)


@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_reserved_in_float32(layout):
    compare("llama", layout, precision="no")


def test_streams_hold_more_than_tensors_do_and_the_cpu_reserves_nothing():
    expanding, fixed = (compare("gpt2", "zero3", expandable_segments=expandable) for expandable in (True, False))
    assert fixed.peak_bytes == expanding.peak_bytes < expanding.reserved_bytes
    assert Trial(model="deep gpt2", length=32, samples=1, device_type="cpu").run()[1].reserved_bytes is None
