"""Solve the integer program of `program.py` to a proven optimum by branch and bound. The objective is the seconds of a
step.

The linear relaxation bounds the time of every plan from below. Its reduced costs bound how much an option adds at
least, and exclude most options (reduced-cost fixing: Dantzig, Fulkerson, Johnson 1954). If its solution exceeds the
limit at a moment without a constraint, the search branches on how many units take options of this class
(`pattern.py`). Otherwise SCIP solves the relaxation over whole numbers, and the walk through a step
(`cost/moments.py`) checks the solution. If it does not fit, or SCIP finds none, CP-SAT solves the node.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from ..decision import UnitLayout
from ..training_job import TrainingJob
from .integer_model import MIN_GAIN, Relaxation
from .options import Option, Timeline, UnitGroup, undominated
from .pattern import MissedMoment, Pattern, missed
from .program import Program

_RESOLUTION = 2**40
"""Integer steps into which the largest possible objective is divided."""
_FEW, _MORE = 12, 4
"""Options of each group in the search for a first plan, and the factor by which they grow while none is found."""
_FIRST_GAP = 1e-3
"""Relative gap of the search for a first plan, which only bounds the search after it."""
_MOST_NODES, _MOST_WORK, _SIMPLE_WORK = 100, 8.0, 0.5
"""Limits of one search: nodes of branch and bound; CP-SAT's work, in all and to find a simpler plan. Beyond them the
search returns its best plan, with the gap that it proved. Work is in CP-SAT's deterministic seconds: no limit depends
on a clock, so that equal problems always give equal plans."""
_ROUNDING = 2**22
"""Rounding error of a bound of the linear solver, in steps of the objective."""
Kept: TypeAlias = dict[UnitGroup, set[Option]]
"""Remaining options of each group."""
Patterns: TypeAlias = dict[tuple[int, ...], Pattern]
"""Pattern of each row of several equal units, by the indices of the units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Layouts that the solver found."""

    layouts: dict[int, UnitLayout]
    """Layout of each unit, by index."""
    objective: float
    """Sum of the options' seconds in a step."""
    bound: float
    """Proven lower bound on the objective of every plan."""


def any_within(
    timeline: Timeline, job: TrainingJob, limit_bytes: int, most_work: float = math.inf
) -> dict[int, UnitLayout] | None:
    """Return some layouts with every moment within the limit; None if there are none, or CP-SAT finds none within
    `most_work`.
    """
    meshes = timeline.communicator_bytes > 0
    frugal = {group: set(undominated(group.options, by_memory=True, meshes=meshes)) for group in timeline.groups}
    found = Program(timeline.keeping(frugal), job, limit_bytes).solve(most_work)
    return None if found is None else found[0]


def simplest(
    timeline: Timeline, job: TrainingJob, limit_bytes: int, layouts: Mapping[int, UnitLayout], price_s: float
) -> Mapping[int, UnitLayout]:
    """Return the layouts with the least sum of seconds and a price for each part of the plan (`Option.parts`), or the
    given ones if CP-SAT finds none that are as good within `_SIMPLE_WORK`.
    """
    seconds, parts = sum(o.seconds for o in timeline.chosen(layouts)), timeline.count_parts(layouts)
    scale = _RESOLUTION / seconds
    program = Program(timeline, job, limit_bytes)
    program.minimize_seconds(scale, int((seconds + price_s * parts) * scale * (1 + MIN_GAIN)), price_s)
    solved = program.solve(_SIMPLE_WORK)
    return layouts if solved is None else solved[0]


class _Node(NamedTuple):
    """A node of the search tree. Nodes are ordered by bound, then by number."""

    bound: float
    number: int
    kept: Kept
    patterns: Patterns


class BranchAndBound:
    """Searches of one timeline by branch and bound; costs are in steps of the objective. `fits` says whether layouts
    fit the limit and the host.
    """

    def __init__(
        self, timeline: Timeline, job: TrainingJob, limit_bytes: int, fits: Callable[[Mapping[int, UnitLayout]], bool]
    ) -> None:
        self._timeline, self._job, self._limit, self._fits = timeline, job, limit_bytes, fits
        self._groups = {group.units: group for group in timeline.groups}
        largest = (
            sum(len(group.units) * max(option.seconds for option in group.options) for group in timeline.groups) or 1.0
        )
        self._scale, self._numbers = _RESOLUTION / largest, itertools.count()
        self._every = {group: set(group.options) for group in timeline.groups}
        program = self._program(self._every, {}, linear=True)
        self._root = program.relax()
        bound = math.inf if program.infeasible else 0.0 if self._root is None else self._root.bound
        self.bound_s = bound / self._scale
        """Lower bound on the seconds of every plan, by the relaxation with every option; infinite if no plan fits."""

    def run(self, cutoff_s: float = math.inf) -> Solution | None:
        """Return the fastest layouts with every moment within the limit; None if no plan both fits and is faster than
        the cutoff.

        If too much work would be left, the result is the best plan so far; without a plan it has no layouts and an
        infinite objective.
        """
        self._best, self._left, self._gap = cutoff_s * self._scale, math.inf, 0.0
        """Cost of the best plan or the cutoff, least bound of the nodes left out, relative gap of the search."""
        self._work = _MOST_WORK
        self._found: Solution | None = None
        every, relaxed = self._every, self._root
        if relaxed is None:
            if self.bound_s < math.inf:
                self._solve(every, {}, 0.0)
        else:
            few = _FEW
            while self._best == math.inf and few < max(map(len, every.values())):
                first = {
                    self._groups[group.units]: set(sorted(group.options, key=added.__getitem__)[:few])
                    for group, added in relaxed.added.items()
                }
                self._explore(relaxed.bound, first, _FIRST_GAP)
                few *= _MORE
            self._left = math.inf  # this search includes what the first one left out
            self._explore(relaxed.bound, self._worthwhile(relaxed), 0.0)
        if self._left < self._best:
            if self._best == math.inf:
                self._take_any()
            return replace(
                self._found or Solution(layouts={}, objective=math.inf, bound=0.0), bound=self._left / self._scale
            )
        return self._found

    def _explore(self, bound: float, kept: Kept, gap: float) -> None:
        """Search these options until no remaining node can be faster by more than the relative gap."""
        self._open: list[_Node] = []
        self._gap = gap
        self._push(
            bound,
            kept,
            {group.units: Pattern.undecided(group) for group in self._timeline.groups if len(group.units) > 1},
        )
        for visited in itertools.count():
            if not self._open:
                return
            node = heapq.heappop(self._open)
            if visited == _MOST_NODES or self._work <= 0 or self._is_slow(node.bound):
                self._left = min(self._left, node.bound)
                return
            self._visit(node)

    def _visit(self, node: _Node) -> None:
        """Bound a node over real, then over whole numbers; branch if an unconstrained moment exceeds the limit,
        else check the solution.
        """
        kept = node.kept
        for whole in (False, True):
            program = self._program(kept, node.patterns, linear=True, cheaper=self._found is None)
            relaxed = program.relax(gap=max(self._gap, MIN_GAIN) if whole else None)
            if relaxed is None:
                if not program.infeasible:
                    self._solve(kept, node.patterns, node.bound)
                return
            if self._is_slow(relaxed.bound):
                self._leave(relaxed.bound)
                return
            node = node._replace(bound=relaxed.bound)
            kept = kept if whole else self._worthwhile(relaxed)
            worst = [
                (found, units)
                for units, row in program.rows.items()
                if (found := missed(row, relaxed, self._limit)) is not None
            ]
            if worst:
                found, units = max(worst)
                self._branch(node._replace(kept=kept), units, found)
                return
        assert relaxed is not None
        layouts = program.layouts(relaxed)
        if not self._fits(layouts):
            self._solve(kept, node.patterns, node.bound)
            return
        self._take(layouts, sum(round(option.seconds * self._scale) for option in self._timeline.chosen(layouts)))
        if self._gap or not relaxed.optimal:
            self._leave(node.bound)

    def _leave(self, bound: float) -> None:
        """Leave out a node with this bound."""
        self._left = min(self._left, bound)

    def _take_any(self) -> None:
        """Adopt any plan that fits, because the search gave up before it found one."""
        layouts = any_within(self._timeline, self._job, self._limit)
        if layouts is not None:
            seconds = sum(option.seconds for option in self._timeline.chosen(layouts))
            self._found = Solution(layouts=layouts, objective=seconds, bound=seconds)

    def _is_slow(self, bound: float) -> bool:
        """Return whether a node with this bound can be skipped."""
        return bound > self._best * (1 - self._gap) + _ROUNDING

    def _branch(self, node: _Node, units: tuple[int, ...], found: MissedMoment) -> None:
        """Split a node in two: at most `found.at_most` units of the row take the class, or more do."""
        fewer, more = node.patterns[units].split(self._groups[units], found.number, found.at_most)
        group, less = self._groups[units], node.kept
        if found.at_most == 0:
            less = less | {group: {option for option in less[group] if fewer.classes[option] != found.number}}
        if less[group]:
            self._push(node.bound, less, node.patterns | {units: fewer})
        self._push(node.bound, node.kept, node.patterns | {units: more})

    def _push(self, bound: float, kept: Kept, patterns: Patterns) -> None:
        heapq.heappush(self._open, _Node(bound, next(self._numbers), kept, patterns))

    def _worthwhile(self, relaxed: Relaxation) -> Kept:
        """Return the options that a plan faster than the best may take, at least one of each group."""
        slack = self._best - relaxed.bound + _ROUNDING
        return {
            self._groups[group.units]: {o for o, cost in added.items() if cost <= slack}
            or {min(added, key=added.__getitem__)}
            for group, added in relaxed.added.items()
        }

    def _program(self, kept: Kept, patterns: Patterns, *, linear: bool = False, cheaper: bool = False) -> Program:
        """Return the program of all plans; with `cheaper`, of those that are faster than the best so far."""
        program = Program(self._timeline.keeping(kept), self._job, self._limit, linear=linear, patterns=patterns)
        below = cheaper and self._best < math.inf
        program.minimize_seconds(
            self._scale, max(-1, int(self._best) - 1 - int(self._best * MIN_GAIN)) if below else None
        )
        return program

    def _solve(self, kept: Kept, patterns: Patterns, bound: float) -> None:
        """Solve a node of this bound by CP-SAT alone."""
        program = self._program(kept, patterns, cheaper=True)
        solved = program.solve(max(0.01, self._work))
        self._work -= program.work
        if solved is not None:
            self._take(*solved[:2])
        if not (program.infeasible or (solved is not None and solved[2])):
            self._leave(bound)

    def _take(self, layouts: dict[int, UnitLayout], cost: float) -> None:
        """Adopt layouts that fit if they cost less than the best so far."""
        if cost < self._best:
            seconds = cost / self._scale
            self._found, self._best = Solution(layouts=layouts, objective=seconds, bound=seconds), cost
