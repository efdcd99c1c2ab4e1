"""The integer program of `program.py`, solved to a proven optimum by CP-SAT. Objective: the seconds of a step.

Most options are never put to the solver. The linear relaxation bounds every plan from below, and its reduced costs say how much
each option adds to the bound at least (reduced-cost fixing: Dantzig, Fulkerson, Johnson 1954). A program over the few options that
add least gives a plan; every option with which a better one could exist is then put in, until there is none left to add.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..decision import UnitLayout
from ..job import TrainingJob
from .options import Option, Timeline, UnitGroup, undominated
from .program import Program

_RESOLUTION = 2**40
"""Integer steps that the largest possible objective is divided into."""
_FEW, _MORE = 12, 4
"""Options of each group in the first program, and by how many times more there are in the next where nothing was found."""
_SAME = 1e-7
"""Part of a step's time by which a plan must be quicker to count: no rate is known so well, and to tell nearer plans apart takes long."""
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
    largest = sum(len(group.units) * max(option.seconds for option in group.options) for group in possible.groups) or 1.0
    scale = _RESOLUTION / largest
    best = cutoff_s * scale
    relaxed = _relaxed(possible, job, limit_bytes, scale)
    if relaxed is None or relaxed[0] > best + _ROUNDING:
        return None
    bound, added = relaxed
    # of each group, those that add least first
    ranked = {group: sorted(group.options, key=added[group].__getitem__) for group in possible.groups}
    found, proven, few = None, True, _FEW
    tried: dict[UnitGroup, set[Option]] = {group: set() for group in possible.groups}
    while True:
        worthwhile = {g: [o for o in ranked[g] if added[g][o] <= best - bound + _ROUNDING] or ranked[g][:1] for g in ranked}
        needed = {group: set(options[:few]) for group, options in worthwhile.items()}
        if all(options <= tried[group] for group, options in needed.items()):
            if max(map(len, worthwhile.values())) <= few:
                return found if proven else replace(found or Solution(layouts={}, objective=math.inf, proven=False), proven=False)
            few *= _MORE
            continue
        tried = needed
        program = Program(possible.keeping(needed), job, limit_bytes)
        program.minimize_seconds(scale, None if best == math.inf else max(-1, int(best) - 1 - int(best * _SAME)))
        if (solved := program.solve()) is None:
            proven = proven and not program.gave_up
            continue
        layouts, cost, complete = solved
        proven = proven and complete
        found = Solution(layouts=layouts, objective=cost / scale, proven=complete)
        best = found.objective * scale


def _relaxed(
    timeline: Timeline, job: TrainingJob, limit_bytes: int, scale: float
) -> tuple[float, dict[UnitGroup, dict[Option, float]]] | None:
    """Return what no plan costs less than, and what each option adds to that at least for a unit of each group; None if nothing fits."""
    program = Program(timeline, job, limit_bytes, linear=True)
    program.minimize_seconds(scale)
    if (relaxed := program.relax()) is not None:
        return relaxed
    if any_within(timeline, job, limit_bytes) is None:
        return None
    return -math.inf, {group: dict.fromkeys(group.options, 0.0) for group in timeline.groups}


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
    bound = 0 if relaxed is None else math.floor(relaxed[0] * (1 - _ROUNDED))  # the least limit that the relaxation meets
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
