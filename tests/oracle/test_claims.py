"""What a search claims, "no plan fits" and "no plan is faster", holds at each plan's peak and close to it."""

import itertools
import random
from dataclasses import fields, replace

import pytest

from hf_osdp.planner.description import ModelDescription, PhaseCost, Segment
from hf_osdp.planner.hardware import Backend
from hf_osdp.planner.optimizers import LOW_BIT
from hf_osdp.planner.search.search import least_memory, search, search_or_floor
from hf_osdp.planner.training_job import TrainingJob
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import toy_hardware
from tests.helpers.problems import problem
from tests.helpers.sampling import slow_but
from tests.oracle.test_brute_force import every_plan, instance, of_many_ranks

PROBLEMS, LIMITS, IN_ONE = 1000, 100, 5
EQUAL = 2e-7


def enlarged(description: ModelDescription, factor: int = 64) -> ModelDescription:
    """The model with each dimension of parameters `factor` times as long, and all bytes by its square: numbers of the
    size of real models, which the solver sees in coarse units.
    """

    def larger(costs: Segment | PhaseCost):
        named = [field.name for field in fields(costs) if field.name.endswith("_bytes")]
        return replace(costs, **{name: getattr(costs, name).scaled(factor**2, constants=True) for name in named})

    def whole(segment: Segment) -> Segment:
        return replace(larger(segment), forward=larger(segment.forward), backward=larger(segment.backward))

    units = tuple(
        replace(u, parameters=tuple(replace(p, shape=tuple(n * factor for n in p.shape)) for p in u.parameters))
        for u in description.units
    )
    return replace(description, units=units, segments=tuple(segment.each(whole) for segment in description.segments))


def limits_of(peaks: list[int], dice: random.Random) -> list[int]:
    """Limits at plans' peaks and around them, the least peak's first."""
    around = (0, *(sign * by for by in (1, 10, 100, 1000) for sign in (1, -1)))
    least = [peaks[0] + by for by in around]
    return [*least, *(dice.choice(peaks) + dice.choice(around) for _ in range(LIMITS - len(least)))]


def check(seed: int) -> None:
    description, hardware, job, dice = (of_many_ranks if seed % 4 == 3 else instance)(seed)
    if seed % 2:
        description = enlarged(description)
        hardware = hardware if hardware.host is None else replace(hardware, host=None)
        job = replace(job, host_offload=None, offload_activations=None, offload_optimizer=None)
    plans = list(every_plan(description, hardware, job))
    peaks = sorted({peak for peak, _ in plans})
    for needed in limits_of(peaks, dice) if plans else ():
        best_s = min((step_s for peak, step_s in plans if peak <= needed), default=None)
        if needed <= 0:
            continue
        found = search_or_floor(problem(description, hardware, job, hardware.limit_for(needed)))
        if isinstance(found, int):
            assert best_s is None, f"{seed}: a plan of {best_s} s fits {needed}"
            continue
        assert best_s is not None and found.peak_bytes <= needed, f"{seed}: no plan fits {needed}"
        assert found.time.step_s >= best_s * (1 - EQUAL)
        bound_s = found.time.step_s * (1 - found.plan.gap)
        assert bound_s <= best_s * (1 + EQUAL), f"{seed}: faster than proven under {needed}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", slow_but(range(0, PROBLEMS, IN_ONE), daily=[]))
def test_every_claim_is_true(first):
    for seed in range(first, first + IN_ONE):
        check(seed)


def test_a_long_row_is_proven_alike_under_neighbouring_limits():
    """More memory never makes the proven plan slower."""
    hardware = toy_hardware(2, 3, backend=Backend.GLOO)
    job = TrainingJob(global_batch_size=12, optimizer=LOW_BIT["adamw4bit"])
    description = transformer(layers=6, hidden=64, vocabulary=300, sequence_length=32)
    asked = problem(description, hardware, job, 10**9)
    least = least_memory(asked)
    found = [search(replace(asked, memory_limit_bytes=int(least * (1.1 + 0.01 * n)))) for n in range(40)]
    steps = [one.time.step_s for one in found]
    assert len(set(steps)) > 10 and all(one.plan.gap == 0 for one in found)
    assert all(later <= earlier * (1 + EQUAL) for earlier, later in itertools.pairwise(steps))
