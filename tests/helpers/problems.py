"""Planning problems with few words."""

from __future__ import annotations

from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.problem import PlanningProblem, Strategy


def problem(
    description: ModelDescription,
    hardware: Hardware,
    job: TrainingJob,
    limit: int = 2**40,
    *,
    strategy: str | Strategy = Strategy.OSDP,
) -> PlanningProblem:
    """Return the problem; the default limit is more than any device has."""
    return PlanningProblem(
        description=description, hardware=hardware, job=job, memory_limit_bytes=limit, strategy=strategy
    )
