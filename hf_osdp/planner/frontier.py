"""Memory against throughput: plans of which none is better in both."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InfeasibleError
from .description import ModelDescription
from .hardware import Hardware
from .job import TrainingJob
from .search import SearchResult, search
from .strategies import Strategy

POINTS = 12
"""Searches of one front, unless the caller wants another number: enough for a curve, and a few seconds at most."""

_STEP = 0.99
"""Each limit is at most this part of the peak before it: what is nearer is the same to a person."""


def frontier(
    description: ModelDescription,
    hardware: Hardware,
    job: TrainingJob,
    most_bytes: int,
    *,
    strategy: str | Strategy = Strategy.OSDP,
    points: int = POINTS,
) -> tuple[SearchResult, ...]:
    """Points of the Pareto front of peak memory and throughput, between the least memory that any plan needs and `most_bytes`.

    Each point is the fastest plan under its own limit (the ε-constraint method: Haimes, Lasdon, Wismer 1971); limits fall in
    equal ratios, and each is at least 1 % below the peak of the plan before it.

    Args:
        description: the model.
        hardware: devices and links.
        job: global batch, precision, optimizer.
        most_bytes: the highest limit, in bytes of one rank.
        strategy: whose plans.
        points: at most so many searches.

    Returns:
        Search results by rising peak and rising throughput; equal ones only once.

    Raises:
        InfeasibleError: nothing fits `most_bytes`.
        ValueError: fewer than two points, or what `search` refuses.
    """
    if points < 2:
        raise ValueError(f"points={points} must be at least 2, the two ends of the front.")
    found = [search(description, hardware, job, most_bytes, strategy=strategy)]
    least = _least_bytes(description, hardware, job, strategy)
    ratio = (least / found[0].plan.peak_bytes) ** (1 / (points - 1))
    limit = found[0].plan.peak_bytes
    for _ in range(points - 1):
        if found[-1].plan.peak_bytes <= least:
            break
        limit = max(least, int(min(limit * ratio, found[-1].plan.peak_bytes * _STEP)))
        found.append(search(description, hardware, job, limit, strategy=strategy))
    return not_dominated(found)


def not_dominated(results: Sequence[SearchResult]) -> tuple[SearchResult, ...]:
    """Those to which no other is equal or better in both peak and step time, by rising peak."""
    front: list[SearchResult] = []
    for result in sorted(results, key=lambda r: (r.plan.peak_bytes, r.plan.step_s)):
        if not front or result.plan.step_s < front[-1].plan.step_s:
            front.append(result)
    return tuple(front)


def _least_bytes(description: ModelDescription, hardware: Hardware, job: TrainingJob, strategy: str | Strategy) -> int:
    """The tightest limit that some plan meets."""
    try:
        search(description, hardware, job, hardware.device.reserved_bytes + 1, strategy=strategy)
    except InfeasibleError as error:
        return error.least_peak_bytes
    raise AssertionError("no model trains in one byte")
