"""Variables of the integer program and its two solvers: CP-SAT for the whole program, GLOP for its linear relaxation.

Claims rest on whole numbers. CP-SAT computes in them, and trusts its presolving and cuts only where numbers are small
(`_SMALL`). GLOP computes in floating point, and nothing that it says is believed: its dual values, as whole numbers,
are multipliers of rows, and for any multipliers

    bound = Σ_r y_r · (lower bound of row r if y_r > 0, else upper) + Σ_j min over x_j of d_j x_j,   d = c - Aᵀ y

is a lower bound on the objective (Neumaier and Shcherbina 2004). It is computed in Python's whole numbers. Only CP-SAT
says that a program is infeasible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..decision import UnitLayout
from .options import Option, Timeline, UnitGroup

if TYPE_CHECKING:
    from ortools.sat.python import cp_model, cp_model_helper

    Bytes: TypeAlias = cp_model.LinearExpr | int
    Count: TypeAlias = cp_model.IntVar

Value: TypeAlias = Callable[[Option], int]
Run: TypeAlias = tuple[tuple[int, ...], UnitLayout]
"""The units of a group that take one layout, by the indices of all its units."""
MIN_GAIN = 1e-7
"""Relative difference of step time below which plans count as equal: no rate is known better, and a finer search
takes long.
"""
_SMALL = 2**32
"""Limit up to which CP-SAT presolves and cuts. With larger numbers, OR-tools 9.15 then reports some feasible programs
as infeasible."""
_SHIFT = 64
"""Binary digits of multipliers after the point."""
_SLACK = 1e-7
"""Loosening of rows for GLOP: with "first unit takes it ≤ units that take it", 0 ≤ 0 for most options, the multiplier
of this row would say what an option adds, and not its reduced cost."""
_FAR = 2**62
"""No row has such a bound, but for those without one."""


class Proof(NamedTuple):
    """What multipliers of rows prove, in units of 2^-_SHIFT."""

    bound: int
    reduced: list[int]
    """d: the least that a unit of each variable adds to the bound."""


class _Row(NamedTuple):
    """low ≤ Σ coefficients · variables ≤ high."""

    variables: list[int]
    coefficients: list[int]
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The optimum of the program over real numbers."""

    bound: int
    """Lower bound on the objective of every plan."""
    added: dict[UnitGroup, dict[Option, float]]
    """Reduced costs: the least that a unit with this option adds to the bound."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupCounts:
    """Variables of a group, one per option."""

    group: UnitGroup
    counts: Sequence[Count]
    used: Sequence[Count]
    """Whether a unit takes the option; empty if the group has several units and none of its runs is constrained."""
    first: Sequence[Count]
    """Whether the first unit takes the option."""
    last: Sequence[Count]
    """Whether the last unit takes the option."""

    def total(self, value: Value) -> Bytes:
        """Return the sum over all units of a value of their options."""
        from ortools.sat.python import cp_model

        values = [value(option) for option in self.group.options]
        some = [k for k, number in enumerate(values) if number]
        return cp_model.LinearExpr.weighted_sum([self.counts[k] for k in some], [values[k] for k in some])

    def of_first(self, value: Value) -> Bytes:
        """Return a value of the first unit's option."""
        return replace(self, counts=self.first).total(value)

    def of_last(self, value: Value) -> Bytes:
        """Return a value of the last unit's option."""
        return replace(self, counts=self.last).total(value)

    def runs(self) -> list[tuple[Option, Count, Count]]:
        """Return each option with its count and whether it is used, in the order of backward; nothing if `used` is
        empty.
        """
        return list(zip(self.group.options, self.counts, self.used, strict=False))


class IntegerModel:
    """Counts of options for each group of units, without constraints on moments; `Program` has the arguments."""

    def __init__(self, timeline: Timeline, limit_bytes: int, runs: Set[Run], *, ordered: bool, lowest: bool) -> None:
        from ortools.sat.python import cp_model

        self._model, self._runs, self._ordered = cp_model.CpModel(), runs, ordered
        self._limit: Bytes = self._model.new_int_var(0, limit_bytes, "") if lowest else limit_bytes
        self._groups = {group: self._declare(group) for group in timeline.groups}
        named = 8 * sum(len(group.options) for group in timeline.groups if len(group.units) > 1)
        most = 2**61 // max(2**8, named)  # of each variable in bytes: their sum must not overflow in CP-SAT
        self._most_bytes = min(most, max(0, limit_bytes))
        # between two moments a level may exceed the limit, by a gradient that is about to be added to a held one
        self._most_level = min(most, 2 * self._most_bytes)
        self._is_small = max(limit_bytes, timeline.host_limit_bytes) <= _SMALL
        self.infeasible = self.optimal = False
        """Whether the last `solve` proved that no solution exists; that there is no better one."""
        self.bound = 0
        """Lower bound on the objective that the last `solve` proved."""
        self.work = 0.0
        """CP-SAT's deterministic seconds in the last `solve`."""

    def minimize_limit(self) -> None:
        """Set the limit as the objective; it must be a variable."""
        self._model.minimize(self._limit)

    def solve(self, most_work: float = math.inf, *, gap: float = MIN_GAIN) -> dict[int, UnitLayout] | None:
        """Return each unit's layout, the best but for the relative gap if the work is enough (`optimal`); None if no
        solution is found within `most_work`.
        """
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        parameters = solver.parameters
        parameters.num_workers, parameters.random_seed = 1, 0  # equal programs give equal plans
        parameters.linearization_level = 2
        if not self._is_small:
            parameters.cp_model_presolve, parameters.cut_level, parameters.use_implied_bounds = False, 0, False
        parameters.max_deterministic_time, parameters.relative_gap_limit = most_work, gap
        status = solver.solve(self._model)
        self.work = solver.response_proto.deterministic_time
        self.infeasible, self.optimal = status == cp_model.INFEASIBLE, status == cp_model.OPTIMAL
        self.bound = round(bound) if math.isfinite(bound := solver.best_objective_bound) else 0
        if self.infeasible or status == cp_model.UNKNOWN:
            return None
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        return self._assigned(solver.value)

    def relax(self) -> Relaxation | None:
        """Return the minimum of a model without runs over real numbers; None if GLOP finds none."""
        rows, domains = _rows(self._model.proto), [tuple(v.domain) for v in self._model.proto.variables]
        objective = self._model.proto.objective
        costs = [0] * len(domains)
        for index, cost in zip(objective.vars, objective.coeffs, strict=True):
            costs[index] = int(cost)
        proof = _minimum(rows, domains, costs)
        if proof is None:
            return None
        added = {
            group: {o: proof.reduced[x.index] / 2**_SHIFT for o, x in zip(group.options, own.counts, strict=True)}
            for group, own in self._groups.items()
        }
        return Relaxation(bound=-(-proof.bound >> _SHIFT) + int(objective.offset), added=added)

    def _assigned(self, number: Callable[[Count], int]) -> dict[int, UnitLayout]:
        """Return each unit's layout, given the number of units that take each option."""
        layouts: dict[int, UnitLayout] = {}
        for group, own in self._groups.items():
            layouts |= group.assign([number(x) for x in own.counts])
        return layouts

    def _declare(self, group: UnitGroup) -> GroupCounts:
        """Return a group's variables, with Σ_k x_k = n, and exactly one option for the first and for the last unit."""
        size, model = len(group.units), self._model
        if size == 1:
            literals = [model.new_bool_var("") for _ in group.options]
            model.add_exactly_one(literals)
            return GroupCounts(group=group, counts=literals, used=literals, first=literals, last=literals)
        counts = [model.new_int_var(0, size, "") for _ in group.options]
        model.add(sum(counts) == size)
        exact = any(units == group.units for units, _ in self._runs)
        used = [self._at_least(x, 1) for x in counts] if exact else []
        first, last = self._one_of(counts), self._one_of(counts)
        # the last unit is of the run whose backward is first
        for k in range(len(counts) if exact and self._ordered else 0):
            model.add(sum(counts[:k]) <= size * (1 - last[k]))
            model.add(sum(counts[k + 1 :]) <= size * (1 - first[k]))
        return GroupCounts(group=group, counts=counts, used=used, first=first, last=last)

    def _one_of(self, counts: Sequence[Count]) -> list[Count]:
        """Return for each option a literal ≤ x_k; exactly one literal is true."""
        literals = [self._model.new_bool_var("") for _ in counts]
        self._model.add_exactly_one(literals)
        for literal, x in zip(literals, counts, strict=True):
            self._model.add(literal <= x)
        return literals

    def _at_least(self, x: Count, number: int) -> Count:
        literal = self._model.new_bool_var("")
        self._model.add(x >= number).only_enforce_if(literal)
        self._model.add(x <= number - 1).only_enforce_if(~literal)
        return literal

    def _as_variable(self, level: Bytes) -> Count | int:
        """Return a variable equal to a level, so that constraints on it have few terms."""
        if isinstance(level, int):
            return level
        named = self._model.new_int_var(-self._most_level, self._most_level, "")
        self._model.add(named == level)
        return named

    def _highest(self, values: Sequence[Bytes]) -> Bytes:
        """Return a value of at least each of these, and of at least 0."""
        if len(values) < 2:
            return values[0] if values else 0
        highest = self._model.new_int_var(-self._most_level, self._most_level, "")
        for value in (0, *values):
            self._model.add(highest >= value)
        return highest

    def _latest(self, used: Count, nbytes: Bytes, otherwise: Bytes) -> Bytes:
        """Return a value of at least `nbytes` if the run is used, else of at least `otherwise`."""
        if isinstance(nbytes, int) and isinstance(otherwise, int) and otherwise == nbytes:
            return nbytes
        latest = self._model.new_int_var(0, self._most_bytes, "")
        least = min(nbytes, self._most_bytes) if isinstance(nbytes, int) else nbytes  # too large: never used
        self._model.add(latest >= least).only_enforce_if(used)
        self._model.add(latest >= otherwise).only_enforce_if(~used)
        return latest

    @staticmethod
    def _sum(groups: Iterable[GroupCounts], value: Value) -> Bytes:
        return sum(own.total(value) for own in groups)

    def _fits(self, level: Bytes, *literals: cp_model.BoolVarT) -> None:
        """Add the constraint level ≤ limit, enforced if all literals are true."""
        constraint = self._model.add(level <= self._limit)
        if literals:
            constraint.only_enforce_if(list(literals))


def _rows(program: cp_model_helper.CpModelProto) -> list[_Row]:
    """Return the rows of a linear CP-SAT program."""
    rows = []
    for constraint in program.constraints:
        if constraint.has_linear():
            linear = constraint.linear
            rows.append(_Row(list(linear.vars), list(linear.coeffs), *linear.domain))
        else:
            literals = list(constraint.exactly_one.literals)
            rows.append(_Row(literals, [1] * len(literals), 1, 1))
    return rows


def _minimum(rows: Sequence[_Row], domains: Sequence[tuple[int, ...]], costs: Sequence[int]) -> Proof | None:
    """Return what GLOP's dual values prove; None if it finds no optimum.

    Variables that may be negative are relative to their upper bound, and rows are scaled to a largest coefficient of
    1, because they mix bytes and counts.
    """
    from ortools.linear_solver import linear_solver_pb2, pywraplp

    model = linear_solver_pb2.MPModelProto()
    units = [float(high or 1) if low < 0 else 1.0 for low, high in domains]
    most = max(map(abs, costs), default=1) or 1
    for (low, high), unit, cost in zip(domains, units, costs, strict=True):
        model.variable.add(lower_bound=low / unit, upper_bound=high / unit, objective_coefficient=cost * unit / most)
    scales = []
    for row in rows:
        coefficients = [c * units[v] for v, c in zip(row.variables, row.coefficients, strict=True)]
        scale = max(map(abs, coefficients), default=1) or 1
        scales.append(scale)
        slack = 0.0 if row.low == row.high else _SLACK
        model.constraint.add(
            lower_bound=-math.inf if row.low <= -_FAR else row.low / scale - slack,
            upper_bound=math.inf if row.high >= _FAR else row.high / scale + slack,
            var_index=row.variables, coefficient=[c / scale for c in coefficients],
        )  # fmt: skip
    solver = pywraplp.Solver.CreateSolver("GLOP")
    # an optimum that is imprecise by GLOP's own measure proves as much
    assert solver.SetSolverSpecificParametersAsString("change_status_to_imprecise: false")
    problem = solver.LoadModelFromProto(model)
    assert not problem, problem
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    duals = [row.dual_value() * most / scale for row, scale in zip(solver.constraints(), scales, strict=True)]
    return _proof(rows, domains, costs, duals)


def _proof(
    rows: Sequence[_Row], domains: Sequence[tuple[int, ...]], costs: Sequence[int], duals: Sequence[float]
) -> Proof:
    """Return the bound that these multipliers of rows prove; it holds for any, and is best for the dual optimum."""
    bound, reduced = 0, [cost << _SHIFT for cost in costs]
    for row, dual in zip(rows, duals, strict=True):
        multiplier = round(math.ldexp(dual, _SHIFT))
        side = row.low if multiplier > 0 else row.high
        if not multiplier or abs(side) >= _FAR:
            continue
        bound += multiplier * side
        for variable, coefficient in zip(row.variables, row.coefficients, strict=True):
            reduced[variable] -= multiplier * coefficient
    bound += sum(d * (low if d > 0 else high) for d, (low, high) in zip(reduced, domains, strict=True))
    return Proof(bound, reduced)
