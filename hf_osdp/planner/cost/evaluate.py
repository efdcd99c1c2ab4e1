"""Estimate memory and time of a given plan, from a search or from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ..decision import UnitLayout
from ..description import ModelDescription
from ..hardware import Collective, Hardware
from ..plan import Plan
from ..training_job import TrainingJob
from .memory import MemoryEstimate, estimate_memory
from .timing import TimeEstimate, UnitTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Estimated bytes and seconds of a plan."""

    memory: MemoryEstimate
    time: TimeEstimate | None = None
    """None without hardware, as `collectives`."""
    collectives: Mapping[Collective, float] | None = None
    """Seconds in each collective per optimizer step, overlapped with compute or not."""


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
    return PlanEstimate(
        memory=memory,
        time=TimeEstimate(units=tuple(map(timer, range(len(layouts)), layouts))),
        collectives=_collectives(timer, layouts),
    )


def _collectives(timer: UnitTimer, layouts: Sequence[UnitLayout]) -> dict[Collective, float]:
    """Return the seconds of a step in each collective."""
    seconds = dict.fromkeys(Collective, 0.0)
    for times, _, work in chain.from_iterable(map(timer.overlaps, range(len(layouts)), layouts)):
        for name in seconds.keys() & work.keys():
            seconds[name] += times * work[name]
    return seconds
