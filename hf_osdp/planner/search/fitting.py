"""Whether anything fits within a limit, by CP-SAT, and the tightest limit that can be met."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..decision import UnitLayout
from ..job import TrainingJob
from .options import Timeline, undominated
from .program import Program

ADVICE_WORK = 0.5
"""Of one question whether anything fits where the answer is advice, in CP-SAT's deterministic seconds; nearly all take hundredths."""
_ROUNDED = 1e-6
"""Part of a bound by which rounding in the linear solver may have raised it."""


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
