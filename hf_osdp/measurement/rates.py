"""How fast one device computes, copies and issues operators, and how fast the host beside it does."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..planner.description import DType
from ..planner.hardware import HostSpec
from ..planner.job import OptimizerSpec
from ..planner.profile import HostLink
from .memory_limits import memory_of_rank
from .timing import barrier, call_seconds, median_seconds, over_ranks

_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)
_MATMUL_SIZES = {"cpu": (256, 512, 768), "cuda": (2048, 4096, 8192)}
"""Sides of square matrices: large enough for the rate of a transformer's products, small enough to be quick."""
_LEAST_MATMULS = 3
# More than the caches hold:
_COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
_LINK_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
_UPDATE_ELEMENTS = 2**25


def matmul_rates(device: torch.device, seconds: float) -> dict[DType, float]:
    """Return FLOP/s of dense matrix products, the median over a few sizes, by dtype; a dtype without products is left out."""
    budget_s = seconds / len(_DTYPES)
    rates = {dtype: _matmul_rate(device, getattr(torch, dtype.value), budget_s) for dtype in _DTYPES}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


def _matmul_rate(device: torch.device, dtype: torch.dtype, budget_s: float) -> float | None:
    rates: list[float] = []
    dice = torch.Generator(device).manual_seed(0)  # the training's own random state stays as it is
    deadline = time.perf_counter() + budget_s
    for size in _MATMUL_SIZES[device.type]:
        if rates and time.perf_counter() + _LEAST_MATMULS * 2 * size**3 / rates[-1] > deadline:
            break  # a dtype that this device only emulates
        try:
            left, right = (torch.randn(size, size, device=device, generator=dice).to(dtype) for _ in range(2))
            taken_s = median_seconds(lambda: left @ right, device, budget_s / 8)  # noqa: B023
        except RuntimeError:
            return None
        rates.append(2 * size**3 / taken_s)
    return statistics.median(rates)


def copy_rate(device: torch.device, seconds: float) -> float:
    """Return the bytes that a large copy reads and writes each second."""
    source = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, seconds)


def operator_seconds(device: torch.device, seconds: float) -> float:
    """Return the seconds that dispatching one operator takes, forward and backward together, where its work is next to nothing.

    A GPU runs behind the CPU that queues its kernels: there it is the CPU's time alone, of the quickest run.
    """
    run = _tiny_step(device)
    with _Counter() as counter:
        run()
    taken_s = min(call_seconds(run, device, seconds, waits=False)) if device.type == "cuda" else median_seconds(run, device, seconds)
    return taken_s / counter.operators


def _tiny_step(device: torch.device) -> Callable[[], None]:
    """Make forward and backward of a model of many operators, a few hundred kernels: fewer than a GPU's queue holds."""
    with torch.random.fork_rng(devices=[]):  # the training's own random state stays as it is
        layer = [nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]
        model = nn.Sequential(*(copy.deepcopy(part) for _ in range(8) for part in layer)).to(device)
        rows = torch.ones(2, 8, requires_grad=True, device=device)

    def run() -> None:
        model(rows).sum().backward()

    return run


class _Counter(TorchDispatchMode):
    """Counts operators."""

    operators = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
        self.operators += 1
        return func(*args, **(kwargs or {}))


def measure_host_link(device: torch.device, seconds: float) -> HostLink:
    """Measure copies from pinned host memory to the device and back, of the slowest of all ranks at once. Collective."""
    host = torch.ones(_LINK_BYTES[device.type], dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    rates = []
    for target, source in ((there, host), (host, there)):
        barrier(device)
        rates.append(host.nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True), device, seconds / 2))  # noqa: B023
    to_device, to_host = over_ranks(rates, dist.ReduceOp.MIN)
    return HostLink(to_device_bytes_per_s=to_device, to_host_bytes_per_s=to_host)


def measure_host(device: torch.device, seconds: float) -> HostSpec | None:
    """Measure the host beside this rank's device, all ranks at work at once. Collective.

    Returns:
        Rates of the slowest rank and the least share of a machine's memory; None on the CPU, which has no other memory beside it.
    """
    if device.type == "cpu":
        return None
    link = measure_host_link(device, seconds / 2)
    share, where = memory_of_rank()
    memory, rate = over_ranks([share, update_rate(device, seconds / 2)], dist.ReduceOp.MIN)
    return HostSpec(
        memory_bytes=int(memory),
        to_device_bytes_per_s=link.to_device_bytes_per_s,
        to_host_bytes_per_s=link.to_host_bytes_per_s,
        update_bytes_per_s=rate,
        source=f"measured; memory: {where}",
    )


def update_rate(device: torch.device, seconds: float, *, elements: int = _UPDATE_ELEMENTS) -> float:
    """Return the bytes that a fused AdamW step on this process's cores reads and writes each second, with the threads that torch has."""
    parameter = torch.nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.zeros(elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # makes the states
    barrier(device)
    taken_s = median_seconds(optimizer.step, torch.device("cpu"), seconds)
    return OptimizerSpec().traffic_per_element * parameter.nbytes / taken_s
