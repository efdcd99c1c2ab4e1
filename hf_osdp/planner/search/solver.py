"""The integer program of `program.py`, solved to a proven optimum by CP-SAT. Objective: the seconds of a step.

Most options are never put to the solver. The linear relaxation bounds every plan from below, and its reduced costs say how much
each option adds to the bound at least (reduced-cost fixing: Dantzig, Fulkerson, Johnson 1954). A program over the few options that
add least gives a plan; every option with which a better one could exist is then put in, until there is none left to add.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..decision import UnitLayout
from ..job import TrainingJob
from .integer_model import SAME, Relaxation
from .options import Option, Timeline, UnitGroup, undominated
from .pattern import Pattern, missed
from .program import Program

_RESOLUTION = 2**40
"""Integer steps that the largest possible objective is divided into."""
_FEW, _MORE = 12, 4
"""Options of each group in the first program, and by how many times more there are in the next where nothing was found."""
_FIRST_GAP = 1e-3
"""Part of its time by which the first plan may be slower than the best of its program; it only bounds what follows."""
_MOST_NODES = 1000
ADVICE_WORK = 0.5
"""Of one question whether anything fits where the answer is advice, in CP-SAT's deterministic seconds; nearly all take hundredths."""
_ROUNDED = 1e-6
"""Part of a bound by which rounding in the linear solver may have raised it."""
_ROUNDING = 2**22
"""Steps of the objective by which a reduced cost may be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver found."""

    layouts: dict[int, UnitLayout]
    """Layout of each unit, by index."""
    objective: float
    """Seconds that the options add to a step."""
    proven: bool


def fastest(timeline: Timeline, job: TrainingJob, limit_bytes: int, *, cutoff_s: float = math.inf) -> Solution | None:
    """Return the options that cost least time with every moment within the limit; None where nothing fits, or is faster than the cutoff.

    Where the solver gave up, what it had found by then is returned, not proven; that may be nothing, at infinite cost.
    """
    possible = timeline.within(limit_bytes)
    if possible is None:
        return None
    search = _Branching(possible, job, limit_bytes, cutoff_s)
    search.run()
    return search.found if search.proven else replace(search.found or Solution(layouts={}, objective=math.inf, proven=False), proven=False)


class _Node(NamedTuple):
    """A part of the search space; nodes are ordered by their bounds, then by number."""

    bound: float
    number: int
    kept: dict[UnitGroup, set[Option]]
    patterns: dict[tuple[int, ...], Pattern]


class _Branching:
    """Branch and bound. Costs are in steps of `_RESOLUTION`."""

    def __init__(self, timeline: Timeline, job: TrainingJob, limit_bytes: int, cutoff_s: float) -> None:
        self.found: Solution | None = None
        self.proven = True
        self._timeline, self._job, self._limit = timeline, job, limit_bytes
        largest = sum(len(group.units) * max(option.seconds for option in group.options) for group in timeline.groups) or 1.0
        self._scale = _RESOLUTION / largest
        self._best = cutoff_s * self._scale
        self._open: list[_Node] = []
        self._numbers = itertools.count()
        self._groups = {group.units: group for group in timeline.groups}

    def run(self) -> None:
        """Search until nothing that is left can be faster."""
        every = {group: set(group.options) for group in self._timeline.groups}
        relaxed = self._program(every, {}, linear=True).relax()
        if relaxed is None:
            if any_within(self._timeline, self._job, self._limit) is not None:
                self._solve(every, {})
            return
        added = {self._groups[group.units]: added for group, added in relaxed.added.items()}
        few = _FEW
        while self._best == math.inf:
            first = {group: set(sorted(group.options, key=added[group].__getitem__)[:few]) for group in every}
            self._solve(first, {}, gap=_FIRST_GAP)
            if few >= max(map(len, every.values())):
                break
            few *= _MORE
        patterns = {group.units: Pattern.open(group) for group in self._timeline.groups if len(group.units) > 1}
        self._push(relaxed.bound, self._worthwhile(relaxed), patterns)
        for visited in itertools.count():
            if not self._open or self._open[0].bound > self._best + _ROUNDING:
                return
            if visited == _MOST_NODES:
                self.proven = False
                return
            self._visit(heapq.heappop(self._open))

    def _visit(self, node: _Node) -> None:
        """Bound a node, and branch on what the relaxation misses; where it misses nothing, solve the node."""
        kept, relaxed = node.kept, None
        for whole in (False, True):
            program = self._program(kept, node.patterns, linear=True)
            relaxed = program.relax(whole=whole)
            if relaxed is None:
                if not program.infeasible:
                    self._solve(kept, node.patterns)
                return
            if relaxed.bound > self._best * (1 - SAME) + (0 if whole else _ROUNDING):
                return
            if not whole:
                kept = self._worthwhile(relaxed)
            worst = None
            for units, row in program.rows.items():
                if (one := missed(row, node.patterns[units], relaxed, self._limit)) is not None and (worst is None or one > worst[0]):
                    worst = one, units
            if worst is not None:
                (_, number, most), units = worst
                self._branch(relaxed.bound, kept, node.patterns, units, number, most)
                return
        assert relaxed is not None
        if not self._accept(program.counts(relaxed)):
            self._solve(kept, node.patterns)

    def _branch(self, bound, kept, patterns, units, number, most) -> None:
        group = self._groups[units]
        low, high = patterns[units].split(group, number, most)
        less = kept if most else kept | {group: {o for o in kept[group] if low.classes[o] != number}}
        if less[group]:
            self._push(bound, less, patterns | {units: low})
        self._push(bound, kept, patterns | {units: high})

    def _push(self, bound: float, kept, patterns) -> None:
        heapq.heappush(self._open, _Node(bound, next(self._numbers), kept, patterns))

    def _worthwhile(self, relaxed: Relaxation) -> dict[UnitGroup, set[Option]]:
        """Return the options with which a plan may be faster than the best; one of each group at least."""
        most = self._best - relaxed.bound + _ROUNDING
        return {
            self._groups[group.units]: {o for o, cost in added.items() if cost <= most} or {min(added, key=added.__getitem__)}
            for group, added in relaxed.added.items()
        }

    def _program(self, kept, patterns, *, linear: bool = False) -> Program:
        program = Program(self._timeline.keeping(kept), self._job, self._limit, linear=linear, patterns=patterns)
        program.minimize_seconds(self._scale, None if linear or self._best == math.inf else max(-1, int(self._best) - 1 - int(self._best * SAME)))
        return program

    def _accept(self, counts: dict[UnitGroup, list[int]]) -> bool:
        """Take up a solution of the relaxation if it keeps to every constraint."""
        chosen = {group.units: dict(zip(group.options, numbers, strict=True)) for group, numbers in counts.items()}
        program = self._program({self._groups[units]: {o for o, n in numbers.items() if n} for units, numbers in chosen.items()}, {})
        program.fix(chosen)
        return self._solved(program)

    def _solve(self, kept, patterns, *, gap: float = 0.0) -> None:
        """Solve a part of the space by CP-SAT."""
        self._solved(self._program(kept, patterns), gap)

    def _solved(self, program: Program, gap: float = 0.0) -> bool:
        solved = program.solve(gap=gap)
        self.proven = self.proven and not program.gave_up
        if solved is None:
            return False
        layouts, cost, complete = solved
        self.proven = self.proven and complete
        self.found = Solution(layouts=layouts, objective=cost / self._scale, proven=complete)
        self._best = cost
        return True


def any_within(timeline: Timeline, job: TrainingJob, limit_bytes: int, most_work: float = math.inf) -> dict[int, UnitLayout] | None:
    """Return some layout for each unit with every moment within the limit; None where there is none, or none was found by `most_work`."""
    possible = timeline.within(limit_bytes)
    if possible is None:
        return None
    frugal = {group: set(undominated(group.options, by_memory=True)) for group in possible.groups}
    found = Program(possible.keeping(frugal), job, limit_bytes).solve(most_work)
    return None if found is None else found[0]


def least_peak(
    timeline: Timeline,
    job: TrainingJob,
    start: dict[int, UnitLayout],
    floor_bytes: int,
    peak_of: Callable[[dict[int, UnitLayout]], int],
) -> tuple[dict[int, UnitLayout], int]:
    """Return the layouts whose peak is lowest, and that peak in bytes: the tightest limit that can be met.

    Asks again and again for anything under the lowest peak so far, first just under it (most often there is nothing),
    then by bisection. `start` are layouts to better, and no peak goes below `floor_bytes`.
    """
    best, highest, attempt = start, peak_of(start), 0
    program = Program(timeline, job, None, linear=True)
    program.minimize_limit()
    relaxed = program.relax()
    bound = 0 if relaxed is None else math.floor(relaxed.bound * (1 - _ROUNDED))  # the least limit that the relaxation meets
    impossible = max(floor_bytes, bound) - 1
    while highest - impossible > 1:
        limit = highest - 1 if attempt % 2 == 0 else (highest + impossible) // 2
        layouts = any_within(timeline, job, limit, ADVICE_WORK)
        if layouts is None:
            impossible = limit
        else:
            best, highest = layouts, peak_of(layouts)
        attempt += 1
    return best, highest
