"""The search as an integer program, solved to a proven optimum by CP-SAT.

Variables: for each group of equal units, how many take each option. Each moment of the step is a linear expression in
them (memory.py has the formulas); within a run of units with one option the level moves by the same amount from unit to
unit, so that only the ends of each run can be a peak. Constraint: every moment <= limit. Objective: the seconds that
choices add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .costs import Choice
from .job import OptimizerStep, TrainingJob
from .stations import Group, Line, Option, Stretch

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
    program = _Program(line, job, limit_bytes)
    scale = _RESOLUTION / largest
    cost = sum(round(o.seconds * scale) * x for g, xs in program.counts.items() for o, x in zip(g.options, xs, strict=True))
    program.model.minimize(cost)
    if cutoff_s is not None:
        program.model.add(cost <= max(-1, int(cutoff_s * scale) - 1))
    return program.solve(lambda solver: solver.objective_value / scale)


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
        solution = fastest(line, job, limit)
        if solution is None:
            impossible = limit
        else:
            best, highest = solution.choices, peak_of(solution.choices)
        attempt += 1
    return best, highest


class _Program:
    """Counts of options, and one constraint for each moment that can be the peak."""

    def __init__(self, line: Line, job: TrainingJob, limit_bytes: int):
        from ortools.sat.python import cp_model

        self.line, self.job, self.limit_bytes, self.model = line, job, limit_bytes, cp_model.CpModel()
        self.counts: dict[Group, list] = {}
        self.used: dict[Group, list] = {}
        self.twice: dict[Group, list] = {}
        for group in line.groups:
            self._declare(group)
        self.first = {g: self._end(g, reverse=True) for g in line.stations if isinstance(g, Group)}
        self.last = {g: self._end(g, reverse=False) for g in line.stations if isinstance(g, Group)}
        level = self._constrain_forward()
        level = self._constrain_backward(level)
        self._constrain_finish(level)

    def solve(self, objective) -> Solution | None:
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # so that the same question always gets the same answer
        solver.parameters.random_seed = 0
        solver.parameters.cp_model_presolve = False  # these programs are small; presolve costs more than it saves
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return None
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        choices: dict[int, Choice] = {}
        for group, xs in self.counts.items():
            choices |= group.assign([solver.value(x) for x in xs])
        return Solution(choices=choices, objective=objective(solver), proven=status == cp_model.OPTIMAL)

    # variables

    def _declare(self, group: Group) -> None:
        size, model = len(group.units), self.model
        xs = [model.new_int_var(0, size, "") for _ in group.options]
        model.add(sum(xs) == size)
        self.counts[group] = xs
        self.used[group] = [self._at_least(x, 1) for x in xs]
        self.twice[group] = [self._at_least(x, 2) for x in xs] if size > 1 else []

    def _at_least(self, x, number: int):
        literal = self.model.new_bool_var("")
        self.model.add(x >= number).only_enforce_if(literal)
        self.model.add(x <= number - 1).only_enforce_if(~literal)
        return literal

    def _end(self, group: Group, *, reverse: bool) -> list:
        """For each option, a literal: it is the first in backward order that is used (reverse: the last)."""
        used = self.used[group][::-1] if reverse else self.used[group]
        literals = []
        for k, literal in enumerate(used):
            end = self.model.new_bool_var("")
            self.model.add_bool_and([literal, *(~u for u in used[:k])]).only_enforce_if(end)
            literals.append(end)
        self.model.add_exactly_one(literals)
        return literals[::-1] if reverse else literals

    # moments

    def _fits(self, level, *literals) -> None:
        constraint = self.model.add(level <= self.limit_bytes)
        if literals:
            constraint.only_enforce_if(list(literals))

    def _sum(self, groups: Sequence[Group], value) -> object:
        return sum(value(o) * x for g in groups for o, x in zip(g.options, self.counts[g], strict=True))

    def _constrain_forward(self):
        line = self.line
        level = line.model_bytes + self._sum(line.groups, lambda o: o.bytes.held) + self._sum(line.whole_step, lambda o: o.bytes.gathered)
        buffers = [(o.bytes.gather_buffer, (used,)) for g in line.whole_step for o, used in zip(g.options, self.used[g], strict=True)]
        for station in line.stations:
            if isinstance(station, Stretch):
                self._fits(level + station.forward_peak)
                for nbytes, literals in buffers:
                    self._fits(level + station.forward_peak + nbytes, *literals)
                level = level + station.saved
                continue
            for option, x, used in reversed(list(zip(station.options, self.counts[station], self.used[station], strict=True))):
                run = option.left_by_forward * x
                self._fits(level + run - option.left_by_forward + option.forward_peak, used)
                level = level + run
            buffers = [(o.bytes.gather_buffer, (end,)) for o, end in zip(station.options, self.last[station], strict=True)]
        return level

    def _constrain_backward(self, level):
        """Backward meets a group's options in their order. Each run's peak is at its first unit or near its last."""
        stations, owed = self.line.stations, True
        for index in range(len(stations) - 1, -1, -1):
            station = stations[index]
            ahead = self._gathers_ahead(index)
            if isinstance(station, Stretch):
                for nbytes, literals in [(0, ()), *ahead]:
                    self._fits(level + station.backward_peak + station.tail + nbytes, *literals)
                level = level - station.saved
                if owed:
                    level, owed = level + self._sum(self.line.whole_step, lambda o: o.bytes.unsharded_gradients), False
                continue
            for k, option in enumerate(station.options):
                level = self._constrain_run(station, k, option, level, ahead)
        if owed:
            level = level + self._sum(self.line.whole_step, lambda o: o.bytes.unsharded_gradients)
        return level

    def _gathers_ahead(self, index: int) -> list[tuple[int, tuple]]:
        """What may be gathered while the station at `index` computes in backward: bytes and the literal under which."""
        for station in reversed(self.line.stations[:index]):
            if isinstance(station, Group):
                pairs = zip(station.options, self.last[station], strict=True)
                return [(o.bytes.prefetched, (end,)) for o, end in pairs if o.bytes.prefetched]
        return []

    def _constrain_run(self, group: Group, k: int, option: Option, level, ahead):
        x, used, change = self.counts[group][k], self.used[group][k], option.left_by_backward - option.left_by_forward
        end = level + change * x
        self._fits(level + max(option.gather_peak, option.compute_peak), used)
        self._fits(end - change + max(option.gather_peak, option.compute_peak), used)
        if self.twice[group] and option.bytes.prefetched:
            peak = option.compute_peak + option.bytes.prefetched
            self._fits(level + peak, self.twice[group][k])
            self._fits(end - 2 * change + peak, self.twice[group][k])
        for later in range(k + 1, len(group.options)):
            if nbytes := group.options[later].bytes.prefetched:
                between = [~u for u in self.used[group][k + 1 : later]]
                self._fits(end - change + option.compute_peak + nbytes, used, self.used[group][later], *between)
        for nbytes, literals in ahead:
            self._fits(end - change + option.compute_peak + nbytes, self.first[group][k], *literals)
        return end

    def _constrain_finish(self, level) -> None:
        """Reductions of what is gathered for the whole step, one after the other, then the optimizer step."""
        line = self.line
        running = [g for g in line.stations if isinstance(g, Group)]
        reduced = self._sum(running, lambda o: o.bytes.reduced_after)
        level = level + self._sum(running, lambda o: o.bytes.gradients_settled)
        for group in line.whole_step:
            level = level - self._sum([group], lambda o: o.bytes.gathered)
            self._fits(level + self._sum([group], lambda o: o.bytes.reduce_input))
            level = level + self._sum([group], _reduced_at_the_end)
            reduced = reduced + self._sum([group], lambda o: o.bytes.reduced_after)
            self._fits(level + self._sum([group], lambda o: o.bytes.reduce_input + max(0, o.bytes.reduce_output - o.bytes.reduced_after)))
        level = level - reduced
        if self.job.optimizer.step is OptimizerStep.FOR_LOOP:
            for group in line.groups:
                for option, used in zip(group.options, self.used[group], strict=True):
                    self._fits(level + option.bytes.step_scratch, used)
        else:
            self._fits(level + self._sum(line.groups, lambda o: o.bytes.step_scratch))


def _reduced_at_the_end(option: Option) -> int:
    """What the level changes by when the gradients of a unit that is gathered for the whole step are reduced."""
    terms = option.bytes
    return terms.gradients_after + terms.gradients_settled - terms.unsharded_gradients + terms.reduced_after
