"""How times are taken: on the CPU and on CUDA, alone and on all ranks at once, where the slowest counts."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ..distributed.mesh import collective_device, find_topology, world_size

Moment = float | torch.cuda.Event
_MIN_CALLS, _MAX_CALLS = 3, 20


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


def call_seconds(run: Callable[[], object], device: torch.device, seconds: float, *, waits: bool = True) -> list[float]:
    """Return the times of three to twenty calls in about so many seconds, after one that warms up.

    They include the device's work where it `waits`; else they end when the CPU has issued it.
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
    """Return the median time of a call with the device's work; see `call_seconds`."""
    return statistics.median(call_seconds(run, device, seconds))


def barrier(device: torch.device) -> None:
    """Return when every rank is here and its device is idle."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def over_ranks(values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> list[float]:
    """Return the largest of each value over all ranks, or what `op` makes of it. Collective."""
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=collective_device())
    dist.all_reduce(tensor, op=op)
    reduced: list[float] = tensor.tolist()
    return reduced


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the tenth at either end.

    A step is a sum of many such times. Those of processes that wait for each other are skewed: their medians sum up to less than
    the step takes.
    """
    trimmed = len(values) // 10
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


def rounds(seconds: float, *, least: int, most: int, limit_s: float = float("inf")) -> Iterator[int]:
    """Count rounds until the time is up on some rank; every rank counts the same. Collective.

    Measuring one thing after the other in each round, and not each to its end, spreads what disturbs the machine over all.
    No round but the first is begun that would end after `limit_s`, not even one of the `least`.
    """
    began = time.perf_counter()
    for number in range(most):
        if number >= least or (number and limit_s < float("inf")):
            (elapsed_s,) = over_ranks([time.perf_counter() - began])
            if elapsed_s * (number + 1) / max(number, 1) > limit_s or (number >= least and elapsed_s >= seconds):
                return
        yield number


def cores_are_shared(device: torch.device) -> bool:
    """Return whether on some node ranks compute on the CPU with more threads than it has cores; the same on every rank. Collective."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    crowded = device.type == "cpu" and find_topology().ranks_per_node * torch.get_num_threads() > cores
    return bool(over_ranks([crowded])[0])
