"""How long collectives take: α and β of `seconds = α + β * bytes`, measured in groups as FSDP2 forms them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..planner.hardware import Collective, CollectiveTiming

_SIZES_BYTES = {"cpu": (2**16, 2**19, 2**21, 2**23), "cuda": (2**20, 2**23, 2**26, 2**28)}
"""Of the whole tensor: from where latency rules to where bandwidth does."""
_RUNS = 5


def measure_collectives(device: torch.device, group_sizes: Sequence[int], seconds: float) -> tuple[CollectiveTiming, ...]:
    """Time all-gather, reduce-scatter and all-reduce. Every rank must call this, with the same arguments.

    All groups of a size run at once, as they do in training. Shard groups are contiguous ranks; the groups that reduce
    replicas of an r x s mesh are `world / r` ranks apart.

    Args:
        device: where the tensors are.
        group_sizes: sizes to measure, each a divisor of the world size above 1.
        seconds: about how long to measure, all together.

    Returns:
        Timings of the slowest rank, the same on every rank.
    """
    budget_s = seconds / (len(group_sizes) * len(Collective)) if group_sizes else 0.0
    timings = []
    for size in group_sizes:
        for collective in Collective:
            with _group(collective, size) as group:
                points = _points(_runner(collective, group, size), size, device, budget_s)
            latency_s, seconds_per_byte = fit_line(points)
            timings.append(CollectiveTiming(collective=collective, group_size=size, latency_s=latency_s, seconds_per_byte=seconds_per_byte))
    return tuple(timings)


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Least squares of relative errors: α >= 0 and β > 0 that minimise Σ ((α + β n - t) / t)².

    Args:
        points: bytes and seconds, at least one pair.

    Returns:
        α in seconds and β in seconds a byte.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True)) / spread if spread else 0.0
    latency_s = mean_t - slope * mean_n
    if slope > 0 and latency_s >= 0:
        return latency_s, slope
    largest, taken_s = max(points)
    return 0.0, taken_s / largest  # noise hides one of the two: all of the largest message's time is bandwidth


def _points(run: Callable[[torch.Tensor], object], size: int, device: torch.device, budget_s: float) -> list[tuple[int, float]]:
    """Bytes of the whole tensor, and the slowest rank's median seconds."""
    points: list[tuple[int, float]] = []
    spent_s = 0.0
    for nbytes in _SIZES_BYTES[device.type]:
        numel = -(-nbytes // 4 // size) * size
        if len(points) > 1 and spent_s + 4 * points[-1][1] * (_RUNS + 1) > budget_s:
            break  # all ranks agree: the times are those of the slowest
        whole = torch.zeros(numel, device=device)
        run(whole)
        taken = [_timed(run, whole) for _ in range(_RUNS)]
        slowest = torch.tensor([statistics.median(taken)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        points.append((numel * 4, slowest.item()))
        spent_s += slowest.item() * (_RUNS + 1)
    return points


def _timed(run: Callable[[torch.Tensor], object], whole: torch.Tensor) -> float:
    if whole.device.type == "cuda":
        torch.cuda.synchronize(whole.device)
    dist.barrier(device_ids=[whole.device.index] if whole.device.type == "cuda" else None)
    start = time.perf_counter()
    run(whole)
    if whole.device.type == "cuda":
        torch.cuda.synchronize(whole.device)
    return max(time.perf_counter() - start, 1e-9)


def _runner(collective: Collective, group: dist.ProcessGroup | None, size: int) -> Callable[[torch.Tensor], object]:
    # torch 2.13 deprecates the names that 2.11 has
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def run(whole: torch.Tensor) -> object:
        part = whole[: whole.numel() // size]
        match collective:
            case Collective.ALL_GATHER:
                return gather(whole, part.clone(), group=group)
            case Collective.REDUCE_SCATTER:
                return scatter(torch.empty_like(part), whole, group=group)
            case Collective.ALL_REDUCE:
                return dist.all_reduce(whole, group=group)
        raise AssertionError(collective)

    return run


@contextmanager
def _group(collective: Collective, size: int) -> Iterator[dist.ProcessGroup | None]:
    """This rank's group of `size`; the world's own where that is all ranks."""
    world = dist.get_world_size()
    if size == world:
        yield None
        return
    stride = world // size
    if collective is Collective.ALL_REDUCE:
        members = [list(range(first, world, stride)) for first in range(stride)]
    else:
        members = [list(range(first, first + size)) for first in range(0, world, size)]
    groups = [dist.new_group(ranks) for ranks in members]
    own = next(group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)
    try:
        yield own
    finally:
        dist.destroy_process_group(own)
