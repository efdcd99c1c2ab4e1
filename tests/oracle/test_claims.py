"""What a search claims, "no plan fits" and "no plan is faster", holds at each plan's peak and close to it."""

import itertools
import random
from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.hardware import Backend
from hf_osdp.planner.optimizers import LOW_BIT
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import least_memory, search, search_or_floor
from hf_osdp.planner.training_job import TrainingJob
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import toy_hardware
from tests.helpers.problems import problem
from tests.helpers.random_problems import Planned, every_plan, wide
from tests.helpers.sampling import slow_but
from tests.oracle.test_left_out import front

PROBLEMS, LIMITS, IN_ONE = 1000, 40, 5
EQUAL = 2e-7
AROUND = (0, *(sign * by for by in (1, 10, 100, 1000) for sign in (1, -1)))


def limits_of(plans: list[Planned], dice: random.Random) -> list[int]:
    """Limits at plans' peaks and around them: all around the least, of each plan that is the fastest up to its peak,
    and of some others.
    """
    peaks = [plan.peak for plan in plans]
    best = [peak for peak, _ in front(plans)]
    found = [best[0] + by for by in AROUND]
    found += [dice.choice(best) + dice.choice(AROUND) for _ in range(LIMITS // 2)]
    found += [dice.choice(peaks) + dice.choice(AROUND) for _ in range(LIMITS - len(found))]
    return sorted(limit for limit in set(found) if limit > 0)


def check(seed: int, asked: PlanningProblem, plans: list[Planned]) -> None:
    """Hold searches against all plans, at their peaks and around them."""
    hardware, dice = asked.hardware, random.Random(seed)
    if not plans:  # the host has too little memory for all states, which are to lie there
        with pytest.raises(HardwareError):
            search_or_floor(asked)
        return
    least = min(plan.peak for plan in plans)
    # exact up to 4 GiB, above to about one part in a million
    assert 0 <= least_memory(asked) - hardware.limit_for(least) <= (2e-6 * least if least > 2**32 else 0), f"{seed}"
    for needed in limits_of(plans, dice):
        best_s = min((plan.step_s for plan in plans if plan.peak <= needed), default=None)
        found = search_or_floor(replace(asked, memory_limit_bytes=hardware.limit_for(needed)))
        if isinstance(found, int):
            assert best_s is None, f"{seed}: a plan of {best_s} s fits {needed}"
            assert found <= hardware.limit_for(least), f"{seed}: a floor of {found} bytes, and {least} are enough"
            continue
        assert best_s is not None and found.peak_bytes <= needed, f"{seed}: no plan fits {needed}"
        assert found.plan.peak_bytes == found.memory.on(hardware) and found.time.step_s >= best_s * (1 - EQUAL)
        # with more memory, a plan may fit by rounding alone
        assert found.plan.proven_optimal or needed >= 2**28, f"{seed}: not proven under {needed}"
        bound_s = found.time.step_s * (1 - found.plan.gap)
        assert bound_s <= best_s * (1 + EQUAL), f"{seed}: faster than proven under {needed}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", slow_but(range(0, PROBLEMS, IN_ONE), daily=(40, 80, 90, 115, 120)))
def test_every_claim_is_true(first):
    for seed in range(first, first + IN_ONE):
        check(seed, asked := wide(seed), every_plan(asked))


def test_one_rank_pays_for_no_communicator():
    """Replicas beside units on the host are one process's: a plan of both was once said to need a group of ranks."""
    check(124, asked := wide(124), every_plan(asked))


def test_a_long_row_is_proven_alike_under_neighbouring_limits():
    """More memory never makes the proven plan slower."""
    hardware = toy_hardware(2, 3, backend=Backend.GLOO)
    job = TrainingJob(global_batch_size=12, optimizer=LOW_BIT["adamw4bit"])
    description = transformer(layers=6, hidden=64, vocabulary=300, sequence_length=32)
    asked = problem(description, hardware, job, 10**9)
    least = least_memory(asked)
    found = [search(replace(asked, memory_limit_bytes=int(least * (1.1 + 0.02 * n)))) for n in range(20)]
    steps = [one.time.step_s for one in found]
    assert len(set(steps)) > 5 and all(one.plan.gap == 0 for one in found)
    assert all(later <= earlier * (1 + EQUAL) for earlier, later in itertools.pairwise(steps))
