"""What a given plan costs, whether it was searched for or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..decision import UnitLayout
from ..description import ModelDescription
from ..hardware import Collective, Hardware
from ..job import TrainingJob
from ..plan import Plan
from .collectives import TWO_STAGE
from .memory import MemoryEstimate, estimate_memory
from .timing import TimeEstimate, UnitTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Bytes and seconds that a plan is expected to need."""

    memory: MemoryEstimate
    time: TimeEstimate | None = None
    """None where the hardware is not known, as `collectives`."""
    collectives: Mapping[Collective, float] | None = None
    """Seconds of one optimizer step in each collective, hidden or not."""


def estimate_plan(plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware | None = None) -> PlanEstimate:
    """Estimate memory and time of a plan, which must be for this description (`Plan.check`).

    Without hardware there is no estimate of time.
    """
    layouts = plan.layouts(description)
    memory = estimate_memory(description, layouts, plan.world_size, job, plan.batch)
    if hardware is None:
        return PlanEstimate(memory=memory)
    timer = UnitTimer(description, hardware, job, plan.batch)
    return PlanEstimate(
        memory=memory,
        time=TimeEstimate(units=tuple(map(timer, range(len(layouts)), layouts))),
        collectives=_collectives(plan, layouts, description.calls, timer),
    )


def _collectives(plan: Plan, layouts: Sequence[UnitLayout], calls: Sequence[int], timer: UnitTimer) -> dict[Collective, float]:
    """Sum gathers of every micro-step, reduce-scatters as often as the batch says, and one all-reduce between replicas."""
    seconds = dict.fromkeys(Collective, 0.0)
    for index, (times, layout) in enumerate(zip(calls, layouts, strict=True)):
        terms = timer.terms(index, layout)
        gather, scatter = TWO_STAGE.values() if layout.two_stage else TWO_STAGE.keys()
        seconds[gather] += plan.accumulation_steps * times * (terms.gather_forward + terms.gather_backward)
        seconds[scatter] += plan.batch.reduce_scatters(layout) * terms.reduce_scatter
        seconds[Collective.ALL_REDUCE] += terms.all_reduce
    return seconds
