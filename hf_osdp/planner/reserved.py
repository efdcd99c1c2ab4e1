"""A plan's reserved peak held against the limit: what the caching allocator takes, tensors and the gaps between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InfeasibleError
from ..quantities import format_bytes
from .correction import Correction
from .costs import Batch, Choice
from .description import ModelDescription
from .evaluate import batch_of, choices_of
from .hardware import Hardware
from .job import TrainingJob
from .memory import estimate_memory

if TYPE_CHECKING:
    from .search import SearchResult

ReservedPeak = Callable[[ModelDescription, Sequence[Choice], int, TrainingJob, Batch], int]
"""From a description, choices, the world size, a job and a batch to the most bytes that torch's allocator reserves in a step."""
_ROUNDS = 8
_LEAST_STEP = 2**-10
"""Of the room, by which a round asks for more at least; twice as much in each."""


def within_reserved(
    find: Callable[[TrainingJob], SearchResult],
    reserved_peak: ReservedPeak,
    description: ModelDescription,
    hardware: Hardware,
    job: TrainingJob,
    memory_limit_bytes: int,
) -> SearchResult:
    """The first plan whose reserved peak, with what no tensor can have, is within the limit less the margin.

    Where a plan passes it, the search is repeated with the excess at every moment. Plans differ in their excess: where nothing is left
    with so much of it, half of what was added last is tried.

    Args:
        find: from a job to the fastest plan that fits by its estimate.
        reserved_peak: of one plan.
        description, hardware, job, memory_limit_bytes: what is searched with.

    Returns:
        The plan with the estimates of the job that was given; one that took a second round is not proven to be optimal.

    Raises:
        InfeasibleError: no plan fits by its estimate, or none that was found by its reserved peak.
    """
    room = hardware.room_bytes(memory_limit_bytes)
    extra, feasible, least, error = 0, 0, int(room * _LEAST_STEP), None
    for _ in range(_ROUNDS):
        try:
            found = find(Correction(extra_bytes=extra).of_job(job))
        except InfeasibleError as caught:
            if not extra:
                raise
            error, extra = caught, (feasible + extra) // 2
            continue
        plan, feasible = found.plan, extra
        choices, batch = choices_of(plan, description), batch_of(plan)
        over = reserved_peak(description, choices, plan.world_size, job, batch) + hardware.outside_bytes(plan.communicators) - room
        if over <= 0:
            memory = estimate_memory(description, choices, plan.world_size, job, batch)
            plan = replace(plan, peak_bytes=memory.on(hardware), proven_optimal=plan.proven_optimal and not extra)
            return replace(found, plan=plan, memory=memory)
        extra, least = extra + max(over, least), 2 * least
    needed = hardware.limit_for(room + over)
    raise error or InfeasibleError(
        f"No plan that was found fits {format_bytes(memory_limit_bytes)} per device by what the allocator reserves: the last one needs"
        f" {format_bytes(room + over)}. Use a memory limit of {format_bytes(needed)}.",
        memory_limit_bytes=memory_limit_bytes,
        least_peak_bytes=needed,
    )
