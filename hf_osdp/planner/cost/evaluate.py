"""What a given plan costs, whether it was searched for or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..allocator.replay import Replay, Reserved
from ..decision import UnitLayout
from ..description import ModelDescription
from ..hardware import Backend, Collective, Hardware
from ..job import TrainingJob
from ..plan import Plan
from .collectives import TWO_STAGE
from .memory import MemoryEstimate, estimate_memory
from .step_events import replay_of
from .timing import TimeEstimate, UnitTimer

CLOSE = 2**-8
"""Share of the memory to which the capacity that a plan needs is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Bytes and seconds that a plan is expected to need."""

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
    layouts, limit = plan.layouts(description), plan.memory_limit_bytes
    memory = estimate_memory(description, layouts, plan.world_size, job, plan.batch)
    if hardware is None:
        return PlanEstimate(memory=memory)
    reserved = None
    if hardware.backend is Backend.NCCL:  # the CPU has no such allocator
        replay = _replay(plan, description, job)
        reserved = replay.within(capacity_of(plan, hardware, job, limit)) if limit else replay.unlimited
    timer = UnitTimer(description, hardware, job, plan.batch)
    return PlanEstimate(
        memory=memory,
        time=TimeEstimate(units=tuple(map(timer, range(len(layouts)), layouts))),
        collectives=_collectives(plan, layouts, description.calls, timer),
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


def runs_within(plan: Plan, description: ModelDescription, job: TrainingJob, capacity_bytes: int) -> bool:
    """Return whether the allocator can serve two steps of a plan from so many bytes, perhaps after emptying its cache."""
    return _replay(plan, description, job).within(capacity_bytes).fits


def capacity_needed(
    plan: Plan, description: ModelDescription, job: TrainingJob, *, retries: bool = True, enough_bytes: int | None = None
) -> int:
    """Return a capacity in bytes with which two steps of a plan run, at most a 256th above the least; `enough_bytes`, where that is enough.

    With `retries`, after emptying the cache to make room.
    """
    replay = _replay(plan, description, job)
    too_little, enough = replay.unlimited.peak_allocated_bytes - 1, replay.unlimited.peak_reserved_bytes
    if not retries:
        return enough
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
    return replay_of(description, plan.layouts(description), plan.world_size, job, plan.batch)


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
