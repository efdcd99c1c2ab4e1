"""Find the fastest plan that fits: build the candidates, solve, decode."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..cost.memory import MemoryEstimate, estimate_memory
from ..cost.timing import TimeEstimate, estimate_time
from ..decision import Batch, UnitLayout
from ..plan import Plan
from ..problem import PlanningProblem, Strategy
from .candidates import Candidate, possible_candidates
from .integer_model import MIN_GAIN
from .remedies import infeasible_error
from .solver import FastestSearch, Layouts, Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A plan with its estimated memory and time."""

    plan: Plan
    memory: MemoryEstimate
    time: TimeEstimate

    @property
    def peak_bytes(self) -> int:
        """The plan's peak on a device, reserved memory and communicators included."""
        assert self.plan.peak_bytes is not None
        return self.plan.peak_bytes


def search(problem: PlanningProblem) -> SearchResult:
    """Return the plan with the most samples per second whose peak stays within the limit less the margin, with a proof
    by the cost model.

    The global batch is fixed; the plan with the most samples per second is therefore the one with the shortest step.
    With `simplicity`, parts (`Option.parts`) have a price: this share of the shortest step for each. Of the plans with
    the fastest one's batch and no other layouts, return the one with the least sum of step time and prices.

    Raises:
        InfeasibleError: no plan fits; it gives the tightest possible limit and remedies.
        ValueError: the world size does not divide the global batch.
    """
    searched = _searched(problem)
    if searched.simple is None:
        least = searched.least()
        raise infeasible_error(problem, least.plan, least.memory)
    return searched.simple


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


def bounds(problem: PlanningProblem) -> tuple[float, dict[Batch, float]]:
    """Return a lower bound on the step time of every plan, and one by batch, which is infinite where none is known to
    fit.
    """
    searched, by_batch = _searched(problem), dict[Batch, float]()
    best = searched.best()
    for candidate, bound_s in searched.bounds_s.items():
        by_batch[candidate.batch] = min(bound_s, by_batch.get(candidate.batch, math.inf))
    return math.inf if best is None else best.time.step_s * (1 - (best.plan.gap or 0.0)), by_batch


class _Search:
    """A problem's candidates and the results of searching them."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.candidates = possible_candidates(problem)
        self._problem = problem
        self._limit = limit = problem.hardware.tensor_bytes(problem.memory_limit_bytes)
        self.bounds_s = {
            candidate: math.inf if candidate.floor_bytes > limit else candidate.least_s
            for candidate in self.candidates
        }
        """Best known lower bound on the step time of each candidate's plans under the limit, in seconds."""
        self._solvers: dict[Candidate, FastestSearch] = {}
        self._fastest: tuple[SearchResult, Candidate, Solution] | None = None

    def best(self, cutoff_s: float = math.inf) -> SearchResult | None:
        """Return the fastest plan under the limit; None if no plan fits and takes less than `cutoff_s`."""
        self._fastest = self._fastest or self._solve(cutoff_s)
        found = self._fastest and self._fastest[0]
        return found if found is not None and found.time.step_s < cutoff_s else None

    @functools.cached_property
    def simple(self) -> SearchResult | None:
        """The plan with the least sum of step time and prices, see `search`; None if no plan fits."""
        best, simplicity = self.best(), self._problem.simplicity
        if best is None or self._fastest is None or not simplicity or self._problem.strategy is not Strategy.OSDP:
            return best
        _, candidate, solution = self._fastest
        layouts, before, parts = candidate.simpler(solution.layouts, self._limit, simplicity * solution.objective)
        if parts == before:
            return best
        found = _decoded(candidate, layouts, self._problem.memory_limit_bytes, best.plan.gap)
        assert found.peak_bytes <= self._problem.room_bytes, "the solver's moments are those of the walk"
        slower = 100 * max(0.0, found.time.step_s / best.time.step_s - 1)
        counted = f"{parts} layouts, groups of ranks and uses of the host instead of {before}"
        return replace(found, plan=replace(found.plan, simplified=f"{slower:.2f} % slower, {counted}"))

    def least(self) -> SearchResult:
        """Return the plan that needs the least memory, communicators included."""
        best: tuple[Candidate, Layouts, int] | None = None
        for candidate in sorted(self.candidates, key=lambda candidate: candidate.floor_bytes):
            if best is None or candidate.floor_bytes < best[2]:
                found = candidate.least(None if best is None else best[2])
                best = best if found is None else (candidate, *found)
        assert best is not None
        return _decoded(best[0], best[1], None, None)

    def _solve(self, cutoff_s: float) -> tuple[SearchResult, Candidate, Solution] | None:
        """Return the fastest plan; None if none is faster than the cutoff."""
        best: tuple[Candidate, Solution] | None = None
        best_s = bound_s = cutoff_s
        waiting = [(bound, number) for number, bound in enumerate(self.bounds_s.values())]
        heapq.heapify(waiting)
        while waiting and waiting[0][0] < best_s:
            _, number = heapq.heappop(waiting)
            candidate = self.candidates[number]
            solution = candidate.quickest(self._limit)
            if solution is None:
                if candidate not in self._solvers:
                    self._solvers[candidate] = solver = candidate.solver(self._limit)
                    self.bounds_s[candidate] = max(solver.bound_s, self.bounds_s[candidate])
                    heapq.heappush(waiting, (self.bounds_s[candidate], number))  # another may now come first
                    continue
                solution = self._solvers[candidate].run(best_s)
                known_s = best_s * (1 - MIN_GAIN) if solution is None else solution.bound
                self.bounds_s[candidate] = max(known_s, self.bounds_s[candidate])
            if solution is not None:
                bound_s = min(bound_s, solution.bound)
                if solution.objective < best_s:
                    best, best_s = (candidate, solution), solution.objective
        if best is None:
            return None
        candidate, solution = best
        found = _decoded(candidate, solution.layouts, self._problem.memory_limit_bytes, max(0.0, 1 - bound_s / best_s))
        assert found.peak_bytes <= self._problem.room_bytes, "the solver's moments are those of the walk"
        assert found.memory.host_bytes <= candidate.timeline.host_limit_bytes, "the solver's host bytes are the walk's"
        return found, candidate, solution


@functools.lru_cache(maxsize=4)
def _searched(problem: PlanningProblem) -> _Search:
    """Return the search of a problem.

    It is cached because `choose_description` and the planning after it search the same problem.
    """
    return _Search(problem)


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
