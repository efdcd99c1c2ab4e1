"""What a given plan costs, unit by unit, whether it was searched for or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..allocator.replay import Reserved
from ..allocator.step_events import estimate_reserved
from ..decision import Batch, UnitLayout
from ..description import ModelDescription
from ..hardware import Backend, Collective, Hardware
from ..job import TrainingJob
from ..plan import Plan
from .memory import MemoryEstimate, estimate_memory
from .timing import TimeEstimate, estimate_time
from .units import UnitBytes, unit_bytes, unit_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Bytes and seconds that a plan is expected to need."""

    units: tuple[UnitBytes, ...]
    """Memory terms of each unit, in the description's order."""
    memory: MemoryEstimate
    time: TimeEstimate | None
    """None where the hardware is not known."""
    collectives: Mapping[Collective, float] | None = None
    """Seconds of one optimizer step in each collective, hidden or not; None where the hardware is not known."""
    reserved: Reserved | None = None
    """What torch's allocator takes from the device, with its retries under the plan's limit; None where the devices are not known to be
    CUDA's."""


def estimate_plan(plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware | None = None) -> PlanEstimate:
    """Estimate a plan.

    Args:
        plan: what runs; it must be for this description (`Plan.check`).
        description: the model.
        job: precision and optimizer.
        hardware: devices and links; without them there is no time estimate, and none of reserved memory.

    Returns:
        Memory moments, memory terms by unit, reserved memory, and seconds by unit.
    """
    choices, batch = plan.layouts(description), plan.batch
    pairs = zip(description.units, choices, strict=True)
    return PlanEstimate(
        units=tuple(unit_bytes(unit, choice, plan.world_size, job, batch) for unit, choice in pairs),
        memory=estimate_memory(description, choices, plan.world_size, job, batch),
        time=None if hardware is None else estimate_time(description, choices, hardware, job, batch),
        collectives=None if hardware is None else _collectives(description, choices, hardware, job, batch),
        reserved=None if hardware is None else _reserved(plan, description, choices, hardware, job, batch),
    )


def _reserved(
    plan: Plan, description: ModelDescription, choices: Sequence[UnitLayout], hardware: Hardware, job: TrainingJob, batch: Batch
) -> Reserved | None:
    """Reserved memory, of what the plan's limit leaves the allocator; None on the CPU, which has no such allocator."""
    if hardware.backend is not Backend.NCCL:
        return None
    capacity = capacity_of(plan, hardware, job, plan.memory_limit_bytes) if plan.memory_limit_bytes else None
    return estimate_reserved(description, choices, plan.world_size, job, batch, capacity_bytes=capacity)


def capacity_of(plan: Plan, hardware: Hardware, job: TrainingJob, memory_limit_bytes: int) -> int:
    """Bytes that a limit leaves torch's allocator under a plan: without the margin and what no tensor can have.

    A replay holds a correction that is positive; what a negative one says that tensors do not take comes on top.
    """
    return hardware.room_bytes(memory_limit_bytes) - hardware.outside_bytes(plan.communicators) - min(0, job.correction_bytes)


def _collectives(
    description: ModelDescription, choices: Sequence[UnitLayout], hardware: Hardware, job: TrainingJob, batch: Batch
) -> dict[Collective, float]:
    """Gathers in every micro-step, reduce-scatters as often as the batch says, all-reduces between replicas once."""
    terms = [unit_seconds(unit, choice, hardware, job) for unit, choice in zip(description.units, choices, strict=True)]
    seconds = dict.fromkeys(Collective, 0.0)
    calls = description.calls
    for number, choice, t in zip(calls, choices, terms, strict=True):
        two_stage = choice.stage_size > 1
        gather = Collective.TWO_STAGE_ALL_GATHER if two_stage else Collective.ALL_GATHER
        scatter = Collective.TWO_STAGE_REDUCE_SCATTER if two_stage else Collective.REDUCE_SCATTER
        seconds[gather] += batch.accumulation_steps * number * (t.gather_forward + t.gather_backward)
        seconds[scatter] += batch.reduce_scatters(choice) * t.reduce_scatter
        seconds[Collective.ALL_REDUCE] += t.all_reduce
    return seconds
