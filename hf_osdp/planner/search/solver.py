"""Solve the integer program of `program.py` to a proven optimum. The objective is the seconds of a step.

Bytes are in coarse units, rounded so that no moment of a plan has more than it takes (`Timeline.in_units`), and
seconds are rounded down. So what the program calls infeasible is infeasible, and its optimum bounds the time of every
plan from below. The walk through a step (`cost/moments.py`) says what fits, to the byte. Where the program's best plan
does not fit, the runs that break the limit get constraints, and the program is solved again. Where a plan fits by
rounding alone, a gap is left.

The linear relaxation's reduced costs bound how much an option adds at least, and exclude most options (reduced-cost
fixing: Dantzig, Fulkerson, Johnson 1954). A first plan, from few options, says how much is too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from ..cost.memory import Needed
from ..decision import UnitLayout
from .integer_model import MIN_GAIN, Relaxation, Run
from .options import Option, Timeline, UnitGroup, undominated
from .program import Program

_RESOLUTION = 2**30
"""Whole numbers into which the seconds of each unit's fastest option are divided, all together."""
_DIGITS, _LEAST_DIGITS = 28, 31
"""Binary digits of the limit in the units of a search, and in those of a search for the least peak. With 20, many
plans fit by rounding alone; with 31, plans of nearly equal seconds take CP-SAT long to tell apart."""
_FEW = 12
"""Options of each group in the search for a first plan."""
_SHARES = (1.0, 0.9, 0.8, 0.65, 0.5)
"""Shares of the limit whose relaxations give these options, until a plan is found: runs take memory that no relaxation
counts.
"""
_FIRST_GAP = 1e-3
"""Relative gap of the search for a first plan, which only bounds the search after it."""
_ALIKE = 0.03
"""Relative difference up to which peaks are similar."""
_TERMS = 16
"""Most terms of a unit at one moment, each of which is rounded down."""
_MOST_WORK, _MOST_OF_ONE, _SIMPLE_WORK, _LOWERED_WORK = 4.0, 2.0, 0.5, 0.2
"""Limits of CP-SAT's work in one search, on one part of it, to find a simpler plan, and to find one that fits without
rounding. Beyond the first the search returns its best plan, with the gap that it proved. Work is in CP-SAT's
deterministic seconds: no limit depends on a clock, so that equal problems always give equal plans."""
Layouts: TypeAlias = Mapping[int, UnitLayout]
Walk: TypeAlias = Callable[[Layouts], Needed]
"""What a plan needs, by the walk."""
Kept: TypeAlias = dict[UnitGroup, set[Option]]
"""Remaining options of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Layouts that the solver found."""

    layouts: Layouts
    """Layout of each unit, by index."""
    objective: float
    """Seconds of a step."""
    bound: float
    """Proven lower bound on the objective of every plan."""


def fit(timeline: Timeline, needed: Needed, limit_bytes: int) -> bool:
    """Return whether a plan fits the device and the host."""
    return needed.device <= limit_bytes and needed.host <= timeline.host_limit_bytes


def unit_of(limit_bytes: int, digits: int = _DIGITS) -> int:
    """Return the unit of a search in bytes."""
    return max(1, limit_bytes >> digits)


class Solver:
    """Programs of one timeline in units of `size` bytes, which constrain the runs that were found to matter."""

    def __init__(self, timeline: Timeline, size: int, walk: Walk) -> None:
        self.in_bytes, self.timeline, self.size, self._walk = timeline, timeline.in_units(size), size, walk
        self._runs: set[Run] = set()
        self._earlier = False
        """Whether moments of an earlier micro-step are constrained: where they matter, which is rare."""
        self._ordered = False
        """Whether the first and the last unit of a row are those of its order: where all runs are not enough."""
        self.units = [unit for group in timeline.groups for unit in group.units]
        self._rows = {unit: group for group in timeline.groups for unit in group.units if len(group.units) > 1}
        self.rounding = _TERMS * (size - 1) * len(self.units)
        """The most by which a plan that the program accepts may exceed the limit, if all its rows are there."""
        self.work = 0.0
        """CP-SAT's deterministic seconds in all."""

    def program(self, limit_bytes: int, kept: Kept | None = None, **options: Any) -> Program:
        """Return the program of these options, for None of all; without `runs` it can be relaxed."""
        timeline = self.timeline if kept is None else self.timeline.keeping(kept)
        return Program(timeline, limit_bytes // self.size, **options)

    def solve(
        self,
        limit_bytes: int,
        minimize: Callable[[Program], None],
        most_work: float = math.inf,
        *,
        kept: Kept | None = None,
        gap: float = MIN_GAIN,
        **options: Any,
    ) -> tuple[Layouts | None, Program]:
        """Return the best layouts and the program that gave them, which says what it proved; None if no solution is
        found. Layouts exceed the limit only by rounding, or if the work was not enough.

        Args:
            limit_bytes: the most that a moment may take; for `lowest`, in which case the limit is the objective, at
                most this.
            minimize: sets the objective.
            most_work: CP-SAT's deterministic seconds.
            kept: the options, for None all.
            gap: relative gap at which CP-SAT stops.
            options: those of `Program`.
        """
        left = most_work
        while True:
            known = {"runs": frozenset(self._runs), "earlier": self._earlier, "ordered": self._ordered}
            program = self.program(limit_bytes, kept, **known, **options)
            minimize(program)
            layouts = program.solve(max(0.01, left), gap=gap)
            left, self.work = left - program.work, self.work + program.work
            if layouts is None or left <= 0:
                return layouts, program
            if not self._added(layouts, program.bound * self.size if options.get("lowest") else limit_bytes):
                return layouts, program

    def _added(self, layouts: Layouts, most: int) -> bool:
        """Add an earlier micro-step if it exceeds `most` bytes; else the runs of units that exceed them, of those
        beside them, and of options with similar peaks, which would be taken next. If all are known, add all that the
        rows use, whose buffers may be beside other units. Return whether any was new.
        """
        needed = self._walk(layouts)
        if needed.earlier > most and not self._earlier:
            self._earlier = True
            return True
        moments = needed.moments
        found: set[Run] = set()
        for unit in (unit for unit, nbytes in moments.items() if unit in self._rows and nbytes > most):
            row = self._rows[unit]
            at = row.units.index(unit)
            found |= {(row.units, layouts[other]) for other in row.units[max(0, at - 1) : at + 2]}
            (peak,) = (o.transient for o in row.options if o.layout == layouts[unit])
            found |= {(row.units, o.layout) for o in row.options if abs(o.transient - peak) <= _ALIKE * peak}
        if max(moments.values()) > most and found <= self._runs:
            found = {(row.units, layouts[unit]) for unit, row in self._rows.items()}
        is_new = not found <= self._runs
        self._runs |= found
        if max(moments.values()) > most + self.rounding and not is_new and not self._ordered:
            self._ordered = is_new = True
        return is_new


class FastestSearch:
    """The search for the fastest plan of a timeline under a limit; costs are in steps of the objective."""

    def __init__(self, timeline: Timeline, limit_bytes: int, walk: Walk) -> None:
        self._limit_bytes, self._walk = limit_bytes, walk
        self._solver = Solver(timeline, unit_of(limit_bytes), walk)
        self._groups = {group.units: group for group in self._solver.timeline.groups}
        self._scale = _RESOLUTION / (max(timeline.least) or 1.0)
        self._root = self._relaxed(limit_bytes)
        self.bound_s = 0.0 if self._root is None else self._root.bound / self._scale
        """Lower bound on the seconds of every plan, by the relaxation with every option."""

    def run(self, cutoff_s: float = math.inf) -> Solution | None:
        """Return the fastest layouts with every moment within the limit; None if no plan both fits and is faster than
        the cutoff.

        If too much work would be left, the result is the best plan so far, without a cutoff any plan that fits; beside
        a cutoff, if none was found, it has no layouts and an infinite objective.
        """
        self._best, self._left = cutoff_s * self._scale, math.inf
        """Cost of the best plan or the cutoff, least bound of what is left out."""
        self._found: Solution | None = None
        first: Kept = {group: set() for group in self._groups.values()}
        many = any(len(group.options) > _FEW for group in first)
        for share in _SHARES if many else ():
            relaxed = self._root if share == 1 else self._relaxed(int(share * self._limit_bytes))
            if relaxed is None:
                break
            for group, added in relaxed.added.items():
                first[self._groups[group.units]] |= set(sorted(added, key=added.__getitem__)[:_FEW])
            self._solve(first, _FIRST_GAP)
            if self._found is not None:
                break
        self._left = math.inf
        if self._root is None:
            self._solve(None, 0.0)
        elif self._root.bound < self._best * (1 - MIN_GAIN):
            self._solve(self._worthwhile(self._root), 0.0, self._root.bound)
        if self._left >= self._best * (1 - MIN_GAIN):
            return self._found
        if self._best == math.inf:
            layouts = any_within(self._solver.in_bytes, self._limit_bytes, self._walk)
            if layouts is None:
                return None
            self._take(layouts)
        found = self._found or Solution(layouts={}, objective=math.inf, bound=0.0)
        return replace(found, bound=self._left / self._scale)

    def _relaxed(self, limit_bytes: int) -> Relaxation | None:
        """Return the relaxation with every option."""
        program = self._solver.program(limit_bytes)
        program.minimize_seconds(self._scale)
        return program.relax()

    def _worthwhile(self, relaxed: Relaxation) -> Kept:
        """Return the options that a plan faster than the best may take, at least one of each group."""
        slack = self._best - relaxed.bound
        return {
            self._groups[group.units]: {o for o, cost in added.items() if cost <= slack}
            or {min(added, key=added.__getitem__)}
            for group, added in relaxed.added.items()
        }

    def _minimize(self, program: Program) -> None:
        """Set the objective, for plans faster than the best so far."""
        below = max(-1, int(self._best) - 1 - int(self._best * MIN_GAIN)) if self._best < math.inf else None
        program.minimize_seconds(self._scale, below)

    def _solve(self, kept: Kept | None, gap: float, bound: float = 0.0) -> None:
        """Take the fastest plan of these options, but for the gap. Where only rounding lets it fit, look for another
        under lower limits, which proves nothing.
        """
        limit = self._limit_bytes
        lower = limit - self._solver.rounding
        for most, work in ((lower, _MOST_OF_ONE),) if gap else ((limit, _MOST_OF_ONE), (lower, _LOWERED_WORK)):
            layouts, program = self._solver.solve(
                most, self._minimize, min(work, _MOST_WORK - self._solver.work), kept=kept,
                gap=max(gap, MIN_GAIN),
            )  # fmt: skip
            fits = layouts is not None and fit(self._solver.in_bytes, self._walk(layouts), limit)
            if most == limit and not (program.infeasible or (program.optimal and fits)):
                self._left = min(self._left, max(bound, program.bound))
            if layouts is not None and fits:
                self._take(layouts)
            if layouts is None or fits:
                break

    def _take(self, layouts: Layouts) -> None:
        """Adopt layouts that fit if they cost less than the best so far."""
        seconds = self._solver.in_bytes.seconds(layouts)
        if (cost := seconds * self._scale) < self._best:
            self._found, self._best = Solution(layouts=layouts, objective=seconds, bound=seconds), cost


def any_within(timeline: Timeline, limit_bytes: int, walk: Walk) -> Layouts | None:
    """Return some layouts with every moment within the limit; None if there are none, whatever work it takes."""
    for size in dict.fromkeys((unit_of(limit_bytes), 1)):
        found, _ = Solver(_frugal(timeline), size, walk).solve(limit_bytes, lambda program: None)
        if found is None or fit(timeline, walk(found), limit_bytes):
            return found
    raise AssertionError("the program's moments in bytes are those of the walk")


def least(timeline: Timeline, limit_bytes: int, walk: Walk, most_work: float) -> Layouts | None:
    """Return the layouts with the lowest peak, but for rounding, or the lowest that CP-SAT finds within `most_work`;
    None if it finds none up to the limit.
    """
    solver = Solver(_frugal(timeline), unit_of(limit_bytes, _LEAST_DIGITS), walk)
    return solver.solve(limit_bytes, Program.minimize_limit, most_work, lowest=True)[0]


def _frugal(timeline: Timeline) -> Timeline:
    """Return the timeline with the options that no other dominates in memory."""
    meshes = timeline.communicator_bytes > 0
    return timeline.keeping(
        {group: set(undominated(group.options, by_memory=True, meshes=meshes)) for group in timeline.groups}
    )


def simplest(timeline: Timeline, limit_bytes: int, walk: Walk, layouts: Layouts, price_s: float) -> Layouts:
    """Return the layouts with the least sum of seconds and a price for each part of the plan (`Option.parts`), or the
    given ones if CP-SAT finds none that are as good within `_SIMPLE_WORK`.
    """
    seconds, parts = timeline.seconds(layouts), timeline.count_parts(layouts)
    scale = _RESOLUTION / seconds
    most = int((seconds + price_s * parts) * scale * (1 + MIN_GAIN))
    minimize = partial(Program.minimize_seconds, scale=scale, at_most=most, price_s=price_s)
    solved, _ = Solver(timeline, unit_of(limit_bytes), walk).solve(limit_bytes, minimize, _SIMPLE_WORK)
    return solved if solved is not None and fit(timeline, walk(solved), limit_bytes) else layouts
