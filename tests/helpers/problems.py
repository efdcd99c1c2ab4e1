"""Planning problems with few words."""

from __future__ import annotations

from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.problem import PlanningProblem, Strategy
from hf_osdp.planner.training_job import OptimizerSpec, Precision, TrainingJob
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.job import Job


def problem(
    description: ModelDescription, hardware: Hardware, job: TrainingJob, limit: int = 2**40, *,
    strategy: str | Strategy = Strategy.OSDP,
) -> PlanningProblem:  # fmt: skip
    """Return the problem; the default limit is more than any device has."""
    return PlanningProblem(
        description=description, hardware=hardware, job=job, memory_limit_bytes=limit, strategy=strategy
    )


def run_job(config: OSDPConfig | None = None, **facts: object) -> Job:
    """Return the job of a run of one process on the CPU with AdamW, or with other facts."""
    known = {"world_size": 1, "device_type": "cpu", "precision": Precision(), "optimizer": OptimizerSpec()}
    return Job(config=config or OSDPConfig(), **{**known, **facts})
