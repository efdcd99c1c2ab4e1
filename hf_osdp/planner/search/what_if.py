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
from .search import SearchResult, least_memory, search

_PRECISION = 16
"""The largest size that fits is found to within one part in so many, or one step."""


def fits(problem: PlanningProblem) -> bool:
    """Return whether any plan fits, as torch's caching allocator serves it where that can be replayed."""
    if not fits_by_estimate(problem):
        return False
    return not is_replayed(problem.description, problem.hardware) or least_memory(problem) <= problem.memory_limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A problem after a change."""

    problem: PlanningProblem
    change: str
    """What was changed, for a person to read."""


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
        return None if self.result is None else self.result.plan.samples_per_s * self.result.plan.sequence_length


def answer(question: str, changed: Changed) -> Answer:
    """Search the changed problem."""
    try:
        result = search(changed.problem)
    except InfeasibleError as error:
        reason = f"needs {format_bytes(error.least_peak_bytes)}"
        return Answer(question=question, change=changed.change, problem=changed.problem, reason=reason)
    except ValueError as error:  # hybrid sharding has no group size for this number of devices
        return Answer(question=question, change=changed.change, problem=changed.problem, reason=str(error))
    return Answer(question=question, change=changed.change, problem=changed.problem, result=result)


def one_more_device(problem: PlanningProblem) -> Changed:
    """One more device in each node, and one more node where there are several.

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
    return Changed(problem=replace(problem, hardware=after, job=replace(problem.job, global_batch_size=batch)), change=change)


def next_batch(job: TrainingJob, world_size: int) -> int:
    """The least global batch, not below the job's, that fills whole micro-steps on `world_size` ranks."""
    unit = world_size * (job.micro_batch_size or 1)
    return -(-job.global_batch_size // unit) * unit


def twice_the_memory(problem: PlanningProblem) -> Changed:
    """Twice the limit, whatever the device has."""
    limit = 2 * problem.memory_limit_bytes
    return Changed(problem=replace(problem, memory_limit_bytes=limit), change=f"limit {format_bytes(limit)}")


def largest(fit: Callable[[int], bool], start: int, *, step: int, most: int, tried: Callable[[], None] = lambda: None) -> int | None:
    """The largest size that fits, to within one step or one part in 16, whichever is more.

    Doubles or halves from `start` until one size fits and another does not, then bisects.

    Args:
        fit: whether a size fits; every size below one that fits is taken to fit too.
        start: where to begin, a multiple of `step`.
        step: sizes are multiples of it.
        most: no size above it is tried.
        tried: called after each question.

    Returns:
        The size, or None where not even one step fits.
    """

    def asked(size: int) -> bool:
        answer = fit(size)
        tried()
        return answer

    most = most // step * step
    low, high, size = 0, most + step, min(start, most)
    while size and low < size < high:
        if asked(size):
            low, size = size, min(2 * size, most)
        else:
            high, size = size, (size // 2) // step * step
        if low and high <= most:
            break
    while low and high - low > max(step, low // _PRECISION):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if asked(middle) else (low, middle)
    return low or None
