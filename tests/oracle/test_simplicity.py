"""The plan under `simplicity` is the simplest of all plans within its share of the fastest one's time."""

import random
from dataclasses import replace

import pytest

from hf_osdp.planner.cost.units import shape_ids
from hf_osdp.planner.decision import meshes_of
from hf_osdp.planner.search import search as module
from hf_osdp.planner.search.search import search
from hf_osdp.planner.search.simplest import SimplestSearch
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, TrainingJob
from tests.helpers.descriptions import at_random
from tests.helpers.problems import problem
from tests.helpers.sampling import slow_but
from tests.oracle.test_brute_force import every_layouts, instance, small_hardware

_ROUNDED = 1e-6
"""Relative difference of times that count as equal."""


def parts(description, layouts, world_size: int) -> int:
    """Layouts of units of equal structure, meshes, and the host."""
    structures = zip(shape_ids(description.units), description.recomputations, strict=True)
    return (
        len(set(zip(structures, layouts, strict=True)))
        + len({mesh for one in layouts for mesh in meshes_of(one.shard_size, one.stage_size, world_size)})
        + any(one.uses_host for one in layouts)
    )


def check(description, hardware, job, dice) -> tuple[int, int]:
    """Hold searches against all plans; return how many took a simpler plan than the fastest, and are not proven."""
    plans = [
        (peak, step_s, parts(description, layouts, hardware.world_size))
        for layouts, peak, step_s in every_layouts(description, hardware, job)
    ]
    simpler = unproven = 0
    for limit in {dice.choice(plans)[0] for _ in range(3)}:
        fitting = [(step_s, number) for peak, step_s, number in plans if peak <= limit]
        best_s = min(fitting)[0]
        for simplicity in (0.01, 0.2):
            asked = problem(description, hardware, job, hardware.limit_for(limit))
            result = search(replace(asked, simplicity=simplicity))
            # a plan exactly at the end of the share may be taken or not
            ends = [best_s * (1 + simplicity) * (1 + rounded) for rounded in (-_ROUNDED, _ROUNDED)]
            near = [min((number, step_s) for step_s, number in fitting if step_s <= end) for end in ends]
            number = parts(description, [unit.layout for unit in result.plan.units], hardware.world_size)
            unproven += not result.plan.proven_simplest
            assert result.plan.proven_optimal and result.plan.peak_bytes <= limit
            assert result.time.step_s <= best_s * (1 + simplicity) * (1 + _ROUNDED)
            found = (number, pytest.approx(result.time.step_s, rel=_ROUNDED))
            assert not result.plan.proven_simplest or any(one == found for one in near)
            if result.fastest is not None:
                simpler += 1
                assert result.fastest.time.step_s == pytest.approx(best_s, rel=_ROUNDED)
                uses = {any(unit.uses_host for unit in plan.units) for plan in (result.fastest.plan, result.plan)}
                assert ("on the host" in result.plan.simplified) == (len(uses) > 1)
    return simpler, unproven


TENS = [pytest.param(range(first, first + 10), marks=pytest.mark.slow) for first in range(0, 120, 10)]


@pytest.mark.parametrize("seeds", [range(2, 4), *TENS])
def test_plan_under_simplicity_is_the_simplest_near_the_fastest(seeds):
    assert checked(seeds) == (True, False)


@pytest.mark.parametrize("most_work", [0.0, pytest.param(0.004, marks=pytest.mark.slow)])
def test_plan_under_simplicity_is_near_fastest_where_work_ends(monkeypatch, most_work):
    monkeypatch.setattr(module, "SimplestSearch", lambda *arguments: SimplestSearch(*arguments[:-1], most_work))
    assert checked(range(2))[1]


def checked(seeds: range) -> tuple[bool, bool]:
    """Check some instances; return whether some plan was simplified, and whether some is not proven."""
    counts = []
    for seed in seeds:
        description, hardware, job, dice = instance(seed)
        if next(every_layouts(description, hardware, job), None) is not None:
            counts.append(check(description, hardware, job, dice))
    simpler, unproven = map(any, zip(*counts, strict=True))
    return simpler, unproven


@pytest.mark.parametrize("seed", slow_but(range(60), daily=(0, 1, 2)))
def test_plan_under_simplicity_has_the_fewest_meshes(seed):
    dice = random.Random(seed)
    nodes, per_node = dice.choice([(1, 6), (1, 8), (2, 4)])
    hardware = replace(small_hardware(dice), nodes=nodes, devices_per_node=per_node, host=None)
    hardware = replace(hardware, device=replace(hardware.device, communicator_bytes=dice.choice([0, 300])))
    job = TrainingJob(
        global_batch_size=hardware.world_size, recompute=False,
        optimizer=OptimizerSpec(states=2, step=OptimizerStep.FOREACH),
    )  # fmt: skip
    _, unproven = check(at_random(seed, kinds=2, blocks=2, tied=dice.random() < 0.5), hardware, job, dice)
    assert not unproven


def test_the_search_for_a_simple_plan_runs_once_for_equal_problems(monkeypatch):
    description, hardware, job, _ = instance(0)
    made = []
    monkeypatch.setattr(module, "SimplestSearch", lambda *given: made.append(given) or SimplestSearch(*given))
    found = [search(replace(problem(description, hardware, job), simplicity=0.01)) for _ in range(2)]
    assert found[0] is found[1] and len(made) == 1
