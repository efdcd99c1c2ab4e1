"""Measuring on all ranks at once: they start together, agree on when to stop, and the slowest counts."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ..distributed.topology import find_topology


def distributed() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Ranks of the process group; 1 where there is none."""
    return dist.get_world_size() if distributed() else 1


def wait_for_all(device: torch.device) -> None:
    """Return when every rank is here and its device is idle."""
    synchronize(device)
    if distributed():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over all ranks. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if distributed():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def smallest(values: Sequence[float], device: torch.device) -> list[float]:
    """The smallest of each value over all ranks. Collective."""
    return [-value for value in largest([-value for value in values], device)]


def average(values: Sequence[float], device: torch.device) -> list[float]:
    """The mean of each value over all ranks. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if distributed():
        dist.all_reduce(tensor)
    return (tensor / world_size()).tolist()


def cores_are_shared(device: torch.device) -> bool:
    """Whether on some node ranks compute on the CPU with more threads than there are cores for them; the same on every rank.
    Collective."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    crowded = device.type == "cpu" and find_topology().ranks_per_node * torch.get_num_threads() > cores
    return bool(largest([float(crowded)], device)[0])


def typical(values: Sequence[float]) -> float:
    """Mean without the tenth at either end.

    A step is a sum of many such times, to which slow ones add what they add: medians of times that are skewed, as those of
    processes that wait for each other are, sum up to less than the step takes.
    """
    cut = len(values) // 10
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def rounds(seconds: float, device: torch.device, *, least: int, most: int) -> Iterator[int]:
    """Count rounds until the time is up on some rank; every rank counts the same. Collective.

    Measuring one thing after the other in each round, and not each to its end, spreads what disturbs the machine over all.

    Args:
        seconds: about how long.
        device: where collectives run.
        least: rounds that are made in any case.
        most: rounds at which it ends in any case.
    """
    began = time.perf_counter()
    for number in range(most):
        if number >= least and largest([time.perf_counter() - began], device)[0] >= seconds:
            return
        yield number
