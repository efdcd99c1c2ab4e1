"""What a given plan costs, unit by unit, whether it was searched for or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..allocator.replay import Replay, Reserved
from ..decision import Batch, UnitLayout
from ..description import ModelDescription
from ..hardware import Backend, Collective, Hardware
from ..job import TrainingJob
from ..plan import Plan
from .collectives import TWO_STAGE
from .memory import MemoryEstimate, estimate_memory
from .step_events import replay_of
from .timing import TimeEstimate, estimate_time
from .units import UnitBytes, unit_bytes, unit_seconds

CLOSE = 2**-8
"""Share of the memory to which the capacity that a plan needs is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Bytes and seconds that a plan is expected to need."""

    units: tuple[UnitBytes, ...]
    """Memory terms of each unit, in the description's order."""
    memory: MemoryEstimate
    time: TimeEstimate | None = None
    """None where the hardware is not known, as `collectives`."""
    collectives: Mapping[Collective, float] | None = None
    """Seconds of one optimizer step in each collective, hidden or not."""
    reserved: Reserved | None = None
    """What torch's allocator takes from the device, with its retries under the plan's limit; None where devices may not be CUDA's."""


def estimate_plan(plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware | None = None) -> PlanEstimate:
    """Estimate memory and time of a plan, which must be for this description (`Plan.check`).

    Without hardware there is no estimate of time or of reserved memory.
    """
    layouts, batch = plan.layouts(description), plan.batch
    pairs = zip(description.units, layouts, strict=True)
    units = tuple(unit_bytes(unit, layout, plan.world_size, job, batch) for unit, layout in pairs)
    memory = estimate_memory(description, layouts, plan.world_size, job, batch)
    if hardware is None:
        return PlanEstimate(units=units, memory=memory)
    reserved = None
    if hardware.backend is Backend.NCCL:  # the CPU has no such allocator
        capacity = capacity_of(plan, hardware, job, plan.memory_limit_bytes) if plan.memory_limit_bytes else None
        replay = _replay(plan, description, job)
        reserved = replay.unlimited if capacity is None else replay.within(capacity)
    return PlanEstimate(
        units=units,
        memory=memory,
        time=estimate_time(description, layouts, hardware, job, batch),
        collectives=_collectives(description, layouts, hardware, job, batch),
        reserved=reserved,
    )


def capacity_of(plan: Plan, hardware: Hardware, job: TrainingJob, memory_limit_bytes: int) -> int:
    """Return the bytes that a limit leaves torch's allocator under a plan: without the margin and what no tensor can have.

    A replay holds a correction that is positive; what a negative one says that tensors do not take comes on top.
    """
    return hardware.room_bytes(memory_limit_bytes) - hardware.outside_bytes(plan.communicators) - min(0, job.correction_bytes)


def is_replayed(description: ModelDescription, hardware: Hardware) -> bool:
    """Return whether plans can be replayed: their allocations were traced, and the device has the allocator (CUDA)."""
    return hardware.backend.overlaps and bool(description.allocations)


def runs_within(plan: Plan, description: ModelDescription, job: TrainingJob, capacity_bytes: int, *, retries: bool = True) -> bool:
    """Return whether the allocator can serve two steps of a plan from so many bytes; `retries`: after emptying its cache to make room."""
    replayed = _replay(plan, description, job).within(capacity_bytes)
    return replayed.fits and (retries or not replayed.alloc_retries)


def capacity_needed(
    plan: Plan, description: ModelDescription, job: TrainingJob, *, retries: bool = True, enough_bytes: int | None = None
) -> int:
    """Return a capacity in bytes with which a plan runs, at most a 256th above the least; `enough_bytes`, where that is enough."""
    replay = _replay(plan, description, job)
    if not retries:
        return replay.unlimited.peak_reserved_bytes
    too_little, enough = replay.unlimited.peak_allocated_bytes - 1, replay.unlimited.peak_reserved_bytes
    if enough_bytes is not None and too_little < enough_bytes < enough:
        if replay.within(enough_bytes).fits:
            return enough_bytes
        too_little = enough_bytes
    while enough - too_little > max(1, int(enough * CLOSE)):
        between = (too_little + enough) // 2
        if replay.within(between).fits:
            enough = between
        else:
            too_little = between
    return enough


def _replay(plan: Plan, description: ModelDescription, job: TrainingJob) -> Replay:
    return replay_of(description, tuple(plan.layouts(description)), plan.world_size, job, plan.batch)


def _collectives(
    description: ModelDescription, layouts: Sequence[UnitLayout], hardware: Hardware, job: TrainingJob, batch: Batch
) -> dict[Collective, float]:
    """Sum gathers of every micro-step, reduce-scatters as often as the batch says, and one all-reduce between replicas."""
    seconds = dict.fromkeys(Collective, 0.0)
    for unit, calls, layout in zip(description.units, description.calls, layouts, strict=True):
        terms = unit_seconds(unit, layout, hardware, job)
        gather, scatter = TWO_STAGE.values() if layout.two_stage else TWO_STAGE.keys()
        seconds[gather] += batch.accumulation_steps * calls * (terms.gather_forward + terms.gather_backward)
        seconds[scatter] += batch.reduce_scatters(layout) * terms.reduce_scatter
        seconds[Collective.ALL_REDUCE] += terms.all_reduce
    return seconds
