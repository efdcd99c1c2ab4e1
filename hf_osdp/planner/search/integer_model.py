"""Variables and solvers of the integer program: CP-SAT for the whole program, GLOP and SCIP for its linear
relaxation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from ..decision import UnitLayout
from .options import Option, Timeline, UnitGroup

if TYPE_CHECKING:
    from ortools.linear_solver import linear_solver_pb2
    from ortools.sat.python import cp_model, cp_model_helper

    Bytes: TypeAlias = cp_model.LinearExpr | int
    Count: TypeAlias = cp_model.IntVar

Value: TypeAlias = Callable[[Option], int]
MIN_GAIN = 1e-7
"""Relative difference of step time below which plans count as equal: no rate is known better, and a finer search
takes long.
"""
_SLACK = 1e-7
"""Relative loosening of each bound in relaxations, so that rounding excludes no feasible plan. SCIP's presolving needs
more than its own tolerance of 1e-9: with 1e-8 it lost plans at exactly the limit."""

_SCIP_NODES = 240_000
"""SCIP's nodes times variables in one call: about six seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The optimum of a linear model."""

    bound: float
    """Lower bound on the objective of every plan."""
    added: dict[UnitGroup, dict[Option, float]]
    """Reduced costs: the least that a unit with this option adds to the bound; 0 in a relaxation over whole
    numbers.
    """
    values: Sequence[float]
    """Values of the variables."""
    optimal: bool = True
    """Whether the values reach the bound, but for the gap; if not, they are the best known."""

    def value(self, variable: Count | int) -> float:
        """Return the value of a variable, or of a number."""
        return variable if isinstance(variable, int) else self.values[variable.index]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupCounts:
    """Variables of a group, one per option."""

    group: UnitGroup
    counts: Sequence[Count]
    used: Sequence[Count]
    """Whether a unit takes the option; empty in the relaxation if the group has several units."""
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
        """Return each option with its count and whether it is used, in the order of backward."""
        return list(zip(self.group.options, self.counts, self.used, strict=True))


class IntegerModel:
    """Counts of options for each group of units, without constraints on moments; `Program` has the arguments."""

    def __init__(self, timeline: Timeline, limit_bytes: int | None, *, linear: bool) -> None:
        from ortools.sat.python import cp_model

        self._model, self._linear = cp_model.CpModel(), linear
        self._limit: Bytes = self._model.new_int_var(0, 2**60, "") if limit_bytes is None else limit_bytes
        self._groups = {group: self._declare(group) for group in timeline.groups}
        named = 8 * sum(len(group.options) for group in timeline.groups if len(group.units) > 1)
        most = 2**61 // max(2**8, named)  # of each variable in bytes: their sum must not overflow in CP-SAT
        self._most_bytes = most if limit_bytes is None else min(most, max(0, limit_bytes))
        # between two moments a level may exceed the limit, by a gradient that is about to be added to a held one
        self._most_level = most if limit_bytes is None else min(most, 2 * self._most_bytes)
        self.infeasible = False
        """Whether the last `solve` or `relax` proved that no solution exists."""
        self.work = 0.0
        """CP-SAT's deterministic seconds in the last `solve`."""

    def minimize_limit(self) -> None:
        """Set the limit as the objective; it must be a variable."""
        self._model.minimize(self._limit)

    def solve(self, most_work: float = math.inf) -> tuple[dict[int, UnitLayout], float, bool] | None:
        """Return each unit's layout, the objective, and whether it is proven optimal; None if no solution is found
        within `most_work`.
        """
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        parameters = solver.parameters
        parameters.num_workers, parameters.random_seed = 1, 0  # equal programs give equal plans
        # with any of these settings, OR-tools 9.15 reports some feasible programs as infeasible
        parameters.cp_model_presolve, parameters.cut_level, parameters.use_implied_bounds = False, 0, False
        parameters.max_deterministic_time = most_work
        status = solver.solve(self._model)
        self.work = solver.response_proto.deterministic_time
        self.infeasible = status == cp_model.INFEASIBLE
        if self.infeasible or status == cp_model.UNKNOWN:
            return None
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        return self._assigned(solver.value), solver.objective_value, status == cp_model.OPTIMAL

    def relax(self, *, gap: float | None = None) -> Relaxation | None:
        """Return the minimum of a `linear` model over real numbers (GLOP), or over whole numbers with a relative `gap`
        (SCIP, which needs a limit), in `_SCIP_NODES` at most.

        None if no solution is found: none exists (`infeasible`, which only GLOP is believed), rounding errors are too
        large, or the nodes were too few. If they ended after a solution was found, it is not optimal.
        """
        from ortools.linear_solver import pywraplp

        program, whole = self._model.proto, gap is not None
        solver = pywraplp.Solver.CreateSolver("SCIP" if whole else "GLOP")
        if whole:
            parameters = {
                "limits/nodes": max(1, _SCIP_NODES // len(program.variables)), "limits/gap": gap,
                "numerics/feastol": 1e-9,
            }  # fmt: skip
            solver.SetSolverSpecificParametersAsString(
                "\n".join(f"{name} = {value}" for name, value in parameters.items())
            )
        linear, units, scale = _scaled(program, whole=whole)
        problem = solver.LoadModelFromProto(linear)
        assert not problem, problem
        status = solver.Solve()
        # SCIP's presolving has called feasible programs infeasible
        self.infeasible = not whole and status == pywraplp.Solver.INFEASIBLE
        optimal = status == pywraplp.Solver.OPTIMAL
        if not optimal and not (whole and status == pywraplp.Solver.FEASIBLE):
            return None
        variables = solver.variables()
        added = {
            group: {
                o: 0.0 if whole else variables[x.index].reduced_cost() * scale
                for o, x in zip(group.options, own.counts, strict=True)
            }
            for group, own in self._groups.items()
        }
        values = [v.solution_value() * unit for v, unit in zip(variables, units, strict=True)]
        bound = solver.Objective().BestBound() if whole else solver.Objective().Value()
        return Relaxation(bound=bound * scale + program.objective.offset, added=added, values=values, optimal=optimal)

    def layouts(self, relaxed: Relaxation) -> dict[int, UnitLayout]:
        """Return each unit's layout in a solution over whole numbers."""
        return self._assigned(lambda x: round(relaxed.value(x)))

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
        if self._linear:
            return GroupCounts(
                group=group, counts=counts, used=(), first=self._one_of(counts), last=self._one_of(counts)
            )
        used = [self._at_least(x, 1) for x in counts]
        first = self._first_used(used[::-1])[::-1]
        return GroupCounts(group=group, counts=counts, used=used, first=first, last=self._first_used(used))

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

    def _first_used(self, used: Sequence[Count]) -> list[Count]:
        """Return for each option a literal that is true if the option is used and no earlier option is."""
        literals = []
        for k, literal in enumerate(used):
            foremost = self._model.new_bool_var("")
            self._model.add_bool_and([literal, *(~u for u in used[:k])]).only_enforce_if(foremost)
            literals.append(foremost)
        self._model.add_exactly_one(literals)
        return literals

    def _as_variable(self, level: Bytes) -> Count | int:
        """Return a variable equal to a level, so that constraints on it have few terms."""
        if isinstance(level, int):
            return level
        named = self._model.new_int_var(-self._most_level, self._most_level, "")
        self._model.add(named == level)
        return named

    def _shortened(self, level: Bytes) -> Bytes:
        """Return the level as one variable in a relaxation with a limit, which a linear solver reads faster; else
        unchanged.
        """
        return self._as_variable(level) if self._linear and isinstance(self._limit, int) else level

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


def _scaled(
    program: cp_model_helper.CpModelProto, *, whole: bool
) -> tuple[linear_solver_pb2.MPModelProto, list[float], float]:
    """Return a linear CP-SAT program for a linear solver, over real numbers unless `whole`, with the unit of each
    variable and that of the objective.

    Levels are relative to their upper bound, and rows are scaled to a largest coefficient of 1, because they mix bytes
    and counts.
    """
    from ortools.linear_solver import linear_solver_pb2

    model = linear_solver_pb2.MPModelProto()
    units = [float(v.domain[1] or 1) if v.domain[0] < 0 else 1.0 for v in program.variables]
    for v, unit in zip(program.variables, units, strict=True):
        low, high = v.domain
        model.variable.add(lower_bound=low / unit, upper_bound=high / unit, is_integer=whole and low >= 0)
    far = 2**62
    for constraint in program.constraints:
        if constraint.has_linear():
            indices, (low, high) = list(constraint.linear.vars), constraint.linear.domain
            coefficients = [c * units[v] for v, c in zip(indices, constraint.linear.coeffs, strict=True)]
        else:
            indices, low, high = list(constraint.exactly_one.literals), 1, 1
            coefficients = [1.0] * len(indices)
        scale = max(map(abs, coefficients), default=1) or 1
        # loosening of each bound, scaled as well
        below, above = (0.0 if low == high else _SLACK * max(abs(bound) / scale, 1.0) for bound in (low, high))
        model.constraint.add(
            lower_bound=-math.inf if low <= -far else low / scale - below,
            upper_bound=math.inf if high >= far else high / scale + above,
            var_index=indices, coefficient=[c / scale for c in coefficients],
        )  # fmt: skip
    costs = program.objective.coeffs
    scale = max(map(abs, costs), default=1) or 1
    for index, cost in zip(program.objective.vars, costs, strict=True):
        model.variable[index].objective_coefficient = cost * units[index] / scale
    return model, units, scale
