"""Measure times: on the CPU and on CUDA, of one rank or the slowest of all ranks."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ..distributed.mesh import collective_device, world_size

Moment = float | torch.cuda.Event
_MIN_CALLS, _MAX_CALLS = 3, 20


def now(device: torch.device) -> Moment:
    """Return the time: the CPU's clock, or an event recorded on the current stream without waiting for it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Moment, ended: Moment) -> float:
    """Return the seconds between two moments of one device; on CUDA wait for the later one."""
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float) and isinstance(ended, float), "both of one device"
        return ended - began
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(
    run: Callable[[], object], device: torch.device, seconds: float, *, waits: bool = True
) -> list[float]:
    """Return the times of three to twenty calls, within about `seconds`, after one warm-up call.

    With `waits` they include the device's work; otherwise they end when the CPU has issued it.
    """
    taken: list[float] = []
    deadline = 0.0
    while len(taken) <= _MIN_CALLS or (len(taken) <= _MAX_CALLS and time.perf_counter() < deadline):
        synchronize(device)
        began = time.perf_counter()
        run()
        if waits:
            synchronize(device)
        taken.append(max(time.perf_counter() - began, 1e-9))
        deadline = deadline or time.perf_counter() + seconds
    return taken[1:]


def median_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    return statistics.median(call_seconds(run, device, seconds))


def barrier(device: torch.device) -> None:
    """Wait until every rank has reached this call and its device is idle."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def over_ranks(values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> list[float]:
    """Return each value's maximum over all ranks, or its reduction by `op`. Collective."""
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=collective_device())
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the highest and lowest tenth.

    Medians of ranks that wait for each other would sum to less than a step.
    """
    trimmed = len(values) // 10
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


def rounds(seconds: float, *, least: int, most: int, limit_s: float = float("inf")) -> Iterator[int]:
    """Count rounds until the time is up on some rank; every rank counts the same. Collective.

    Measuring every quantity in each round, instead of one after the other, spreads disturbances of the machine over
    all of them. After the first, no round begins that would end after `limit_s`, even if fewer than `least` rounds
    have run.
    """
    began = time.perf_counter()
    for number in range(most):
        if number >= least or (number and limit_s < float("inf")):
            (elapsed_s,) = over_ranks([time.perf_counter() - began])
            if elapsed_s * (number + 1) / max(number, 1) > limit_s or (number >= least and elapsed_s >= seconds):
                return
        yield number


def seconds_without_core() -> float:
    """Return how long this thread has been ready to run while other programs had the cores, since it began; 0 where
    the system does not count it.

    Linux does: the second field of `schedstat` (kernel documentation, scheduler/sched-stats).
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def usable_cores() -> int:
    """Return the cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
