"""Find a plan that torch's caching allocator can serve within the limit, as the device enforces it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..cost.correction import Correction
from ..cost.evaluate import CLOSE, capacity_needed, capacity_of
from ..cost.memory import estimate_memory
from ..job import TrainingJob
from ..problem import PlanningProblem
from .result import SearchResult

_ROUNDS = 6


def within_reserved(
    first: SearchResult,
    find: Callable[[TrainingJob], SearchResult | None],
    least: Callable[[], SearchResult | None],
    problem: PlanningProblem,
    *,
    needed: Callable[..., int] = capacity_needed,
) -> SearchResult | None:
    """Return the fastest plan found that the allocator can serve within the limit less the margin.

    Where it cannot, the search is repeated with the bytes that were missing at every moment, until a plan runs; where none is left, with
    half of what was added last. Plans for which the allocator never empties its cache are looked for first.

    Args:
        first: the fastest plan that fits by its estimate.
        find: from a job with more bytes at every moment to that plan; None where there is none.
        least: the plan that needs least, of which there is one where any runs.
        problem: what is searched.
        needed: as `capacity_needed`.

    Returns:
        The plan with the estimates of the problem's job; one that took a second round is not proven to be optimal. None where no
        plan runs.
    """
    description, hardware, job = problem.description, problem.hardware, problem.job

    def missing(found: SearchResult, retries: bool) -> int:
        capacity = capacity_of(found.plan, hardware, job, problem.memory_limit_bytes)
        return needed(found.plan, description, job, retries=retries) - capacity

    for retries in (False, True):
        found = _first_served(first, find, job, int(problem.room_bytes * CLOSE), partial(missing, retries=retries))
        if found is not None:
            break
    else:
        found = least()
        if found is None or missing(found, True) > 0:
            return None
    plan = found.plan
    memory = estimate_memory(description, plan.layouts(description), plan.world_size, job, plan.batch)
    proven = plan.proven_optimal and found is first
    plan = replace(plan, peak_bytes=memory.on(hardware), proven_optimal=proven, memory_limit_bytes=problem.memory_limit_bytes)
    return replace(found, plan=plan, memory=memory)


def _first_served(
    first: SearchResult,
    find: Callable[[TrainingJob], SearchResult | None],
    job: TrainingJob,
    close_bytes: int,
    missing: Callable[[SearchResult], int],
) -> SearchResult | None:
    """Return the first plan that misses nothing; None where there is none."""
    found: SearchResult | None = first
    extra, too_little, over = 0, 0, 0
    too_much: int | None = None
    for _ in range(_ROUNDS):
        if found is None:
            too_much = extra
        elif (over := missing(found)) <= 0:
            return found
        else:
            too_little = extra
        if too_much is not None and too_much - too_little <= close_bytes:
            return None
        extra = too_little + max(over, close_bytes, 1) if too_much is None else (too_little + too_much) // 2
        found = find(Correction(extra_bytes=extra).of_job(job))
    return None
