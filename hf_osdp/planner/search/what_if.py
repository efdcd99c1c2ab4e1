"""What a change of devices, memory or model would bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import InfeasibleError
from ...quantities import format_bytes
from ..allocator.reserved import is_replayed
from ..description import ModelDescription
from ..hardware import Hardware
from ..job import TrainingJob
from .remedies import fits
from .search import SearchResult, least_memory, search
from .strategies import Strategy

_PRECISION = 16
"""The largest size that fits is found to within one part in so many, or one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question to the planner."""

    description: ModelDescription
    hardware: Hardware
    job: TrainingJob
    memory_limit_bytes: int
    strategy: Strategy = Strategy.OSDP

    @property
    def room_bytes(self) -> int:
        """What a plan may fill: the limit less the margin."""
        return self.hardware.room_bytes(self.memory_limit_bytes)

    def search(self) -> SearchResult:
        """The fastest plan that fits, see `search`."""
        return search(self.description, self.hardware, self.job, self.memory_limit_bytes, strategy=self.strategy)

    def fits(self) -> bool:
        """Whether any plan does."""
        if not fits(self.description, self.hardware, self.job, self.memory_limit_bytes, self.strategy):
            return False
        if not is_replayed(self.description, self.hardware):
            return True
        return least_memory(self.description, self.hardware, self.job, strategy=self.strategy) <= self.memory_limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A case after a change."""

    case: Case
    change: str
    """What was changed, for a person to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a change."""

    question: str
    change: str
    """What was changed or found, for a person to read."""
    case: Case | None = None
    """None where there is no such case."""
    result: SearchResult | None = None
    """None where nothing fits."""
    reason: str = ""
    """Why there is no result."""

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput in tokens, which compares across sequence lengths."""
        return None if self.result is None else self.result.plan.samples_per_s * self.result.plan.sequence_length


def answer(question: str, changed: Changed) -> Answer:
    """Search the changed case."""
    try:
        result = changed.case.search()
    except InfeasibleError as error:
        reason = f"needs {format_bytes(error.least_peak_bytes)}"
        return Answer(question=question, change=changed.change, case=changed.case, reason=reason)
    except ValueError as error:  # hybrid sharding has no group size for this number of devices
        return Answer(question=question, change=changed.change, case=changed.case, reason=str(error))
    return Answer(question=question, change=changed.change, case=changed.case, result=result)


def one_more_device(case: Case) -> Changed:
    """One more device in each node, and one more node where there are several.

    The global batch stays where the new world size divides it; else it is raised to the next multiple that does.
    """
    before = case.hardware
    after = before.scaled(nodes=before.nodes + (before.nodes > 1), devices_per_node=before.devices_per_node + 1)
    batch = next_batch(case.job, after.world_size)
    nodes = f"{after.nodes} nodes x " if after.nodes > 1 else ""
    change = f"{nodes}{after.devices_per_node} devices"
    if batch != case.job.global_batch_size:
        change += f", global batch raised from {case.job.global_batch_size} to {batch}"
    if before.timings:
        change += ", measured collectives replaced by the links' rates"
    return Changed(case=replace(case, hardware=after, job=replace(case.job, global_batch_size=batch)), change=change)


def next_batch(job: TrainingJob, world_size: int) -> int:
    """The least global batch, not below the job's, that fills whole micro-steps on `world_size` ranks."""
    unit = world_size * (job.micro_batch_size or 1)
    return -(-job.global_batch_size // unit) * unit


def twice_the_memory(case: Case) -> Changed:
    """Twice the limit, whatever the device has."""
    limit = 2 * case.memory_limit_bytes
    return Changed(case=replace(case, memory_limit_bytes=limit), change=f"limit {format_bytes(limit)}")


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
