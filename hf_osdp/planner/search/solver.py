"""Solve the integer program of `program.py` to a proven optimum by branch and bound. The objective is the seconds of a
step.

Bytes are in coarse units, rounded so that no moment of a plan has more than it takes (`Timeline.in_units`), and
seconds are rounded down. So what the program calls infeasible is infeasible, and its optimum bounds the time of every
plan from below. The walk through a step (`cost/moments.py`) says what fits, to the byte. Where a plan fits by the
program alone, a gap is left, and the search goes on in finer units.

The linear relaxation's reduced costs bound how much an option adds at least, and exclude most options (reduced-cost
fixing: Dantzig, Fulkerson, Johnson 1954). If its solution exceeds the limit at a moment without a constraint, the
search branches on how many units take options of this class (`pattern.py`). Otherwise CP-SAT solves the node.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..decision import UnitLayout
from ..training_job import TrainingJob
from .integer_model import MIN_GAIN, Relaxation
from .options import Option, Timeline, UnitGroup, undominated
from .pattern import MissedMoment, Pattern, missed
from .program import Program

if TYPE_CHECKING:
    from .integer_model import Count

_RESOLUTION = 2**30
"""Whole numbers into which the seconds of each unit's fastest option are divided, all together."""
_COARSE, _FINE = 28, 31
"""Binary digits of the limit in the first units of a search, and in its finest. With 20, many plans fit by rounding
alone."""
_FEW, _MORE = 12, 4
"""Options of each group in the search for a first plan, and the factor by which they grow while none is found."""
_FIRST_GAP = 1e-3
"""Relative gap of the search for a first plan, which only bounds the search after it."""
_LOWERED = 3
"""Tries to find a plan that fits where only rounding lets one fit: each under a limit lower by what was missing."""
_MOST_NODES, _MOST_WORK, _MOST_OF_ONE, _SIMPLE_WORK = 100, 6.0, 1.5, 0.5
"""Limits of one search: nodes of branch and bound; CP-SAT's work, in all, in one call, and to find a simpler plan.
Beyond them the search returns its best plan, with the gap that it proved. Work is in CP-SAT's deterministic seconds:
no limit depends on a clock, so that equal problems always give equal plans."""
Kept: TypeAlias = dict[UnitGroup, set[Option]]
"""Remaining options of each group."""
Patterns: TypeAlias = dict[tuple[int, ...], Pattern]
"""Pattern of each row of several equal units, by the indices of the units."""
Layouts: TypeAlias = Mapping[int, UnitLayout]
Needed: TypeAlias = Callable[[Layouts], tuple[int, int]]
"""A plan's bytes on a device and on its host, by the walk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Layouts that the solver found."""

    layouts: Layouts
    """Layout of each unit, by index."""
    objective: float
    """Sum of the options' seconds in a step."""
    bound: float
    """Proven lower bound on the objective of every plan."""


def any_within(
    timeline: Timeline, job: TrainingJob, limit_bytes: int, needed: Needed, most_work: float = math.inf
) -> Layouts | None:
    """Return some layouts with every moment within the limit; None if there are none, or CP-SAT finds none within
    `most_work`.
    """
    meshes = timeline.communicator_bytes > 0
    frugal = timeline.keeping(
        {group: set(undominated(group.options, by_memory=True, meshes=meshes)) for group in timeline.groups}
    )
    for size in (*_sizes(limit_bytes), 1):
        found = Program(frugal.in_units(size), job, limit_bytes // size).solve(most_work)
        if found is None or fit(timeline, needed(found), limit_bytes):
            return found
    raise AssertionError("the program's moments in bytes are those of the walk")


def least_limit(timeline: Timeline, job: TrainingJob, limit_bytes: int) -> int:
    """Return a lower bound on the peak of every plan in bytes, up to `limit_bytes`, which some plan meets."""
    size = next(_sizes(limit_bytes))
    program = Program(timeline.in_units(size), job, limit_bytes // size, linear=True, lowest=True)
    program.minimize_limit()
    relaxed = program.relax()
    return 0 if relaxed is None else relaxed.bound * size


def simplest(
    timeline: Timeline, job: TrainingJob, limit_bytes: int, needed: Needed, layouts: Layouts, price_s: float
) -> Layouts:
    """Return the layouts with the least sum of seconds and a price for each part of the plan (`Option.parts`), or the
    given ones if CP-SAT finds none that are as good within `_SIMPLE_WORK`.
    """
    seconds, parts = sum(o.seconds for o in timeline.chosen(layouts)), timeline.count_parts(layouts)
    scale = _RESOLUTION / seconds
    for size in _sizes(limit_bytes):
        program = Program(timeline.in_units(size), job, limit_bytes // size)
        program.minimize_seconds(scale, int((seconds + price_s * parts) * scale * (1 + MIN_GAIN)), price_s)
        solved = program.solve(_SIMPLE_WORK)
        if solved is not None and fit(timeline, needed(solved), limit_bytes):
            return solved
    return layouts


def fit(timeline: Timeline, needed: tuple[int, int], limit_bytes: int) -> bool:
    """Return whether these bytes fit the device and the host."""
    return needed[0] <= limit_bytes and needed[1] <= timeline.host_limit_bytes


def _sizes(limit_bytes: int) -> Iterator[int]:
    """Yield the units of a search in bytes, the coarsest first."""
    return iter(dict.fromkeys(max(1, limit_bytes >> digits) for digits in (_COARSE, _FINE)))


class _Node(NamedTuple):
    """A node of the search tree. Nodes are ordered by bound, then by number."""

    bound: float
    number: int
    kept: Kept
    patterns: Patterns


class BranchAndBound:
    """Searches of one timeline by branch and bound, in units of `size` bytes; costs are in steps of the objective.
    `needed` says what a plan needs.
    """

    def __init__(
        self, timeline: Timeline, job: TrainingJob, limit_bytes: int, needed: Needed, size: int | None = None
    ) -> None:
        self._in_bytes, self._job, self._limit_bytes, self._needed = timeline, job, limit_bytes, needed
        self._size = size or next(_sizes(limit_bytes))
        self._timeline, self._limit = timeline.in_units(self._size), limit_bytes // self._size
        self._groups = {group.units: group for group in self._timeline.groups}
        least_s = sum(len(group.units) * min(o.seconds for o in group.options) for group in timeline.groups)
        self._scale, self._numbers = _RESOLUTION / (least_s or 1.0), itertools.count()
        self._every = {group: set(group.options) for group in self._timeline.groups}
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
        self._work, self._is_rounded = _MOST_WORK, False
        self._found: Solution | None = None
        every, relaxed = self._every, self._root
        if relaxed is None:
            if self.bound_s < math.inf:
                self._solve(_Node(0.0, next(self._numbers), every, {}), whole=True)
        else:
            few = _FEW
            while few < max(map(len, every.values())):
                first = {
                    self._groups[group.units]: set(sorted(group.options, key=added.__getitem__)[:few])
                    for group, added in relaxed.added.items()
                }
                self._explore(relaxed.bound, first, _FIRST_GAP)
                if self._best < math.inf:
                    break
                few *= _MORE
            self._left = math.inf  # this search includes what the first one left out
            self._explore(relaxed.bound, self._worthwhile(relaxed), 0.0)
        if self._left >= self._best * (1 - MIN_GAIN):
            return self._found
        if self._is_rounded and (finer := [size for size in _sizes(self._limit_bytes) if size < self._size]):
            return self._refined(finer[0], cutoff_s)
        if self._best == math.inf:
            self._take_any()
        found = self._found or Solution(layouts={}, objective=math.inf, bound=0.0)
        return replace(found, bound=self._left / self._scale)

    def _refined(self, size: int, cutoff_s: float) -> Solution | None:
        """Return the result of a search in units of this size, for plans faster than the best so far."""
        best_s = cutoff_s if self._found is None else self._found.objective
        finer = BranchAndBound(self._in_bytes, self._job, self._limit_bytes, self._needed, size)
        solution = finer.run(best_s)
        if solution is None or solution.layouts or self._found is None:
            return solution or self._found
        return replace(self._found, bound=max(solution.bound, self._left / self._scale))

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
        """Bound a node over real, then over whole numbers; branch if an unconstrained moment exceeds the limit, else
        solve it.
        """
        program = self._program(node.kept, node.patterns, linear=True)
        relaxed = program.relax()
        if relaxed is None:
            if not program.infeasible:
                self._solve(node, whole=True)
        elif self._is_slow(relaxed.bound):
            self._leave(relaxed.bound)
        else:
            node = node._replace(bound=max(node.bound, relaxed.bound), kept=self._worthwhile(relaxed))
            if not self._branched(node, program, relaxed.value):
                self._solve(node, whole=False)

    def _branched(self, node: _Node, program: Program, value: Callable[[Count | int], float]) -> bool:
        """Branch if the solution of a node's program exceeds the limit at a moment that it does not constrain."""
        worst = [
            (found, units)
            for units, row in program.rows.items()
            if (found := missed(row, value, self._limit)) is not None
        ]
        if worst:
            found, units = max(worst)
            self._branch(node, units, found)
        return bool(worst)

    def _leave(self, bound: float) -> None:
        """Leave out a node with this bound."""
        self._left = min(self._left, bound)

    def _take_any(self) -> None:
        """Adopt any plan that fits, because the search gave up before it found one."""
        layouts = any_within(self._in_bytes, self._job, self._limit_bytes, self._needed)
        if layouts is not None:
            self._take(layouts)

    def _is_slow(self, bound: float) -> bool:
        """Return whether a node with this bound can be skipped."""
        return bound > self._best * (1 - self._gap)

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
        slack = self._best - relaxed.bound
        return {
            self._groups[group.units]: {o for o, cost in added.items() if cost <= slack}
            or {min(added, key=added.__getitem__)}
            for group, added in relaxed.added.items()
        }

    def _program(
        self, kept: Kept, patterns: Patterns, *, linear: bool, limit: int | None = None, faster: bool = False
    ) -> Program:
        """Return the program of all plans, or of those that are faster than the best so far."""
        program = Program(
            self._timeline.keeping(kept), self._job, self._limit if limit is None else limit, linear=linear,
            patterns=patterns,
        )  # fmt: skip
        below = faster and self._best < math.inf
        program.minimize_seconds(
            self._scale, max(-1, int(self._best) - 1 - int(self._best * MIN_GAIN)) if below else None
        )
        return program

    def _solve(self, node: _Node, *, whole: bool) -> None:
        """Solve a node by CP-SAT: its `whole` program, or the relaxation and after it what that leaves open. Take the
        plan if it fits by the walk as well. If it does not, a plan that fits is looked for under lower limits, but
        proves nothing.
        """
        limit = self._limit
        for tried in range(_LOWERED if whole else 1):
            program = self._program(node.kept, node.patterns, linear=not whole, limit=limit, faster=True)
            layouts = program.solve(min(max(0.01, self._work), _MOST_OF_ONE), gap=max(self._gap, MIN_GAIN))
            self._work -= program.work
            needed = (0, 0) if layouts is None else self._needed(layouts)
            fits = fit(self._in_bytes, needed, self._limit_bytes)
            node = node if tried else node._replace(bound=max(node.bound, program.bound))
            if not whole and layouts is not None and not fits and not self._is_slow(node.bound):
                if not self._branched(node, program, program.value):
                    self._solve(node, whole=True)
                return
            if not tried and not (program.infeasible or (program.optimal and fits and not self._gap)):
                self._leave(node.bound)
            if layouts is None or fits or not whole:
                break
            self._is_rounded = True
            limit -= max(1, -(-(needed[0] - self._limit_bytes) // self._size))
        if layouts is not None and fits:
            self._take(layouts)

    def _take(self, layouts: Layouts) -> None:
        """Adopt layouts that fit if they cost less than the best so far."""
        seconds = sum(option.seconds for option in self._in_bytes.chosen(layouts))
        if (cost := seconds * self._scale) < self._best:
            self._found, self._best = Solution(layouts=layouts, objective=seconds, bound=seconds), cost
