"""Search, simulate what was found, and search again where the simulation passes the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import OSDPError
from ..modeling.batch import Inputs
from ..planner.cost.correction import Correction
from ..planner.description import ModelDescription
from ..planner.hardware import Hardware
from ..planner.job import TrainingJob
from ..planner.problem import PlanningProblem, Strategy
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
        """Simulated peak with what no tensor can have."""
        return self.simulation.peak_bytes + hardware.outside_bytes(self.found.plan.communicators)


def search_and_simulate(
    model_or_config: Any,
    *,
    description: ModelDescription,
    hardware: Hardware,
    job: TrainingJob,
    memory_limit_bytes: int,
    strategy: str | Strategy = Strategy.OSDP,
    device_type: str = "cpu",
    auto_class: Any = None,
    inputs: Inputs | None = None,
    activation_checkpointing: bool = False,
) -> tuple[SimulatedRound, ...]:
    """The fastest plan whose simulated peak is within the limit.

    Args:
        model_or_config, auto_class, inputs, device_type, activation_checkpointing: as for `simulate`.
        description, hardware, job, memory_limit_bytes, strategy: as for `search`.

    Returns:
        The rounds; the last one's plan is the answer. One round where the first plan's simulation fits.

    Raises:
        InfeasibleError: no plan fits, or none does with what the simulation found beside the estimate.
        OSDPError: the simulations still passed the limit after four rounds.
    """
    rounds: list[SimulatedRound] = []
    while len(rounds) < _ROUNDS:
        found = search(
            PlanningProblem(
                description=description,
                hardware=hardware,
                job=job,
                memory_limit_bytes=memory_limit_bytes,
                strategy=Strategy.parse(strategy),
            )
        )
        simulation = simulate(
            model_or_config, found.plan, description=description, job=job, device_type=device_type,
            capability=hardware.device.capability,
            auto_class=auto_class, inputs=inputs, activation_checkpointing=activation_checkpointing,
        )  # fmt: skip
        rounds.append(SimulatedRound(found=found, simulation=simulation, job=job))
        if rounds[-1].peak_on(hardware) <= hardware.room_bytes(memory_limit_bytes):
            return tuple(rounds)
        job = Correction(extra_bytes=rounds[-1].short_bytes).of_job(job)
    least = hardware.limit_for(min(r.peak_on(hardware) for r in rounds))
    raise OSDPError(
        f"No plan's simulated peak is within {format_bytes(memory_limit_bytes)} after {_ROUNDS} rounds (the least was"
        f" {format_bytes(least)}); give a limit of {format_bytes(least)}, or plan without simulation."
    )
