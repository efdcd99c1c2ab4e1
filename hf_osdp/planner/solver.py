"""The search as an integer program, solved to a proven optimum by CP-SAT.

Variables: for each group of equal units, how many take each option. Each moment of the step is a linear expression in
them (memory.py has the formulas); within a run of units with one option the level moves by the same amount from unit to
unit, so that only the ends of each run can be a peak. Constraint: every moment <= limit. Objective: the seconds that
choices add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .costs import Choice
from .job import TrainingJob
from .program import Program
from .stations import Line

_RESOLUTION = 2**40
"""Integer steps that the largest possible objective is divided into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver found."""

    choices: dict[int, Choice]
    """Choice of each unit, by index."""
    objective: float
    """Seconds that the options add to a step."""
    proven: bool


def fastest(line: Line, job: TrainingJob, limit_bytes: int, *, cutoff_s: float | None = None) -> Solution | None:
    """The options that cost least time with every moment within the limit.

    Args:
        line: stations with their options.
        job: which optimizer step runs.
        limit_bytes: bytes that no moment may pass.
        cutoff_s: look only for solutions faster than this.

    Returns:
        The optimum, or None where nothing fits (or nothing is faster than the cutoff).
    """
    largest = sum(len(g.units) * max(o.seconds for o in g.options) for g in line.groups) or 1.0
    scale = _RESOLUTION / largest
    program = Program(line, job, limit_bytes)
    cost = program.cost(lambda option: round(option.seconds * scale))
    program.minimize(cost)
    if cutoff_s is not None:
        program.add_at_most(cost, max(-1, int(cutoff_s * scale) - 1))
    found = program.solve()
    if found is None:
        return None
    choices, objective, proven = found
    return Solution(choices=choices, objective=objective / scale, proven=proven)


def any_within(line: Line, job: TrainingJob, limit_bytes: int) -> dict[int, Choice] | None:
    """Some choice for each unit with every moment within the limit, or None where there is none."""
    found = Program(line, job, limit_bytes).solve()
    return None if found is None else found[0]


def least_peak(
    line: Line, job: TrainingJob, start: dict[int, Choice], floor_bytes: int, peak_of: Callable[[dict[int, Choice]], int]
) -> tuple[dict[int, Choice], int]:
    """The choices whose peak is lowest: the tightest limit that can be met.

    Asks again and again for anything under the lowest peak so far, first just under it (most often there is nothing),
    then by bisection.

    Args:
        line: stations with their options.
        job: which optimizer step runs.
        start: choices to better.
        floor_bytes: a peak that nothing goes below.
        peak_of: peak in bytes of a choice for each unit.

    Returns:
        The choices and their peak in bytes.
    """
    best, highest, impossible, attempt = start, peak_of(start), floor_bytes - 1, 0
    while highest - impossible > 1:
        limit = highest - 1 if attempt % 2 == 0 else (highest + impossible) // 2
        choices = any_within(line, job, limit)
        if choices is None:
            impossible = limit
        else:
            best, highest = choices, peak_of(choices)
        attempt += 1
    return best, highest
