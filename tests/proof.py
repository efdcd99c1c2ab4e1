"""Check what a plan claims, without a solver and without the search: that it fits, and that no plan is faster.

    python -m tests.proof PLAN [--nodes N]

The plan's peak and seconds are estimated again. The bound is that of a search of its own, the best first (Hart,
Nilsson, Raphael 1968): units are decided one after the other, a part of a plan is as fast as its fastest completion,
and is left out if the walk through a step exceeds the limit with the least of each memory term for the units that are
not decided. It goes through all batches and layouts that the job allows, and knows nothing of rows, options that
others dominate, relaxations or rounding. It is for plans of up to 12 units; if it ends early, the claim is checked as
far as it came.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.cost.memory import bytes_needed, peak_of_terms
from hf_osdp.planner.cost.moments import SegmentBytes
from hf_osdp.planner.cost.timing import UnitTimer
from hf_osdp.planner.cost.units import UnitBytes, once_per_shape, unit_bytes
from hf_osdp.planner.decision import Batch, Space, UnitLayout
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.space import batches, search_spaces
from hf_osdp.report.plan_file import read_plan_file

MOST_UNITS, MOST_NODES = 12, 200
EQUAL = 3e-7
"""Relative difference of seconds that the search calls equal, with its rounding."""


class WrongProof(AssertionError):
    """A plan that does not fit, or a faster one that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check found."""

    bound_s: float
    """No plan is faster."""
    nodes: int
    complete: bool
    """Whether the bound is that of all plans; else it came as far as `bound_s`."""


def check(plan: Plan, problem: PlanningProblem, most_nodes: int = MOST_NODES) -> Checked:
    """Check a plan under its problem's limit.

    Raises:
        WrongProof: the plan does not fit or takes other times than it says, or a plan is faster than it claims.
        ValueError: it has more than `MOST_UNITS` units, or claims nothing.
    """
    if len(plan.units) > MOST_UNITS or plan.gap is None or plan.step_s is None:
        raise ValueError(f"a plan of up to {MOST_UNITS} units with a gap can be checked")
    hardware, room = problem.hardware, problem.room_bytes
    estimate = estimate_plan(plan, problem.description, problem.job, hardware)
    assert estimate.time is not None
    peak, most_host = estimate.memory.on(hardware), 0 if hardware.host is None else hardware.host.memory_bytes
    if peak != plan.peak_bytes or peak > room or estimate.memory.host_bytes > most_host:
        raise WrongProof(f"the plan says {plan.peak_bytes} bytes, and needs {peak} of {room}")
    if not math.isclose(estimate.time.step_s, plan.step_s, rel_tol=1e-9):
        raise WrongProof(f"the plan says {plan.step_s} s, and takes {estimate.time.step_s} s")
    claimed_s = plan.step_s * (1 - plan.gap) * (1 - EQUAL)
    if plan.simplified:  # `0.02 % slower, ...`, in two digits
        claimed_s /= 1 + float(plan.simplified.split(" ")[0]) / 100 + 1e-4
    return _searched(problem, claimed_s, most_nodes)


def check_none(problem: PlanningProblem, most_nodes: int = MOST_NODES) -> Checked:
    """Check that no plan fits a problem's limit, as far as so many parts of plans show; `WrongProof` if one does."""
    waiting = [(tree, ()) for tree in _trees(problem)]
    for nodes in range(most_nodes):
        if not waiting:
            return Checked(bound_s=math.inf, nodes=nodes, complete=True)
        tree, decided = waiting.pop()
        if tree.may_fit(decided):
            if len(decided) == len(tree.options):
                raise WrongProof(
                    f"no plan is said to fit {problem.memory_limit_bytes}, but {tree.layouts(decided)} does"
                )
            waiting += [(tree, child) for _, child in reversed(tree.children(decided, math.inf))]
    return Checked(bound_s=math.inf, nodes=most_nodes, complete=not waiting)


def _searched(problem: PlanningProblem, claimed_s: float, most_nodes: int) -> Checked:
    """Look for a plan that fits and takes less than the claimed bound."""
    trees = _trees(problem)
    waiting = [(tree.bound(()), number, ()) for number, tree in enumerate(trees)]
    heapq.heapify(waiting)
    for nodes in range(most_nodes):
        if not waiting or waiting[0][0] >= claimed_s:
            return Checked(bound_s=claimed_s, nodes=nodes, complete=True)
        bound_s, number, decided = heapq.heappop(waiting)
        tree = trees[number]
        if tree.may_fit(decided):
            if len(decided) == len(tree.options):
                raise WrongProof(f"a plan takes {bound_s} s, and claimed was {claimed_s} s: {tree.layouts(decided)}")
            for child in tree.children(decided, claimed_s):
                heapq.heappush(waiting, (child[0], number, child[1]))
    return Checked(bound_s=waiting[0][0] if waiting else claimed_s, nodes=most_nodes, complete=not waiting)


def _trees(problem: PlanningProblem) -> list[_Tree]:
    return [
        _Tree(problem, batch, space)
        for batch in batches(problem.job, problem.hardware.world_size)
        for space in search_spaces(problem, batch)
    ]


class _Tree:
    """All plans of one batch in one space: each level decides one unit."""

    def __init__(self, problem: PlanningProblem, batch: Batch, space: Space) -> None:
        self._problem, self._batch = problem, batch
        description, hardware, job = problem.description, problem.hardware, problem.job
        timer = UnitTimer(description, hardware, job, batch)
        self.options = [
            [(time.total_s, time.issued_s, one) for one in own for time in [timer(i, one)]]
            for i, own in enumerate(space)
        ]
        """The device's and the CPU's seconds, and the layout, of each choice of each unit."""
        self._fastest = [tuple(min(one[kind] for one in own) for kind in (0, 1)) for own in self.options]
        terms = partial(unit_bytes, world_size=hardware.world_size, job=job, batch=batch)
        self._bytes = once_per_shape(description.units, terms)
        self._recomputes = any(one.activations.recomputes for own in space for one in own)
        every = [[one for _, _, one in own] for own in self.options]
        self._least = [UnitBytes.least([self._bytes(i, one) for one in own]) for i, own in enumerate(every)]
        self._segments = [
            SegmentBytes.least([self._segment(index, one) for one in every[segment.unit]])
            for index, segment in enumerate(description.segments)
        ]

    def children(self, decided: tuple[int, ...], most_s: float) -> list[tuple[float, tuple[int, ...]]]:
        """Return the choices of the next unit that may take less than `most_s`, with their bounds."""
        every = [(*decided, n) for n in range(len(self.options[len(decided)]))]
        return sorted((bound_s, one) for one in every if (bound_s := self.bound(one)) < most_s)

    def bound(self, decided: Sequence[int]) -> float:
        """Return the seconds of the fastest completion: the larger sum of the device's and of the CPU's."""
        chosen = [own[n] for own, n in zip(self.options, decided, strict=False)]
        rest = self._fastest[len(decided) :]
        return max(sum(one[kind] for one in (*chosen, *rest)) for kind in (0, 1))

    def layouts(self, decided: Sequence[int]) -> list[UnitLayout]:
        """Return the layouts of the units that are decided."""
        return [own[n][2] for own, n in zip(self.options, decided, strict=False)]

    def may_fit(self, decided: Sequence[int]) -> bool:
        """Return whether some plan with these choices may fit; of all units, whether it does."""
        problem, layouts = self._problem, self.layouts(decided)
        description, hardware, room = problem.description, problem.hardware, problem.room_bytes
        if len(layouts) == len(self.options):
            needed = bytes_needed(description, layouts, hardware, problem.job, self._batch)
            return needed.device <= room and needed.host <= (hardware.host.memory_bytes if hardware.host else 0)
        terms = (*(self._bytes(i, one) for i, one in enumerate(layouts)), *self._least[len(layouts) :])
        segments = [
            self._segment(index, layouts[segment.unit]) if segment.unit < len(layouts) else self._segments[index]
            for index, segment in enumerate(description.segments)
        ]
        peak = peak_of_terms(description, [*map(_not_ahead, terms)], segments, problem.job, self._batch)
        return peak + hardware.unavoidable_bytes <= room

    def _segment(self, index: int, layout: UnitLayout) -> SegmentBytes:
        description, samples = self._problem.description, self._batch.micro_batch_size
        segment = description.segments[index]
        span, choice = description.units[segment.unit].span, layout.activations
        plain = SegmentBytes.of(segment, span, samples, choice)
        if not self._recomputes:
            return plain
        return SegmentBytes.least([plain, SegmentBytes.of(segment, span, samples, choice, recomputes=True)])


class _NotAhead(UnitBytes):
    """Terms of a unit whose gather counts where it is used, and not beside other units: a replica that is not decided
    yet may run there, beside which nothing is gathered ahead.
    """

    __slots__ = ()
    prefetched = issued = 0


def _not_ahead(terms: UnitBytes) -> UnitBytes:
    values = {field.name: getattr(terms, field.name) for field in fields(UnitBytes)}
    return _NotAhead(**{**values, "earlier": terms.earlier and _not_ahead(terms.earlier)})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a file from `hf-osdp plan --output`")
    parser.add_argument("--nodes", type=int, default=100_000, metavar="N", help="parts of plans to look at")
    options = parser.parse_args(arguments)
    plan, inputs = read_plan_file(options.plan)
    if inputs is None or inputs.hardware is None or plan.memory_limit_bytes is None:
        parser.error(f"{options.plan} does not hold hardware and limit of its plan")
    try:
        found = check(plan, inputs.problem(plan.memory_limit_bytes, plan.strategy), options.nodes)
    except (WrongProof, ValueError) as error:
        print(error)
        return 1
    step_s = plan.step_s or 0.0
    how = (
        "no plan is faster than claimed" if found.complete else f"no plan is faster than {found.bound_s / step_s:.2%}"
    )
    print(f"The plan fits and takes {step_s:.6g} s a step; {how} ({found.nodes} parts of plans looked at).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
