"""How times are taken: on the CPU and on CUDA, alone and on all ranks at once, where the slowest counts."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ..distributed.mesh import find_topology, world_size

Moment = float | torch.cuda.Event
_MIN_RUNS, _MAX_RUNS = 3, 20


def now(device: torch.device) -> Moment:
    """Return the time: the CPU's clock, or an event that is recorded on the current stream, which nothing waits for."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Moment, ended: Moment) -> float:
    """Return the seconds between two moments of one device; on CUDA this waits for the later one."""
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float) and isinstance(ended, float), "both of one device"
        return ended - began
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for all work that the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median time of three to twenty calls in about so many seconds, after one that warms up."""
    return statistics.median(_times(run, device, seconds, whole=True))


def least_issue_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the least time in which the CPU issues a call, which the device may still be at when it ends; see `median_seconds`."""
    return min(_times(run, device, seconds, whole=False))


def _times(run: Callable[[], object], device: torch.device, seconds: float, *, whole: bool) -> list[float]:
    """Time calls one after the other, with the device's work or only until they return."""
    taken: list[float] = []
    deadline = 0.0
    while len(taken) <= _MIN_RUNS or (len(taken) <= _MAX_RUNS and time.perf_counter() < deadline):
        synchronize(device)
        began = time.perf_counter()
        run()
        if whole:
            synchronize(device)
        taken.append(max(time.perf_counter() - began, 1e-9))
        deadline = deadline or time.perf_counter() + seconds  # the first call warms up
    return taken[1:]


def barrier(device: torch.device) -> None:
    """Return when every rank is here and its device is idle."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def max_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def min_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the smallest of each value over all ranks. Collective."""
    return [-value for value in max_over_ranks([-value for value in values], device)]


def mean_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the mean of each value over all ranks. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return [float(value) for value in (tensor / world_size()).tolist()]


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the tenth at either end.

    A step is a sum of many such times, to which slow ones add what they add: medians of times that are skewed, as those of
    processes that wait for each other are, sum up to less than the step takes.
    """
    trimmed = len(values) // 10
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


def rounds(seconds: float, device: torch.device, *, least: int, most: int, limit_s: float = float("inf")) -> Iterator[int]:
    """Count rounds until the time is up on some rank; every rank counts the same. Collective.

    Measuring one thing after the other in each round, and not each to its end, spreads what disturbs the machine over all.
    No round but the first is begun that would end after `limit_s`, not even one of the `least`.
    """
    began = time.perf_counter()
    for number in range(most):
        if number >= least or (number and limit_s < float("inf")):
            (elapsed_s,) = max_over_ranks([time.perf_counter() - began], device)
            if elapsed_s * (number + 1) / max(number, 1) > limit_s or (number >= least and elapsed_s >= seconds):
                return
        yield number


def cores_are_shared(device: torch.device) -> bool:
    """Return whether on some node ranks compute on the CPU with more threads than it has cores; the same on every rank. Collective."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    crowded = device.type == "cpu" and find_topology().ranks_per_node * torch.get_num_threads() > cores
    return bool(max_over_ranks([float(crowded)], device)[0])
