"""Memory against throughput: plans of which none is better in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..problem import PlanningProblem
from .result import SearchResult
from .search import least_memory, search

POINTS = 16
"""Searches of one front, unless the caller wants another number: enough for a curve, and a few seconds at most."""
_NEAR = 1.01
"""Plans nearer than this ratio of memory are the same to a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Limits between which the front is not known: `low` is the fastest up to `low_bytes`, `high` from its own peak."""

    low_bytes: int
    low: SearchResult
    high: SearchResult

    @property
    def size(self) -> float:
        """How much is not known: the gap's area by ratios, 0 where it is too narrow to ask."""
        memory, rate = self.high.peak_bytes / self.low_bytes, self.low.time.step_s / self.high.time.step_s
        return 0.0 if memory < _NEAR or rate <= 1 else math.log(memory) * math.log(rate)


def frontier(problem: PlanningProblem, *, points: int = POINTS, at: Sequence[int] = ()) -> tuple[SearchResult, ...]:
    """Return points of the Pareto front of peak memory and throughput, from the least memory that any plan needs to the problem's limit.

    Each point is the fastest plan under some limit (the ε-constraint method: Haimes, Lasdon, Wismer 1971). Limits are put
    where most is not known yet: in the middle, by ratio, of the gap with the largest product of memory and throughput.

    Limits are here what a plan may fill: the margin is left out of them.

    Args:
        problem: what is searched; its limit is the highest one.
        points: at most so many searches, those of `at` aside.
        at: limits that are searched in any case, such as the peaks of other plans, which the front is then not below.

    Returns:
        Search results by rising peak and rising throughput; equal ones only once.

    Raises:
        InfeasibleError: nothing fits the problem's limit.
        ValueError: fewer than two points, or what `search` refuses.
    """
    if points < 2:
        raise ValueError(f"points={points} must be at least 2, the two ends of the front.")
    problem = replace(problem, hardware=problem.hardware.with_margin(0.0))

    def fastest(limit: int) -> SearchResult:
        return search(replace(problem, memory_limit_bytes=limit))

    last = search(problem)
    least = least_memory(problem)
    found = [fastest(least), last]
    gaps = [_Gap(low_bytes=least, low=found[0], high=last)]

    def split(gap: _Gap, limit: int) -> None:
        found.append(fastest(limit))
        gaps.remove(gap)
        below = _Gap(low_bytes=gap.low_bytes, low=gap.low, high=found[-1])
        gaps.extend((below, _Gap(low_bytes=limit, low=found[-1], high=gap.high)))

    for limit in at:
        if gap := next((g for g in gaps if g.low_bytes < limit < g.high.peak_bytes), None):
            split(gap, limit)
    for _ in range(points - 2):
        widest = max(gaps, key=lambda gap: gap.size)
        if widest.size == 0:
            break
        split(widest, int(math.sqrt(widest.low_bytes * widest.high.peak_bytes)))
    return not_dominated(found)


def not_dominated(results: Sequence[SearchResult]) -> tuple[SearchResult, ...]:
    """Return those to which no other is equal or better in both peak and step time, by rising peak."""
    front: list[SearchResult] = []
    for result in sorted(results, key=lambda r: (r.peak_bytes, r.time.step_s)):
        if not front or result.time.step_s < front[-1].time.step_s:
            front.append(result)
    return tuple(front)
