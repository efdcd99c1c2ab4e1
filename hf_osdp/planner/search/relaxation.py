"""The linear relaxation of an integer program: a bound below every solution, and what each variable adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.linear_solver import pywraplp
    from ortools.sat.python.cp_model_helper import CpModelProto

SLACK = 1e-7
"""Part of each bound by which it is loosened, so that rounding in the linear solver refuses nothing that is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """An optimum of the relaxation."""

    minimum: float
    reduced_costs: Sequence[float]
    """One a variable: a solution in which it rises by 1 from where the relaxation has it costs at least so much more."""


def solve_relaxation(program: CpModelProto) -> Relaxed | None:
    """Solve a program of CP-SAT (a `CpModelProto`) with linear and exactly-one constraints over real numbers.

    Returns:
        The optimum; None where none was found, because there is no solution or rounding got in the way.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    variables = [solver.NumVar(v.domain[0], v.domain[1], "") for v in program.variables]
    for constraint in program.constraints:
        if constraint.has_linear():
            linear = constraint.linear
            _add(solver, variables, linear.vars, linear.coeffs, *linear.domain)
        else:
            literals = constraint.exactly_one.literals
            _add(solver, variables, literals, [1] * len(literals), 1, 1)
    objective, scale = solver.Objective(), max(map(abs, program.objective.coeffs), default=1) or 1
    for index, coefficient in zip(program.objective.vars, program.objective.coeffs, strict=True):
        objective.SetCoefficient(variables[index], coefficient / scale)
    objective.SetMinimization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    return Relaxed(
        minimum=objective.Value() * scale + program.objective.offset, reduced_costs=[v.reduced_cost() * scale for v in variables]
    )


def _add(
    solver: pywraplp.Solver,
    variables: Sequence[pywraplp.Variable],
    indices: Sequence[int],
    coefficients: Sequence[int],
    low: int,
    high: int,
) -> None:
    """Add one row, scaled so that its largest coefficient is 1: bytes and counts stand side by side."""
    scale = max((abs(c) for c in coefficients), default=1) or 1
    infinity, far = solver.infinity(), 2**62
    margin = 0.0 if low == high else SLACK
    row = solver.Constraint(
        -infinity if low <= -far else (low - margin * abs(low)) / scale, infinity if high >= far else (high + margin * abs(high)) / scale
    )
    for index, coefficient in zip(indices, coefficients, strict=True):
        row.SetCoefficient(variables[index], row.GetCoefficient(variables[index]) + coefficient / scale)
