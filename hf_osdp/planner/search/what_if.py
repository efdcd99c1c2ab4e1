"""What a change of devices, memory or model would bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import InfeasibleError
from ...quantities import format_bytes
from ..cost.evaluate import is_replayed
from ..job import TrainingJob
from ..problem import PlanningProblem
from .remedies import fits_by_estimate
from .result import SearchResult
from .search import least_memory, search

_PRECISION = 16
"""The largest size that fits is found to within one part in so many, or one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a change."""

    question: str
    change: str
    """What was changed or found, for a person to read."""
    problem: PlanningProblem | None = None
    """None where there is no such problem."""
    result: SearchResult | None = None
    """None where nothing fits."""
    reason: str = ""
    """Why there is no result."""

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput in tokens, which compares across sequence lengths."""
        rate = None if self.result is None else self.result.plan.samples_per_s
        return None if self.result is None or rate is None else rate * self.result.plan.sequence_length


def answer(question: str, problem: PlanningProblem, change: str) -> Answer:
    """Search a problem after a change, which is described for a person to read."""
    unanswered = Answer(question=question, change=change, problem=problem)
    try:
        return replace(unanswered, result=search(problem))
    except InfeasibleError as error:
        return replace(unanswered, reason=f"needs {format_bytes(error.least_peak_bytes)}")
    except ValueError as error:  # hybrid sharding has no group size for this number of devices
        return replace(unanswered, reason=str(error))


def fits(problem: PlanningProblem) -> bool:
    """Return whether any plan fits, as torch's caching allocator serves it where that can be replayed."""
    if not fits_by_estimate(problem):
        return False
    return not is_replayed(problem.description, problem.hardware) or least_memory(problem) <= problem.memory_limit_bytes


def one_more_device(problem: PlanningProblem) -> tuple[PlanningProblem, str]:
    """Return the problem with one more device in each node, and one more node where there are several, and the change in words.

    The global batch stays where the new world size divides it; else it is raised to the next multiple that does.
    """
    before = problem.hardware
    after = before.scaled(nodes=before.nodes + (before.nodes > 1), devices_per_node=before.devices_per_node + 1)
    batch = next_batch(problem.job, after.world_size)
    nodes = f"{after.nodes} nodes x " if after.nodes > 1 else ""
    change = f"{nodes}{after.devices_per_node} devices"
    if batch != problem.job.global_batch_size:
        change += f", global batch raised from {problem.job.global_batch_size} to {batch}"
    if before.timings:
        change += ", measured collectives replaced by the links' rates"
    return replace(problem, hardware=after, job=replace(problem.job, global_batch_size=batch)), change


def next_batch(job: TrainingJob, world_size: int) -> int:
    """Return the least global batch, not below the job's, that fills whole micro-steps on `world_size` ranks."""
    unit = world_size * (job.micro_batch_size or 1)
    return -(-job.global_batch_size // unit) * unit


def twice_the_memory(problem: PlanningProblem) -> tuple[PlanningProblem, str]:
    """Return the problem with twice the limit, whatever the device has, and the change in words."""
    limit = 2 * problem.memory_limit_bytes
    return replace(problem, memory_limit_bytes=limit), f"limit {format_bytes(limit)}"


def largest(fit: Callable[[int], bool], start: int, *, step: int, most: int) -> int | None:
    """Return the largest size that fits, to within one step or one part in 16, whichever is more.

    Doubles or halves from `start` until one size fits and another does not, then bisects.

    Args:
        fit: whether a size fits; every size below one that fits is taken to fit too.
        start: where to begin, a multiple of `step`.
        step: sizes are multiples of it.
        most: no size above it is tried.

    Returns:
        The size, or None where not even one step fits.
    """
    most = most // step * step
    low, high, size = 0, most + step, min(start, most)
    while size and low < size < high:
        if fit(size):
            low, size = size, min(2 * size, most)
        else:
            high, size = size, (size // 2) // step * step
        if low and high <= most:
            break
    while low and high - low > max(step, low // _PRECISION):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low or None
