"""Find the fastest plan that fits: build the candidates, solve, decode."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, replace

from ..cost.memory import MemoryEstimate, estimate_memory
from ..cost.timing import TimeEstimate, estimate_time
from ..decision import UnitLayout
from ..plan import Plan
from ..problem import PlanningProblem, Strategy
from .candidates import ROUNDED, Candidate, possible_candidates
from .options import HOST
from .remedies import infeasible_error
from .simplest import Found, SimplestSearch
from .solver import BranchAndBound, Solution

_LEAST_WORK = 1.5
"""Seconds of work that the search for a simple plan may always take; where the search for the fastest plan took more
than twice as long, half of that; the last program may take it further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A plan with its estimated memory and time."""

    plan: Plan
    memory: MemoryEstimate
    time: TimeEstimate
    fastest: SearchResult | None = None
    """The fastest plan, if a simpler one was taken instead."""

    @property
    def peak_bytes(self) -> int:
        """The plan's peak on a device, reserved memory and communicators included."""
        assert self.plan.peak_bytes is not None
        return self.plan.peak_bytes


def search(problem: PlanningProblem) -> SearchResult:
    """Return the plan with the most samples per second whose peak stays within the limit less the margin, with a proof
    by the cost model.

    The global batch is fixed; the plan with the most samples per second is therefore the one with the shortest step.
    With `simplicity`, return the simplest plan whose step is longer by at most this share: the one of fewest parts,
    and of those the fastest.

    Raises:
        InfeasibleError: no plan fits; it gives the tightest possible limit and remedies.
        ValueError: the world size does not divide the global batch.
    """
    searched = _searched(problem)
    if searched.simplest is None:
        least = searched.least()
        raise infeasible_error(problem, least.plan, least.memory)
    return searched.simplest


def search_or_floor(problem: PlanningProblem, *, cutoff_s: float = math.inf) -> SearchResult | int:
    """Return the fastest plan if its step is below `cutoff_s`, else a lower bound on the limit that any plan
    needs, in bytes.

    The bound takes less time than the `InfeasibleError` of `search`.
    """
    searched, hardware = _searched(problem), problem.hardware
    if (found := searched.best(cutoff_s)) is not None:
        return found
    return hardware.limit_for(
        min(candidate.floor_bytes for candidate in searched.candidates) + hardware.unavoidable_bytes
    )


def fastest_without_limit(problem: PlanningProblem) -> float:
    """Return a lower bound on the step time of the strategy's plans under any memory limit, in seconds."""
    return min(candidate.least_s for candidate in _searched(problem).candidates)


def least_memory(problem: PlanningProblem) -> int:
    """Return the tightest limit that some plan of the strategy meets, in bytes of one rank; the problem's own limit
    does not matter.

    Reserved memory of the device and the margin are included.

    Raises:
        ValueError: the world size does not divide the global batch.
    """
    return problem.hardware.limit_for(_searched(problem).least().peak_bytes)


def frugal_memory(problem: PlanningProblem) -> float:
    """Return the tightest limit that a plan of each unit's most frugal option meets, in bytes of one rank; inf if none
    fits the host. It is at least that of `least_memory`, mostly equal, and needs no solver.
    """
    plans = ((candidate, candidate.frugal()) for candidate in _searched(problem).candidates)
    needed = [one.needed_bytes(layouts) for one, layouts in plans if one.timeline.fits_host(layouts)]
    return problem.hardware.limit_for(min(needed) + problem.hardware.unavoidable_bytes) if needed else math.inf


class _Search:
    """A problem's candidates and the results of searching them."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.candidates = possible_candidates(problem)
        self._problem = problem
        self._limit = limit = problem.hardware.tensor_bytes(problem.memory_limit_bytes)
        self._bounds_s = {
            candidate: math.inf if candidate.floor_bytes > limit else candidate.least_s
            for candidate in self.candidates
        }
        """Best known lower bound on the step time of each candidate's plans under the limit, in seconds."""
        self._solvers: dict[Candidate, BranchAndBound] = {}
        self._found: SearchResult | None = None
        self._fastest: Found | None = None

    def best(self, cutoff_s: float = math.inf) -> SearchResult | None:
        """Return the fastest plan under the limit; None if no plan fits and takes less than `cutoff_s`."""
        if self._found is None and (solved := self._solve(cutoff_s)) is not None:
            self._found, self._fastest = solved
        return self._found if self._found is not None and self._found.time.step_s < cutoff_s else None

    @functools.cached_property
    def simplest(self) -> SearchResult | None:
        """The plan of fewest parts whose step is longer than the fastest plan's by at most the `simplicity` asked
        for.
        """
        best, fastest, simplicity = self.best(), self._fastest, self._problem.simplicity
        if best is None or fastest is None or not simplicity or self._problem.strategy is not Strategy.OSDP:
            return best
        cutoff_s = best.time.step_s * (1 + simplicity)
        near = sorted((bound, number) for number, bound in enumerate(self._bounds_s.values()) if bound < cutoff_s)
        work = sum(solver.work for solver in self._solvers.values())
        found, proven = SimplestSearch(
            [self.candidates[number] for _, number in near], self._limit, cutoff_s, max(work / 2, _LEAST_WORK)
        ).near(fastest)
        if found is fastest:
            return replace(best, plan=replace(best.plan, proven_simplest=proven))
        simple = _decoded(found.candidate, found.layouts, self._problem.memory_limit_bytes, best.plan.gap)
        plan = replace(
            simple.plan, proven_simplest=proven, simplified=_gained(best, simple, fastest.parts, found.parts)
        )
        return replace(simple, plan=plan, fastest=best)

    def least(self) -> SearchResult:
        """Return the plan that needs the least memory, communicators included."""
        best: tuple[Candidate, dict[int, UnitLayout], int] | None = None
        for candidate in sorted(self.candidates, key=lambda candidate: candidate.floor_bytes):
            if best is None or (candidate.floor_bytes < best[2] and candidate.any_within(best[2] - 1) is not None):
                best = candidate, *candidate.least()
        assert best is not None
        return _decoded(best[0], best[1], None, None)

    def _solve(self, cutoff_s: float) -> tuple[SearchResult, Found] | None:
        """Return the fastest plan; None if none is faster than the cutoff."""
        best: tuple[Candidate, Solution] | None = None
        best_s = bound_s = cutoff_s
        waiting = [(bound, number) for number, bound in enumerate(self._bounds_s.values())]
        heapq.heapify(waiting)
        while waiting and waiting[0][0] < best_s:
            _, number = heapq.heappop(waiting)
            candidate = self.candidates[number]
            solution = candidate.quickest(self._limit)
            if solution is None:
                if candidate not in self._solvers:
                    self._solvers[candidate] = solver = BranchAndBound(
                        candidate.timeline, self._problem.job, self._limit
                    )
                    self._bounds_s[candidate] = max(solver.bound_s * (1 - ROUNDED), self._bounds_s[candidate])
                    heapq.heappush(waiting, (self._bounds_s[candidate], number))  # another may now come first
                    continue
                solution = self._solvers[candidate].run(best_s)
            if solution is not None:
                bound_s = min(bound_s, solution.bound)
                if solution.objective < best_s:
                    best, best_s = (candidate, solution), solution.objective
        if best is None:
            return None
        candidate, solution = best
        found = _decoded(candidate, solution.layouts, self._problem.memory_limit_bytes, max(0.0, 1 - bound_s / best_s))
        assert found.peak_bytes <= self._problem.room_bytes, "the solver's moments are those of the walk"
        assert candidate.timeline.fits_host(solution.layouts), "the solver's host bytes are those of the timeline"
        parts = candidate.timeline.plan_parts(solution.layouts)
        return found, Found(candidate, solution.layouts, best_s, parts)


@functools.lru_cache(maxsize=4)
def _searched(problem: PlanningProblem) -> _Search:
    """Return the search of a problem.

    It is cached because `choose_description` and the planning after it search the same problem.
    """
    return _Search(problem)


def _gained(fastest: SearchResult, found: SearchResult, its: Set[Hashable], parts: Set[Hashable]) -> str:
    """Return how much faster the fastest plan is, and what it has instead: `0.35 % slower than the fastest plan found,
    which has 5 layouts instead of 4`.
    """
    slower = 100 * (found.time.step_s / fastest.time.step_s - 1)
    many, few = (
        sum(isinstance(part, tuple) and isinstance(part[1], UnitLayout) for part in one) for one in (its, parts)
    )
    groups = fastest.plan.communicators - found.plan.communicators
    differs = (
        f"{many} layouts instead of {few}" if many != few else "",
        f"{abs(groups)} {'more' if groups > 0 else 'fewer'} communicators" if groups else "",
        f"{'something' if HOST in its else 'nothing'} on the host" if HOST in its ^ parts else "",
    )
    share = f"{slower:.2f} %" if slower >= 0.005 else "less than 0.01 %"
    return f"{share} slower than the fastest plan found, which has {' and '.join(filter(None, differs))}"


def _decoded(
    candidate: Candidate, layouts: Mapping[int, UnitLayout], memory_limit_bytes: int | None, gap: float | None
) -> SearchResult:
    """Return a candidate's layouts as a plan."""
    problem, ordered = candidate.problem, [layouts[index] for index in range(len(layouts))]
    memory = estimate_memory(problem.description, ordered, problem.hardware.world_size, problem.job, candidate.batch)
    time = estimate_time(problem.description, ordered, problem.hardware, problem.job, candidate.batch)
    plan = Plan.of(
        problem.description,
        ordered,
        candidate.batch,
        world_size=problem.hardware.world_size,
        strategy=problem.strategy.value,
        memory_limit_bytes=memory_limit_bytes,
        peak_bytes=memory.on(problem.hardware),
        step_s=time.step_s,
        proven_optimal=gap == 0,
        gap=gap,
        hardware=problem.hardware.summary,
        devices_per_node=problem.hardware.devices_per_node,
    )
    return SearchResult(plan=plan, memory=memory, time=time)
