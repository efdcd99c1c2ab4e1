"""Search the simplest plan near the fastest one: the plan of fewest parts (`Option.parts`), and of those the fastest.

The least number of parts of plans from the fastest plan's own layouts is found by bisection. Then the same branch and
bound searches all layouts for plans of fewer parts, until none is left, and at last for a faster plan of as many. Its
work is limited in proportion to that of the search for the fastest plan; no limit depends on a clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from ..decision import UnitLayout
from .candidates import ROUNDED, Candidate
from .solver import BranchAndBound, Kept


class Found(NamedTuple):
    """A plan of a candidate."""

    candidate: Candidate
    layouts: Mapping[int, UnitLayout]
    seconds: float
    parts: frozenset[Hashable]


class SimplestSearch:
    """Searches for plans of few parts below a step time, among candidates by rising bound."""

    def __init__(self, near: Sequence[Candidate], limit_bytes: int, cutoff_s: float, most_work: float) -> None:
        self._near, self._limit, self._cutoff_s, self._work = near, limit_bytes, cutoff_s, most_work
        self._solvers: dict[Candidate, BranchAndBound] = {}

    def near(self, fastest: Found) -> tuple[Found, bool]:
        """Return the simplest plan found, and whether it is proven that no other is simpler, or as simple and
        faster.
        """
        best = self._of_its_layouts(fastest)
        fewest = as_fast = True
        exhausted = best is fastest
        while len(best.parts) > fastest.candidate.timeline.least_parts:
            fewer, fewest = self._search(self._cutoff_s, len(best.parts) - 1)
            if fewer is None:
                break
            best, exhausted = fewer, fewest
        if not exhausted:
            faster, as_fast = self._search(best.seconds, len(best.parts))
            best = faster or best
        return best, fewest and as_fast

    def _of_its_layouts(self, best: Found) -> Found:
        """Return the plan of fewest parts with no other layouts than those of the fastest plan."""
        timeline = best.candidate.alike
        own = {group: {o for o in group.options if o.parts <= best.parts} for group in timeline.groups}
        if not all(own.values()):
            return best
        solver, least = self._solver(best.candidate, own), timeline.least_parts
        while least < len(best.parts) and self._work > 0:
            middle = (least + len(best.parts)) // 2
            fewer, _ = self._run(best.candidate, solver, self._cutoff_s, middle)
            if fewer is None:
                least = middle + 1
            else:
                best = fewer
        return best

    def _search(self, cutoff_s: float, most_parts: int) -> tuple[Found | None, bool]:
        """Return the fastest plan of at most so many parts below the cutoff, and whether none is faster."""
        best, proven = None, True
        for candidate in self._near:
            if self._work <= 0:
                return best, False
            if candidate not in self._solvers:
                self._solvers[candidate] = self._solver(candidate)
            found, complete = self._run(candidate, self._solvers[candidate], cutoff_s, most_parts)
            proven = proven and complete
            if found is not None:
                best, cutoff_s = found, found.seconds
        return best, proven

    def _solver(self, candidate: Candidate, kept: Kept | None = None) -> BranchAndBound:
        timeline = candidate.alike if kept is None else candidate.alike.keeping(kept)
        solver = BranchAndBound(timeline, candidate.problem.job, self._limit)
        self._work -= solver.work
        return solver

    def _run(
        self, candidate: Candidate, solver: BranchAndBound, cutoff_s: float, most_parts: int
    ) -> tuple[Found | None, bool]:
        """Search one candidate; see `_search`."""
        if solver.bound_s * (1 - ROUNDED) >= cutoff_s:
            return None, True
        before = solver.work
        solution = solver.run(cutoff_s, most_parts, self._work)
        self._work -= solver.work - before
        if solution is None:
            return None, True
        if not solution.layouts:
            return None, False
        parts = candidate.alike.plan_parts(solution.layouts)
        return Found(candidate, solution.layouts, solution.objective, parts), solution.proven
