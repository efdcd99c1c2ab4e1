"""The integer program of `program.py`, solved to a proven optimum by branch and bound. Objective: the seconds of a step.

The linear relaxation bounds every plan from below, and its reduced costs say how much each option adds to the bound at least, so that
most options are never looked at (reduced-cost fixing: Dantzig, Fulkerson, Johnson 1954). Where its solution passes the limit at a moment
that it leaves out, the search branches on how many units take options of that class (`pattern.py`). Where it leaves out none, it is
solved over whole numbers by SCIP, and CP-SAT checks the solution against every constraint; if one is not kept, CP-SAT solves that part.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from ..decision import UnitLayout
from ..job import TrainingJob
from .fitting import any_within
from .integer_model import SAME, Relaxation
from .options import Option, Timeline, UnitGroup
from .pattern import MissedMoment, Pattern, missed
from .program import Program

_RESOLUTION = 2**40
"""Integer steps that the largest possible objective is divided into."""
_FEW, _MORE = 12, 4
"""Options of each group among which a first plan is looked for, and by how many times more there are next where nothing was found."""
_FIRST_GAP = 1e-3
"""Part of its time by which the first plan may be slower than the best of these options; it only bounds what follows."""
_MOST_NODES, _MOST_SCIP_NODES, _MOST_WORK = 1000, 150_000, 8.0
"""Of one search: its own nodes, SCIP's, and CP-SAT's deterministic seconds; then it returns the best plan found, not proven. None is of a
clock, so that the same question always gets the same answer."""
_ROUNDING = 2**22
"""Steps of the objective by which a bound of the linear solver may be off."""
Kept: TypeAlias = dict[UnitGroup, set[Option]]
"""Options of each group that are left."""
Patterns: TypeAlias = dict[tuple[int, ...], Pattern]
"""Of each row of several equal units, by its units."""


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
    search = _BranchAndBound(possible, job, limit_bytes, cutoff_s)
    search.run()
    if search.proven:
        return search.found
    return replace(search.found or Solution(layouts={}, objective=math.inf, proven=False), proven=False)


class _Node(NamedTuple):
    """A part of what is searched; nodes are ordered by bound, then by number."""

    bound: float
    number: int
    kept: Kept
    patterns: Patterns


class _BranchAndBound:
    """A search; costs are in steps of the objective."""

    def __init__(self, timeline: Timeline, job: TrainingJob, limit_bytes: int, cutoff_s: float) -> None:
        self.found: Solution | None = None
        self.proven = True
        self._timeline, self._job, self._limit = timeline, job, limit_bytes
        self._groups = {group.units: group for group in timeline.groups}
        largest = sum(len(group.units) * max(option.seconds for option in group.options) for group in timeline.groups) or 1.0
        self._scale = _RESOLUTION / largest
        self._best = cutoff_s * self._scale
        self._gap = 0.0
        self._open: list[_Node] = []
        self._numbers = itertools.count()
        self._scip_nodes, self._work = _MOST_SCIP_NODES, _MOST_WORK

    def run(self) -> None:
        """Search until nothing that is left can be faster than what was found."""
        every = {group: set(group.options) for group in self._timeline.groups}
        program = self._program(every, {}, linear=True)
        if (relaxed := program.relax()) is None:
            if not program.infeasible:
                self._solve(every, {})
            return
        few = _FEW
        while self._best == math.inf and few < max(map(len, every.values())):
            first = {
                self._groups[group.units]: set(sorted(group.options, key=added.__getitem__)[:few]) for group, added in relaxed.added.items()
            }
            self._explore(relaxed.bound, first, _FIRST_GAP)
            few *= _MORE
        self.proven = True  # what was left out until here is looked at now
        self._explore(relaxed.bound, self._worthwhile(relaxed), 0.0)
        if self.found is None and not self.proven and self._best == math.inf:
            self._take_any()

    def _explore(self, bound: float, kept: Kept, gap: float) -> None:
        """Search among these options until nothing that is left can be faster by more than a part `gap`."""
        self._open, self._gap = [], gap
        self._push(bound, kept, {group.units: Pattern.undecided(group) for group in self._timeline.groups if len(group.units) > 1})
        for visited in itertools.count():
            if not self._open or self._is_slow(self._open[0].bound):
                return
            if visited == _MOST_NODES or min(self._scip_nodes, self._work) <= 0:
                self.proven = False
                return
            self._visit(heapq.heappop(self._open))

    def _visit(self, node: _Node) -> None:
        """Bound a node by the relaxation over real, then over whole numbers; branch on what that leaves out, else take its solution."""
        kept = node.kept
        for whole in (False, True):
            program = self._program(kept, node.patterns, linear=True)
            relaxed = program.relax(gap=max(self._gap, SAME) if whole else None, most_nodes=max(1, self._scip_nodes))
            self._scip_nodes -= program.nodes
            if relaxed is None:
                if not program.infeasible:
                    self._solve(kept, node.patterns)
                return
            if self._is_slow(relaxed.bound):
                return
            kept = kept if whole else self._worthwhile(relaxed)
            worst = [(found, units) for units, row in program.rows.items() if (found := missed(row, relaxed, self._limit)) is not None]
            if worst:
                found, units = max(worst)
                self._branch(node._replace(bound=relaxed.bound, kept=kept), units, found)
                return
        assert relaxed is not None
        if not self._accept(program.counts(relaxed)):
            self._solve(kept, node.patterns)

    def _take_any(self) -> None:
        """Take up some plan that fits, where the search was given up before it found one."""
        layouts = any_within(self._timeline, self._job, self._limit)
        if layouts is not None:
            chosen = (o.seconds for g in self._timeline.groups for unit in g.units for o in g.options if o.layout == layouts[unit])
            self.found = Solution(layouts=layouts, objective=sum(chosen), proven=False)

    def _is_slow(self, bound: float) -> bool:
        """Return whether nothing with this bound is worth looking for."""
        return bound > self._best * (1 - self._gap) + _ROUNDING

    def _branch(self, node: _Node, units: tuple[int, ...], found: MissedMoment) -> None:
        """Split a node by how many units of a row take options of a class: so many at most, or more."""
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
        """Return the options with which a plan may be faster than what was found; of each group one at least."""
        slack = self._best - relaxed.bound + _ROUNDING
        return {
            self._groups[group.units]: {o for o, cost in added.items() if cost <= slack} or {min(added, key=added.__getitem__)}
            for group, added in relaxed.added.items()
        }

    def _program(self, kept: Kept, patterns: Patterns, *, linear: bool = False, any_cost: bool = False) -> Program:
        """Return the program of what is faster than what was found, or of any cost."""
        program = Program(self._timeline.keeping(kept), self._job, self._limit, linear=linear, patterns=patterns)
        found = self._best != math.inf and not any_cost
        program.minimize_seconds(self._scale, max(-1, int(self._best) - 1 - int(self._best * SAME)) if found else None)
        return program

    def _accept(self, counts: dict[UnitGroup, list[int]]) -> bool:
        """Take up a solution of the relaxation if it keeps to every constraint."""
        chosen = {group.units: dict(zip(group.options, numbers, strict=True)) for group, numbers in counts.items()}
        taken = {self._groups[units]: {option for option, number in numbers.items() if number} for units, numbers in chosen.items()}
        program = self._program(taken, {}, any_cost=True)
        program.fix(chosen)
        return self._solved(program)

    def _solve(self, kept: Kept, patterns: Patterns) -> None:
        """Search a part by CP-SAT alone."""
        self._solved(self._program(kept, patterns))

    def _solved(self, program: Program) -> bool:
        """Solve a program, and take up what it finds; return whether it found anything."""
        solved = program.solve(max(0.01, self._work))
        self._work -= program.work
        self.proven = self.proven and not program.gave_up
        if solved is None:
            return False
        layouts, cost, complete = solved
        self.proven = self.proven and complete
        if cost < self._best:
            self.found, self._best = Solution(layouts=layouts, objective=cost / self._scale, proven=complete), cost
        return True
