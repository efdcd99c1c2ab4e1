"""Find the fastest plan that fits: build the candidates, solve, decode; on CUDA, as torch's caching allocator serves it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from ..cost.evaluate import CLOSE, capacity_needed, capacity_of, is_replayed, runs_within
from ..cost.memory import MemoryEstimate
from ..cost.timing import TimeEstimate, estimate_time
from ..decision import Batch, UnitLayout
from ..plan import Plan
from ..problem import PlanningProblem, Strategy
from .candidates import Candidate, possible_candidates
from .remedies import infeasible_error
from .solver import Solution, fastest
from .timeline import BatchCosts

_ROUNDS = 6
"""Searches for a plan that the allocator serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A plan with what it is expected to need."""

    plan: Plan
    memory: MemoryEstimate
    time: TimeEstimate

    @property
    def peak_bytes(self) -> int:
        """The plan's peak, with what no tensor can have."""
        assert self.plan.peak_bytes is not None
        return self.plan.peak_bytes


def search(problem: PlanningProblem) -> SearchResult:
    """Return the plan with the most samples a second whose peak stays within the limit less the margin, proven for the cost model.

    The global batch is fixed, so that most samples a second is least time a step. On CUDA the plan also has to run as torch's caching
    allocator serves it, where the description has traces.

    Raises:
        InfeasibleError: no plan fits; it gives the tightest limit that could be met and what would help.
        ValueError: a global batch that the world size does not divide.
    """
    problem = replace(problem, job=replace(problem.job, precision=problem.job.precision.on(problem.hardware.world_size)))
    found = _searched(problem).best()
    if found is None:
        least, needed_bytes = _searched(problem).least()
        raise infeasible_error(problem, least.plan, least.memory, needed_bytes)
    return found


def search_or_floor(problem: PlanningProblem, *, cutoff_s: float = math.inf) -> SearchResult | int:
    """Return what `search` finds below `cutoff_s`, or else a bound below every plan's peak, in bytes; it takes less time than the error."""
    searched, hardware = _searched(problem), problem.hardware
    if (found := searched.best(cutoff_s)) is not None:
        return found
    return hardware.limit_for(min(candidate.floor_bytes for candidate in searched.candidates) + hardware.unavoidable_bytes)


def fastest_without_limit(problem: PlanningProblem) -> float:
    """Return the seconds of a step that no plan of the strategy goes below under any memory limit."""
    return min(candidate.least_s for candidate in _searched(problem).candidates)


def least_memory(problem: PlanningProblem) -> int:
    """Return the tightest limit that some plan of the strategy meets, in bytes of one rank, whatever the problem's own limit.

    What the device reserves and the margin are in it. A ValueError where the world size does not divide the global batch.
    """
    return problem.hardware.limit_for(_searched(problem).least()[1])


class _Search:
    """A problem's candidates, with what searching them has found."""

    def __init__(self, problem: PlanningProblem, costs: dict[Batch, BatchCosts]) -> None:
        self.candidates = possible_candidates(problem, costs)
        self._problem, self._hardware, self._costs = problem, problem.hardware, costs
        self._found: SearchResult | None = None
        self._searched_s = 0.0
        """Nothing else is faster than this."""

    def best(self, cutoff_s: float = math.inf) -> SearchResult | None:
        """Return the best plan, as the allocator serves it where it can be replayed; None where none fits, or none is faster."""
        if self._found is None and cutoff_s > self._searched_s:
            self._found, self._searched_s = self._best(cutoff_s), cutoff_s
        return self._found if self._found is not None and self._found.time.step_s < cutoff_s else None

    def least(self) -> tuple[SearchResult, int]:
        """Return the plan that needs least memory by its estimate, and what it needs of a device, as the allocator serves it."""
        least, hardware = self._least(), self._hardware
        needed, description, job = least.memory.on(hardware), self._problem.description, self._problem.job
        if is_replayed(description, hardware):
            outside = hardware.outside_bytes(least.plan.communicators) + min(0, job.correction_bytes)
            needed = max(needed, capacity_needed(least.plan, description, job) + outside)
        return least, needed

    def _best(self, cutoff_s: float) -> SearchResult | None:
        """Search; where the allocator does not serve the first plan, also in parts of the space, whose plans may miss less."""
        problem = self._problem
        first = self._fastest(cutoff_s=cutoff_s)
        best = self._served(first)
        if problem.strategy is not Strategy.OSDP or first is None or (best is not None and best.time.step_s <= first.time.step_s):
            return best  # no other plan is quicker than the first
        parts = [replace(problem, strategy=one) for one in Strategy if one is not Strategy.OSDP]
        if problem.job.recompute is None and problem.description.recomputable:
            parts += [replace(problem, job=replace(problem.job, recompute=again)) for again in (True, False)]
        for part in parts:
            with suppress(ValueError):  # no group size between 1 and all
                alone = _Search(part, self._costs)
                other = alone._served(alone._fastest(cutoff_s=math.inf if best is None else best.time.step_s))
                if other is not None and (best is None or other.time.step_s < best.time.step_s):
                    best = replace(other, plan=replace(other.plan, strategy=problem.strategy.value, proven_optimal=False))
        return best

    def _served(self, first: SearchResult | None) -> SearchResult | None:
        """Return the fastest plan found that the allocator serves, where it can be replayed; another than the first is not proven optimal.

        Plans for which it never empties its cache come first, and the one that needs least comes last: there is one if any runs.
        """
        problem = self._problem
        if first is None or not is_replayed(problem.description, self._hardware):
            return first
        found = self._first_served(first, retries=False) or self._first_served(first, retries=True)
        if found is None:
            found = self._least()
            if found.memory.on(self._hardware) > problem.room_bytes or self._missing(found, retries=True, exactly=False):
                return None
        if found is not first:
            found = replace(found, plan=replace(found.plan, proven_optimal=False, memory_limit_bytes=problem.memory_limit_bytes))
        return found

    def _first_served(self, first: SearchResult, *, retries: bool) -> SearchResult | None:
        """Search again with less memory by the bytes that were missing, or with half of what was taken last where no plan is left."""
        close, less, too_little, over = int(self._problem.room_bytes * CLOSE), 0, 0, 0
        found: SearchResult | None = first
        too_much: int | None = None
        for _ in range(_ROUNDS):
            if found is None:
                too_much = less
            elif (over := self._missing(found, retries=retries, exactly=too_much is None)) <= 0:
                return found
            else:
                too_little = less
            if too_much is not None and too_much - too_little <= close:
                return None
            less = too_little + max(over, close, 1) if too_much is None else (too_little + too_much) // 2
            found = self._fastest(less_bytes=less)
        return None

    def _missing(self, found: SearchResult, *, retries: bool, exactly: bool) -> int:
        """Return the bytes that the allocator lacks for a plan under the limit, at most 0 where it runs; 1 for any unless `exactly`."""
        plan, description, job = found.plan, self._problem.description, self._problem.job
        capacity = capacity_of(plan, self._hardware, job, self._problem.memory_limit_bytes)
        if retries and not exactly:  # how many are missing takes several replays
            return int(not runs_within(plan, description, job, capacity))
        return capacity_needed(plan, description, job, retries=retries, enough_bytes=capacity) - capacity

    def _fastest(self, *, less_bytes: int = 0, cutoff_s: float = math.inf) -> SearchResult | None:
        """Return the best plan under the limit, or under so many bytes less; None where none fits, or none is faster."""
        problem = self._problem
        limit = self._hardware.tensor_bytes(problem.memory_limit_bytes) - less_bytes
        best: tuple[Candidate, Solution] | None = None
        best_s, proven = cutoff_s, True
        for candidate in sorted(self.candidates, key=lambda candidate: candidate.least_within_s(limit)):
            if candidate.least_within_s(limit) >= best_s:
                break  # bounds only rise from here
            if candidate.floor_bytes > limit:
                continue
            solution = candidate.quickest(limit) or fastest(candidate.timeline, problem.job, limit, cutoff_s=best_s)
            if solution is None:
                candidate.bounds_s[limit] = best_s
                continue
            if solution.proven:
                candidate.bounds_s[limit] = solution.objective
            proven = proven and solution.proven
            if solution.objective < best_s:
                best, best_s = (candidate, solution), solution.objective
        if best is None:
            return None
        candidate, solution = best
        found = _decoded(candidate, solution.layouts, problem.memory_limit_bytes, proven=proven)
        assert found.memory.on(self._hardware) <= problem.room_bytes - less_bytes, "the solver's moments are those of the walk"
        return found

    def _least(self) -> SearchResult:
        """Return the plan that needs least memory by its estimate, communicators included."""
        best: tuple[Candidate, dict[int, UnitLayout], int] | None = None
        for candidate in sorted(self.candidates, key=lambda candidate: candidate.floor_bytes):
            if best is None or (candidate.floor_bytes < best[2] and candidate.any_within(best[2] - 1)):
                best = candidate, *candidate.least()
        assert best is not None
        return _decoded(best[0], best[1], None, proven=False)


@functools.lru_cache(maxsize=2)
def _searched(problem: PlanningProblem) -> _Search:
    """Return the search, which is kept, as choosing how a model is split asks what planning asks again."""
    return _Search(problem, {})


def _decoded(candidate: Candidate, layouts: Mapping[int, UnitLayout], memory_limit_bytes: int | None, *, proven: bool) -> SearchResult:
    """Return a candidate's layouts as a plan."""
    problem, ordered = candidate.problem, [layouts[index] for index in range(len(layouts))]
    memory = candidate.memory(layouts)
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
        proven_optimal=proven,
        hardware=problem.hardware.summary,
        devices_per_node=problem.hardware.devices_per_node,
        local_steps=problem.job.local_steps,
    )
    return SearchResult(plan=plan, memory=memory, time=time)
