"""What a search finds on random models: it fits, no single strategy is faster, more memory is no slower."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Backend, Hardware, Link
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from tests.helpers.descriptions import at_random
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem
from tests.helpers.properties import holds

AMPLE = 2**40
EQUAL = 2e-7
"""Seconds are whole numbers in the program; see tests/oracle."""
worlds = st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (3, 2)])
backends = st.sampled_from(Backend)
jobs = st.builds(
    TrainingJob,
    global_batch_size=st.sampled_from([12, 24]),
    precision=st.sampled_from([Precision.named("no"), Precision.named("bf16")]),
    optimizer=st.builds(OptimizerSpec, states=st.sampled_from([0, 2]), step=st.sampled_from(OptimizerStep)),
    reduce_every_micro_step=st.sampled_from([None, True, False]),
)
models = st.builds(
    at_random, st.integers(0, 10**6), kinds=st.integers(1, 3), blocks=st.integers(3, 6), tied=st.booleans(),
    recomputable=st.booleans(), stacks=st.booleans(),
)  # fmt: skip
parts = st.floats(0, 1)


def hardware_of(world: tuple[int, int], backend: Backend) -> Hardware:
    """Links so slow that layouts of a small model differ in time."""
    slow = {"latency_s": 1e-6, "source": "made up"}
    return replace(
        bare_preset("v100-16", nodes=world[0], devices_per_node=world[1]), backend=backend,
        intra_node=Link(bytes_per_s=1e8, **slow), inter_node=Link(bytes_per_s=1e7, **slow),
    )  # fmt: skip


def limit_between(model: ModelDescription, hardware: Hardware, job: TrainingJob, part: float) -> int:
    """Some of the way from the least that any plan needs to what the fastest plan of all needs."""
    least = least_memory(problem(model, hardware, job))
    ample = search(problem(model, hardware, job, AMPLE)).plan.peak_bytes
    return least + math.floor(part * max(0, ample - least))


@holds(models, worlds, backends, jobs, parts, parts, few=6, many=600)
def test_a_plan_fits_and_no_single_strategy_and_no_tighter_limit_is_faster(model, world, backend, job, one, other):
    hardware = hardware_of(world, backend)
    least = least_memory(problem(model, hardware, job))
    assert search(problem(model, hardware, job, least)).plan.peak_bytes == least
    with pytest.raises(InfeasibleError) as caught:
        search(problem(model, hardware, job, least - 1))
    assert caught.value.least_peak_bytes == least and caught.value.memory_limit_bytes == least - 1
    low, limit = (limit_between(model, hardware, job, part) for part in sorted((one, other)))
    tight, found = (search(problem(model, hardware, job, most)) for most in (low, limit))
    again, best_s = estimate_plan(found.plan, model, job, hardware), found.time.step_s
    assert again.memory.peak_bytes == found.plan.peak_bytes <= limit
    assert again.time.step_s == pytest.approx(found.plan.step_s, rel=1e-12)
    assert found.plan.global_batch_size == job.global_batch_size and found.plan.proven_optimal
    assert best_s <= tight.time.step_s * (1 + EQUAL)
    groups = [Strategy.HSDP] * (hardware.world_size in (4, 6)) + [Strategy.TWO_STAGE] * (hardware.nodes > 1)
    for strategy in (Strategy.FSDP, Strategy.DDP, Strategy.ZERO2, *groups):
        try:
            assert search(problem(model, hardware, job, limit, strategy=strategy)).time.step_s >= best_s * (1 - EQUAL)
        except InfeasibleError as error:
            assert error.least_peak_bytes > limit


def renamed(model: ModelDescription, seed: int) -> ModelDescription:
    """Other names, whose alphabetical order is another."""
    names = [unit.fqn and f"m{random.Random(seed + i).random()}" for i, unit in enumerate(model.units)]
    return replace(model, units=tuple(replace(u, fqn=name) for u, name in zip(model.units, names, strict=True)))


def listed_otherwise(model: ModelDescription, seed: int) -> ModelDescription:
    """The same model, its units listed in another order; the order of execution stays."""
    order = [0, *random.Random(seed).sample(range(1, len(model.units)), len(model.units) - 1)]
    now = {was: index for index, was in enumerate(order)}

    def moved(segment):
        return segment.each(lambda costs: replace(costs, unit=now[segment.unit]))

    return replace(model, units=tuple(model.units[i] for i in order), segments=tuple(map(moved, model.segments)))


@holds(models, worlds, backends, jobs, parts, st.integers(0, 999), few=2, many=200)
def test_names_and_order_of_listed_units_decide_nothing(model, world, backend, job, part, seed):
    hardware = hardware_of(world, backend)
    limit = limit_between(model, hardware, job, part)
    found, least = search(problem(model, hardware, job, limit)), least_memory(problem(model, hardware, job))
    for other in (renamed(model, seed), listed_otherwise(model, seed)):
        assert search(problem(other, hardware, job, limit)).time.step_s == pytest.approx(found.time.step_s, rel=EQUAL)
        assert least_memory(problem(other, hardware, job)) == least
