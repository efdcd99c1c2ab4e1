"""A file with a plan and its inputs, which is enough to run and to explain the plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..planner.cost.evaluate import PlanEstimate, estimate_plan
from ..planner.cost.phases import Phase, phases
from ..planner.description import ModelDescription
from ..planner.files import plain, validated, write_whole
from ..planner.hardware import Hardware
from ..planner.plan import Plan, plan_content
from ..planner.problem import PlanningProblem, Strategy
from ..planner.training_job import TrainingJob
from ..reading import read_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    description: ModelDescription
    job: TrainingJob
    hardware: Hardware | None
    """None if a given plan ran without a measurement of the hardware."""
    simplicity: float = 0.0
    others: tuple[Phase, ...] = ()
    """What a run does beside training, with bytes that its plan needs for it, such as evaluation."""

    @classmethod
    def of(cls, problem: PlanningProblem) -> PlanInputs:
        return cls(
            description=problem.description, job=problem.job, hardware=problem.hardware, simplicity=problem.simplicity
        )

    def problem(self, memory_limit_bytes: int, strategy: str = Strategy.OSDP.value) -> PlanningProblem:
        """Return the problem under a limit; the hardware must be known."""
        assert self.hardware is not None
        return PlanningProblem(
            description=self.description, hardware=self.hardware, job=self.job, memory_limit_bytes=memory_limit_bytes,
            strategy=Strategy.parse(strategy), simplicity=self.simplicity,
        )  # fmt: skip

    def estimate(self, plan: Plan) -> PlanEstimate:
        """Return the estimate of a plan, which must be for these inputs."""
        return estimate_plan(plan, self.description, self.job, self.hardware)

    def outside_bytes(self, plan: Plan) -> int:
        """Return the bytes of each device outside tensors; 0 without hardware."""
        return 0 if self.hardware is None else self.hardware.outside_bytes(plan.communicators)

    def room_bytes(self, plan: Plan, limit_bytes: int | None) -> int | None:
        """Return the bytes that the plan's limit, or `limit_bytes` where it has none, leaves for tensors; None without
        a limit.
        """
        limit = plan.memory_limit_bytes or limit_bytes
        if self.hardware is None or limit is None:
            return limit
        return self.hardware.room_bytes(limit) - self.outside_bytes(plan)

    def phases(self, plan: Plan, estimate: PlanEstimate) -> list[Phase]:
        """Return the parts of a job under a plan, training first."""
        layouts = plan.layouts(self.description)
        return [*phases(self.description, layouts, estimate.memory, self.job, plan.world_size, self.others)]


def plan_file_content(plan: Plan, inputs: PlanInputs) -> dict[str, Any]:
    """Return the content of a plan file: `plan`, in the form of `Plan.to_json`, and `inputs`."""
    return {"plan": json.loads(plan.to_json()), "inputs": plain(inputs)}


def write_json(content: dict[str, Any], path: str | Path) -> None:
    """Write JSON atomically into an existing folder."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def read_plan_file(path: str | Path) -> tuple[Plan, PlanInputs | None]:
    """Read a plan file, a run's `osdp_report.json`, or a file of `Plan.save`, which has no inputs.

    Raise PlanError if it cannot be read, its plan is not valid, or its inputs belong to another version or another
    model.
    """
    data = plan_content(read_bytes(path, "plan", PlanError), str(path))
    if isinstance(data, dict) and "model_type" in data:
        raise PlanError(
            f"{path} is a model's configuration, not a plan; make a plan with: hf-osdp plan {path} --output plan.json."
        )
    plan = Plan.from_content(data, source=str(path))
    if "inputs" not in data:
        return plan, None
    inputs = validated(
        PlanInputs,
        data["inputs"],
        lambda reason: PlanError(f"The inputs in {path} cannot be read: {reason}. Plan again with this version."),
    )
    plan.check(inputs.description, plan.world_size)
    if inputs.hardware is not None and inputs.hardware.world_size != plan.world_size:
        raise PlanError(
            f"{path} describes {inputs.hardware.world_size} devices, but its plan is for {plan.world_size}. Plan"
            " again."
        )
    return plan, inputs
