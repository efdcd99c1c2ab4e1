"""A plan held against the limit as the device enforces it: torch's caching allocator has to serve the whole step within it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InfeasibleError
from ..quantities import format_bytes
from .correction import Correction
from .description import ModelDescription
from .evaluate import batch_of, capacity_of, choices_of
from .hardware import Hardware
from .job import TrainingJob
from .memory import estimate_memory
from .plan import Plan
from .step_events import estimate_reserved

if TYPE_CHECKING:
    from .search import SearchResult

_ROUNDS = 8
_CLOSE = 2**-8
"""Of the room: the second round leaves so much more free, twice as much in each that follows, and nothing finer is looked for."""


def is_replayed(description: ModelDescription, hardware: Hardware) -> bool:
    """Whether plans can be replayed: their allocations were traced, and the device has the allocator (CUDA)."""
    return hardware.backend.overlaps and bool(description.allocations)


def runs_within(plan: Plan, description: ModelDescription, job: TrainingJob, capacity_bytes: int) -> bool:
    """Return whether the allocator can serve two steps of a plan from so many bytes, by emptying its cache where it has to."""
    return estimate_reserved(
        description, choices_of(plan, description), plan.world_size, job, batch_of(plan), capacity_bytes=capacity_bytes
    ).fits


def within_reserved(
    find: Callable[[TrainingJob], SearchResult],
    description: ModelDescription,
    hardware: Hardware,
    job: TrainingJob,
    memory_limit_bytes: int,
    *,
    runs: Callable[[Plan, ModelDescription, TrainingJob, int], bool] | None = None,
) -> SearchResult:
    """Return the first plan that the allocator can serve within the limit less the margin.

    Where it cannot, the search is repeated with more bytes at every moment, doubled until a plan runs or none is left, and then halved.
    Plans differ in what they need beside their estimate, so that the answer is the best that was seen.

    Args:
        find: from a job to the fastest plan that fits by its estimate.
        description, hardware, job, memory_limit_bytes: what is searched with.
        runs: whether a plan runs within so many bytes; None replays it (`runs_within`).

    Returns:
        The plan with the estimates of the job that was given; one that took a second round is not proven to be optimal.

    Raises:
        InfeasibleError: no plan fits by its estimate, or none that was found as the allocator serves it.
    """
    runs = runs or runs_within
    room = hardware.room_bytes(memory_limit_bytes)
    close = step = max(1, int(room * _CLOSE))
    extra, too_little, enough, best, error = 0, 0, None, None, None
    for _ in range(_ROUNDS):
        found = None
        try:
            found = find(Correction(extra_bytes=extra).of_job(job))
        except InfeasibleError as caught:
            if not extra:
                raise
            error = caught
        if found is not None and not runs(found.plan, description, job, capacity_of(found.plan, hardware, job, memory_limit_bytes)):
            too_little = extra
        else:
            enough, best = extra, found or best
        if enough is not None and enough - too_little <= close:
            break
        extra, step = (too_little + step if enough is None else (too_little + enough) // 2), 2 * step
    if best is not None:
        plan = best.plan
        memory = estimate_memory(description, choices_of(plan, description), plan.world_size, job, batch_of(plan))
        plan = replace(plan, peak_bytes=memory.on(hardware), proven_optimal=plan.proven_optimal and not extra)
        return replace(best, plan=plan, memory=memory)
    raise error or InfeasibleError(
        f"No plan that was found runs within {format_bytes(memory_limit_bytes)} per device as torch's allocator serves it, though"
        f" {format_bytes(extra)} were left free for its gaps. Use a memory limit of {format_bytes(memory_limit_bytes + extra)}.",
        memory_limit_bytes=memory_limit_bytes,
        least_peak_bytes=memory_limit_bytes + extra,
    )
