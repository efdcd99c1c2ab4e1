"""The integer program of a search: counts of options, and a constraint for each moment that can be the peak.

Where one of several options rules a moment, a sum over literals of which exactly one is true picks its bytes. Such a
constraint holds in the linear relaxation too, which makes it strong; those that hold only for runs that exist are added
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..decision import Mesh, UnitLayout, groups_in
from ..job import OptimizerStep, TrainingJob
from .relaxation import solve_relaxation
from .stages import Call, Group, Line, Option, Stretch

_MOST_WORK = 8.0
"""Of one solution for an objective, in CP-SAT's deterministic seconds, which are some of a clock's: models with dozens of unlike
units may need more, and then get the best plan found."""


class Program:
    """Variables and constraints; `minimize` and `solve` follow.

    Args:
        line: stations with their options.
        job: which optimizer step runs.
        limit_bytes: bytes that no moment may pass; None makes it a variable, to be minimized.
        linear: leave out the constraints that hold only for runs that exist; it is then a relaxation, for `relax`.
    """

    def __init__(self, line: Line, job: TrainingJob, limit_bytes: int | None, *, linear: bool = False):
        from ortools.sat.python import cp_model

        self._line, self._job, self._linear = line, job, linear
        self._model, self._solver = cp_model.CpModel(), cp_model.CpSolver()
        self.limit = self._model.new_int_var(0, 2**60, "") if limit_bytes is None else limit_bytes
        self.gave_up = False
        """The last `solve` found nothing, and did not prove that there is nothing."""
        self._counts: dict[Group, list] = {}
        self._used: dict[Group, list] = {}
        self._first: dict[Group, list] = {}
        self._last: dict[Group, list] = {}
        for group in line.groups:
            self._declare(group)
        named = 8 * sum(len(group.options) for group in line.groups if len(group.units) > 1)
        most = 2**61 // max(2**8, named)  # of each variable that stands for bytes: CP-SAT's whole numbers hold their sum
        self._most_bytes = most if limit_bytes is None else min(most, max(0, limit_bytes))
        self._stations = [self._of_its_group(station) if isinstance(station, Call) else station for station in line.stations]
        self._constrain_host()
        level = self._constrain_forward()
        level = self._constrain_backward(level)
        self._constrain_finish(level)

    def cost(self, value: Callable[[Option], int]):
        """Sum of a whole number over all units' options."""
        return self._sum(self._line.groups, value)

    def add_at_most(self, expression, bound: int) -> None:
        """Constrain an expression that `cost` gave."""
        self._model.add(expression <= bound)

    def minimize(self, expression) -> None:
        """Set the objective; without one, any solution will do."""
        self._model.minimize(expression)

    def solve(self) -> tuple[dict[int, UnitLayout], float, bool] | None:
        """Choices by unit, the objective, and whether it is proven; None where nothing satisfies the constraints."""
        from ortools.sat.python import cp_model

        parameters = self._solver.parameters
        parameters.num_workers, parameters.random_seed = 1, 0  # so that the same question always gets the same answer
        # with any of these, OR-tools 9.15 calls some feasible programs of these infeasible
        parameters.cp_model_presolve, parameters.cut_level, parameters.use_implied_bounds = False, 0, False
        if self._model.has_objective():
            parameters.max_deterministic_time = _MOST_WORK
        status = self._solver.solve(self._model)
        if status == cp_model.INFEASIBLE or (status == cp_model.UNKNOWN and self._model.has_objective()):
            self.gave_up = status == cp_model.UNKNOWN
            return None
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), self._solver.status_name(status)
        choices: dict[int, UnitLayout] = {}
        for group, xs in self._counts.items():
            choices |= group.assign([self._solver.value(x) for x in xs])
        return choices, self._solver.objective_value, status == cp_model.OPTIMAL

    def relax(self) -> tuple[float, dict[Group, list[float]]] | None:
        """The linear relaxation's minimum, and how much it rises at least for each unit that takes an option.

        None where no optimum of the relaxation was found. The program must be `linear`.
        """
        relaxed = solve_relaxation(self._model.proto)
        if relaxed is None:
            return None
        return relaxed.minimum, {group: [relaxed.reduced_costs[x.index] for x in xs] for group, xs in self._counts.items()}

    # variables

    def _declare(self, group: Group) -> None:
        """Counts of each option, whether it is used, and which one the first and the last unit have."""
        size, model = len(group.units), self._model
        if size == 1:
            literals = [model.new_bool_var("") for _ in group.options]
            model.add_exactly_one(literals)
            self._counts[group] = self._used[group] = self._first[group] = self._last[group] = literals
            return
        self._counts[group] = xs = [model.new_int_var(0, size, "") for _ in group.options]
        model.add(sum(xs) == size)
        if self._linear:
            self._first[group], self._last[group] = self._one_of(xs), self._one_of(xs)
            return
        self._used[group] = used = [self._at_least(x, 1) for x in xs]
        self._first[group] = self._foremost(used[::-1])[::-1]
        self._last[group] = self._foremost(used)

    def _of_its_group(self, call: Call) -> Group:
        """A call as a group that has the variables of its unit's own."""
        group = next(group for group in self._counts if group.units == (call.unit,))
        again = call.of(group)
        for variables in (self._counts, self._used, self._first, self._last):
            if group in variables:
                variables[again] = variables[group]
        return again

    def _one_of(self, xs: Sequence) -> list:
        """For each option a literal that is not above its count."""
        literals = [self._model.new_bool_var("") for _ in xs]
        self._model.add_exactly_one(literals)
        for literal, x in zip(literals, xs, strict=True):
            self._model.add(literal <= x)
        return literals

    def _at_least(self, x, number: int):
        literal = self._model.new_bool_var("")
        self._model.add(x >= number).only_enforce_if(literal)
        self._model.add(x <= number - 1).only_enforce_if(~literal)
        return literal

    def _foremost(self, used: Sequence) -> list:
        """For each option a literal: it is used, and none before it is."""
        literals = []
        for k, literal in enumerate(used):
            foremost = self._model.new_bool_var("")
            self._model.add_bool_and([literal, *(~u for u in used[:k])]).only_enforce_if(foremost)
            literals.append(foremost)
        self._model.add_exactly_one(literals)
        return literals

    # moments

    def _fits(self, level, *literals) -> None:
        constraint = self._model.add(level <= self.limit)
        if literals:
            constraint.only_enforce_if(list(literals))

    def _sum(self, groups: Sequence[Group], value: Callable[[Option], int]):
        return sum(value(o) * x for g in groups for o, x in zip(g.options, self._counts[g], strict=True))

    @staticmethod
    def _picked(group: Group, literals: Sequence, value: Callable[[Option], int]):
        return sum(value(o) * literal for o, literal in zip(group.options, literals, strict=True))

    def _constrain_host(self) -> None:
        """What is on the host within its memory."""
        if not any(option.host for group in self._line.groups for option in group.options):
            return
        held = self._sum(self._line.groups, lambda o: o.host)
        self._model.add(held <= self._line.host_limit_bytes)
        for group in () if self._linear else self._line.groups:
            for option, used in zip(group.options, self._used[group], strict=True):
                if option.bytes.host_moment:
                    self._model.add(held + option.bytes.host_moment <= self._line.host_limit_bytes).only_enforce_if(used)

    def _communicators(self):
        """Bytes of the communicators beside that of all ranks: a mesh has its own as soon as one unit's option needs it."""
        users: dict[Mesh, dict[Group, list]] = {}
        for group in self._line.groups if self._line.communicator_bytes else ():
            for option, x, first, last in zip(group.options, self._counts[group], self._first[group], self._last[group], strict=True):
                for mesh in option.meshes:
                    users.setdefault(mesh, {}).setdefault(group, []).append((x, first, last))
        taken = 0
        for mesh, groups in users.items():
            formed = self._model.new_bool_var("")
            for group, variables in groups.items():
                xs, firsts, lasts = zip(*variables, strict=True)
                self._model.add(sum(xs) <= len(group.units) * formed)
                if len(group.units) > 1:  # tightens the relaxation
                    self._model.add(sum(firsts) <= formed)
                    self._model.add(sum(lasts) <= formed)
            taken = taken + groups_in([mesh]) * self._line.communicator_bytes * formed
        return taken

    def _constrain_forward(self):
        line = self._line
        level = line.model_bytes + self._communicators() + self._sum(line.groups, lambda o: o.bytes.held)
        level = level + self._sum(line.whole_step, lambda o: o.bytes.gathered)
        buffers = [self._picked(g, self._last[g], _gather_buffer) for g in line.whole_step] or [0]
        for station in self._stations:
            if isinstance(station, Stretch):
                for buffer in buffers:
                    self._fits(level + station.forward_peak + buffer)
                level = level + station.saved
                continue
            if len(station.units) > 1 and not self._linear:
                self._constrain_forward_runs(station, level)
            for buffer in buffers:
                self._fits(level + buffer + self._picked(station, self._first[station], _copy_out_peak))
            level = level + self._sum([station], lambda o: o.left_by_forward)
            self._fits(level + self._picked(station, self._last[station], lambda o: o.forward_peak - o.left_by_forward))
            buffers = [self._picked(station, self._last[station], _gather_buffer)]
        return level

    def _constrain_forward_runs(self, group: Group, level) -> None:
        """Forward only raises the level: each run's peak is at its last unit."""
        rows = list(zip(group.options, self._counts[group], self._used[group], strict=True))[::-1]
        before = 0
        for option, x, used in rows:
            level = self._named(level)
            self._fits(level + before + option.copy_out_peak, used)
            before = self._latest(used, _gather_buffer(option), before)
            level = level + option.left_by_forward * x
            self._fits(level - option.left_by_forward + option.forward_peak, used)
            if nbytes := _gather_buffer(option):
                self._fits(level - option.left_by_forward + nbytes + option.copy_out_peak, self._at_least(x, 2))

    def _constrain_backward(self, level):
        stations, tail = self._stations, 0
        for index in range(len(stations) - 1, -1, -1):
            station, ahead = stations[index], self._gathered_ahead(index)
            if isinstance(station, Stretch):
                self._fits(level + station.backward_peak + tail + ahead)
                level = level - station.saved + station.gradients
                continue
            level = self._constrain_group(station, level, ahead, tail)
            if station in self._line.stations:  # a further call reduces nothing
                tail = self._tail(station, self._first[station])
        idle = {group.units[0] for group in self._line.whole_step} - {s.unit for s in stations if isinstance(s, Stretch)}
        return level + self._sum([g for g in self._line.whole_step if g.units[0] in idle], _unsharded_gradients)

    def _gathered_ahead(self, index: int):
        """Bytes that are gathered while the station at `index` computes in backward."""
        if not self._stations[index].prefetches:
            return 0
        for station in reversed(self._stations[:index]):
            if isinstance(station, Group):
                return self._picked(station, self._last[station], _prefetched)
        return 0

    def _tail(self, group: Group, literals: Sequence):
        """The reduce buffer that the unit with these literals leaves in flight; a number where every option leaves the same."""
        least, most = _least_and_most(group)
        return least if least == most else self._picked(group, literals, _reduce_tail)

    def _constrain_group(self, group: Group, level, ahead, tail):
        """Backward begins with the group's last unit and ends with its first; `tail` is in flight when it begins."""
        if len(group.units) > 1:
            self._constrain_unit(group, self._last[group], level, tail)
            own, most = _least_and_most(group)
            if not self._linear:
                if own == most and isinstance(tail, int) and own == tail:
                    self._constrain_runs(group, level, tail)
                else:
                    self._constrain_unlike_runs(group, level, tail, ahead)
            tail = own  # of the unit that backward meets before the first
        level = level + self._sum([group], _change)
        self._constrain_unit(group, self._first[group], level, tail, ahead, _change)
        return level

    def _constrain_unit(self, group: Group, literals: Sequence, level, tail, ahead=0, change=lambda option: 0) -> None:
        """Backward of the unit with these literals; `level` is the one before it and `change`."""
        if isinstance(tail, int):
            self._fits(level + self._picked(group, literals, lambda o: o.gather_peak + tail - change(o)))
            self._fits(level + self._picked(group, literals, lambda o: max(o.compute_peak + tail, o.reduce_peak) - change(o)) + ahead)
            return
        self._fits(level + self._picked(group, literals, lambda o: o.gather_peak - change(o)) + tail)
        self._fits(level + self._picked(group, literals, lambda o: o.compute_peak - change(o)) + tail + ahead)
        self._fits(level + self._picked(group, literals, lambda o: o.reduce_peak - change(o)) + ahead)

    def _constrain_runs(self, group: Group, level, tail: int) -> None:
        """Within a run the level moves evenly: its peak is at its first unit or near its last."""
        for option, x, used, following in self._backward_runs(group, 0):
            level = self._named(level)
            change, prefetched, peak = _change(option), _prefetched(option), option.backward_peak
            end = level + change * x
            self._fits(level + max(option.gather_peak + tail, peak), used)
            self._fits(end - change + max(option.gather_peak + tail, peak), used)
            if prefetched:
                twice = self._at_least(x, 2)
                self._fits(level + peak + prefetched, twice)
                self._fits(end - 2 * change + peak + prefetched, twice)
            self._fits(end - change + peak + following, used)
            level = end

    def _constrain_unlike_runs(self, group: Group, level, tail, ahead) -> None:
        """The same where options leave unlike reduce buffers in flight: a run's first unit meets that of the run before."""
        for option, x, used, following in self._backward_runs(group, ahead):
            level, own = self._named(level), _reduce_tail(option)
            change, prefetched = _change(option), _prefetched(option)
            end, twice, thrice = level + change * x, self._at_least(x, 2), self._at_least(x, 3)
            both = max(option.gather_peak, option.compute_peak)
            self._fits(level + both + tail, used)
            self._fits(level + option.reduce_peak, used)
            self._fits(level + change + both + own, twice)
            self._fits(end - change + both + own, twice)
            self._fits(end - change + option.reduce_peak, used)
            if prefetched:
                self._fits(level + option.compute_peak + prefetched + tail, twice)
                self._fits(level + option.reduce_peak + prefetched, twice)
                self._fits(level + change + option.compute_peak + prefetched + own, thrice)
                self._fits(end - 2 * change + option.compute_peak + prefetched + own, thrice)
                self._fits(end - 2 * change + option.reduce_peak + prefetched, twice)
            self._fits(level + option.compute_peak + following + tail, used, ~twice)
            self._fits(end - change + option.compute_peak + following + own, twice)
            self._fits(end - change + option.reduce_peak + following, used)
            level, tail = end, self._latest(used, own, tail)

    def _backward_runs(self, group: Group, ahead) -> list[tuple]:
        """A group's runs in the order of backward: option, count, whether it is used, and what the unit after the run gathers ahead."""
        runs = []
        for option, x, used in list(zip(group.options, self._counts[group], self._used[group], strict=True))[::-1]:
            runs.append((option, x, used, ahead))
            ahead = self._latest(used, _prefetched(option), ahead)
        return runs[::-1]

    def _latest(self, used, nbytes: int, otherwise):
        """At least `nbytes` where a run is used, else at least what the run beside it gave."""
        if isinstance(otherwise, int) and otherwise == nbytes:
            return nbytes
        latest = self._model.new_int_var(0, self._most_bytes, "")
        self._model.add(latest >= min(nbytes, self._most_bytes)).only_enforce_if(used)  # an option with more has no unit
        self._model.add(latest >= otherwise).only_enforce_if(~used)
        return latest

    def _named(self, level):
        """A variable for a level, so that constraints on it stay short."""
        if isinstance(level, int):
            return level
        named = self._model.new_int_var(-self._most_bytes, self._most_bytes, "")
        self._model.add(named == level)
        return named

    def _constrain_finish(self, level) -> None:
        """Reductions of what is gathered for the whole step, one after the other, then the optimizer step."""
        line = self._line
        running = [g for g in line.stations if isinstance(g, Group)]
        reduced = self._sum([*running, *line.whole_step], lambda o: o.bytes.reduced_after)
        level = level + self._sum(running, lambda o: o.bytes.gradients_settled)
        for group in line.whole_step:
            level = level - self._sum([group], lambda o: o.bytes.gathered)
            self._fits(level + self._sum([group], lambda o: o.bytes.reduce_input))
            level = level + self._sum([group], _reduced_at_the_end)
            self._fits(level + self._sum([group], lambda o: o.bytes.reduce_input + o.bytes.reduce_work))
        level = level - reduced
        if self._job.optimizer.step is not OptimizerStep.FOR_LOOP:
            self._fits(level + self._sum(line.groups, lambda o: o.bytes.step_scratch))
            return
        for group in () if self._linear else line.groups:
            for option, used in zip(group.options, self._used[group], strict=True):
                self._fits(level + option.bytes.step_scratch, used)


def _change(option: Option) -> int:
    """What one unit's backward changes the level by."""
    return option.left_by_backward - option.left_by_forward


def _prefetched(option: Option) -> int:
    return option.bytes.prefetched


def _reduce_tail(option: Option) -> int:
    return option.bytes.reduce_tail


def _least_and_most(group: Group) -> tuple[int, int]:
    """Bytes of the least and of the largest reduce buffer that an option leaves in flight."""
    tails = [_reduce_tail(option) for option in group.options]
    return min(tails), max(tails)


def _unsharded_gradients(option: Option) -> int:
    return option.bytes.unsharded_gradients


def _copy_out_peak(option: Option) -> int:
    return option.copy_out_peak


def _gather_buffer(option: Option) -> int:
    return option.bytes.gather_buffer


def _reduced_at_the_end(option: Option) -> int:
    """What the level changes by when the gradients of a unit that is gathered for the whole step are reduced."""
    terms = option.bytes
    return terms.gradients_after + terms.gradients_settled - terms.unsharded_gradients + terms.reduced_after
