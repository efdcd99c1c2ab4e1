"""Estimate memory and time of a given plan, from a search or from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..description import ModelDescription
from ..hardware import Hardware
from ..plan import Plan
from ..training_job import TrainingJob
from .memory import MemoryEstimate, estimate_memory
from .timing import TimeEstimate, UnitTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Estimated bytes and seconds of a plan."""

    memory: MemoryEstimate
    time: TimeEstimate | None = None
    """None without hardware, as `streams`."""
    streams: Mapping[str, tuple[float, float]] | None = None
    """Seconds of an optimizer step in each collective and in copies, all and exposed; see `UnitTimer.streams`."""


def estimate_plan(
    plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware | None = None
) -> PlanEstimate:
    """Estimate memory of a plan, and with `hardware` time too.

    The plan must be for this description (`Plan.check`).
    """
    layouts = plan.layouts(description)
    memory = estimate_memory(description, layouts, plan.world_size, job, plan.batch)
    if hardware is None:
        return PlanEstimate(memory=memory)
    timer = UnitTimer(description, hardware, job, plan.batch)
    return PlanEstimate(memory=memory, time=timer.estimate(layouts), streams=timer.streams(layouts))
