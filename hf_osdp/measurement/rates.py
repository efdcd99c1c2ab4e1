"""How fast one device multiplies matrices and copies memory."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..planner.description import DType

_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)
_MATMUL_SIZES = {"cpu": (256, 512, 768), "cuda": (2048, 4096, 8192)}
"""Sides of square matrices: large enough for the rate of a transformer's products, small enough to be quick."""
_COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""More than the caches hold."""
_MIN_RUNS, _MAX_RUNS = 3, 20


def matmul_rates(device: torch.device, seconds: float) -> dict[DType, float]:
    """Dense matrix-product rates, the median over a few sizes.

    Args:
        device: where to multiply.
        seconds: about how long to measure, all dtypes together.

    Returns:
        FLOP/s by dtype; a dtype without matrix products on the device is left out.
    """
    budget_s = seconds / len(_DTYPES)
    rates = {dtype: _matmul_rate(device, getattr(torch, dtype.value), budget_s) for dtype in _DTYPES}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


def copy_rate(device: torch.device, seconds: float) -> float:
    """Bytes read and written each second by a large copy."""
    source = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    taken_s = median_seconds(lambda: target.copy_(source), device, seconds)
    return 2 * _COPY_BYTES[device.type] / taken_s


def operator_seconds(device: torch.device, seconds: float) -> float:
    """Seconds that dispatching one operator takes, forward and backward together, where its work is next to nothing.

    A GPU runs behind the CPU that queues its kernels: there it is the CPU's time alone, of the quickest run.
    """
    run = _tiny_step(device)
    with _Counter() as counter:
        run()
    taken_s = issue_seconds(run, device, seconds) if device.type == "cuda" else median_seconds(run, device, seconds)
    return taken_s / counter.operators


def _tiny_step(device: torch.device) -> Callable[[], None]:
    """Forward and backward of a model of many operators, a few hundred kernels: fewer than a GPU's queue holds."""
    with torch.random.fork_rng(devices=[]):  # the training's own random state stays as it is
        layer = [nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]
        model = nn.Sequential(*(copy.deepcopy(part) for _ in range(8) for part in layer)).to(device)
        rows = torch.ones(2, 8, requires_grad=True, device=device)

    def run() -> None:
        model(rows).sum().backward()

    return run


def issue_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Least time in which the CPU issues a call, which the device may still be at when it ends.

    Args:
        run: what to time.
        device: idle before each call.
        seconds: about how long to go on, see `median_seconds`.
    """
    taken: list[float] = []

    def once() -> None:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)

    median_seconds(once, device, seconds)
    return min(taken)


class _Counter(TorchDispatchMode):
    """Counts operators."""

    operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def median_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median time of a call, after one that warms up.

    Args:
        run: what to time.
        device: waited for before the clock is read.
        seconds: about how long to go on; at least three and at most twenty calls are timed.
    """
    _timed(run, device)
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < _MIN_RUNS or (len(taken) < _MAX_RUNS and time.perf_counter() < deadline):
        taken.append(_timed(run, device))
    return statistics.median(taken)


def _matmul_rate(device: torch.device, dtype: torch.dtype, budget_s: float) -> float | None:
    rates = []
    dice = torch.Generator(device).manual_seed(0)  # the training's own random state stays as it is
    deadline = time.perf_counter() + budget_s
    for size in _MATMUL_SIZES[device.type]:
        if rates and time.perf_counter() + _MIN_RUNS * 2 * size**3 / rates[-1] > deadline:
            break  # a dtype that this device only emulates
        try:
            left = torch.randn(size, size, device=device, generator=dice).to(dtype)
            right = torch.randn(size, size, device=device, generator=dice).to(dtype)
            taken_s = median_seconds(lambda a=left, b=right: a @ b, device, budget_s / 8)
        except RuntimeError:
            return None
        rates.append(2 * size**3 / taken_s)
    return statistics.median(rates)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return max(time.perf_counter() - start, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
