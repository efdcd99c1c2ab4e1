"""Search, simulate what was found, and search again where the simulation passes the limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import OSDPError
from ..planner.cost.correction import Correction
from ..planner.hardware import Hardware
from ..planner.job import TrainingJob
from ..planner.problem import PlanningProblem
from ..planner.search.search import SearchResult, search
from ..quantities import format_bytes
from .simulate import Simulation, simulate

_ROUNDS = 4
"""The second round's estimate holds what the first was short of, so that a third is needed only where the new plan errs otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRound:
    """One plan with its estimate and its simulation."""

    found: SearchResult
    simulation: Simulation
    job: TrainingJob
    """The job that was searched for, with the correction of the rounds before."""

    @property
    def short_bytes(self) -> int:
        """Simulated less estimated peak of tensors, the correction left out of neither."""
        return self.simulation.peak_bytes - self.found.memory.peak_bytes

    def peak_on(self, hardware: Hardware) -> int:
        """Return the simulated peak with what no tensor can have."""
        return self.simulation.peak_bytes + hardware.outside_bytes(self.found.plan.communicators)


def search_and_simulate(model_or_config: object, problem: PlanningProblem, **options: Any) -> tuple[SimulatedRound, ...]:
    """Find the fastest plan whose simulated peak is within the limit.

    Args:
        model_or_config: as for `simulate`.
        problem: as for `search`.
        options: the fields of `SimulationOptions`; `capability` is that of the problem's hardware.

    Returns:
        The rounds; the last one's plan is the answer. One round where the first plan's simulation fits.

    Raises:
        InfeasibleError: no plan fits, or none does with what the simulation found beside the estimate.
        OSDPError: the simulations still passed the limit after four rounds.
    """
    hardware, limit = problem.hardware, problem.memory_limit_bytes
    rounds: list[SimulatedRound] = []
    while len(rounds) < _ROUNDS:
        found = search(problem)
        simulation = simulate(
            model_or_config, found.plan, description=problem.description, job=problem.job, capability=hardware.device.capability, **options
        )
        rounds.append(SimulatedRound(found=found, simulation=simulation, job=problem.job))
        if rounds[-1].peak_on(hardware) <= hardware.room_bytes(limit):
            return tuple(rounds)
        problem = replace(problem, job=Correction(extra_bytes=rounds[-1].short_bytes).of_job(problem.job))
    least = hardware.limit_for(min(r.peak_on(hardware) for r in rounds))
    raise OSDPError(
        f"No plan's simulated peak is within {format_bytes(limit)} after {_ROUNDS} rounds (the least was"
        f" {format_bytes(least)}); give a limit of {format_bytes(least)}, or plan without simulation."
    )
