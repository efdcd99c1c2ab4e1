"""Measure the rates of a device and its host: computation, copies, operators, updates."""

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
from ..planner.training_job import OptimizerSpec
from .memory_limits import memory_of_rank
from .timing import barrier, call_seconds, median_seconds, over_ranks

_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)
_MATMUL_SIZES = {"cpu": (256, 512, 768), "cuda": (2048, 4096, 8192)}
"""Sides of square matrices: large enough to reach the rate of a transformer's products, small enough to be quick."""
_MIN_MATMULS = 3
# These sizes exceed the caches:
_COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
_LINK_BYTES = 256 * 2**20
_UPDATE_ELEMENTS = 2**25


def matmul_rates(device: torch.device, seconds: float) -> dict[DType, float]:
    """Return FLOP/s of dense matrix products by dtype, the median over a few sizes; unsupported dtypes are left
    out.
    """
    budget_s = seconds / len(_DTYPES)
    rates = {dtype: _matmul_rate(device, getattr(torch, dtype.value), budget_s) for dtype in _DTYPES}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


def _matmul_rate(device: torch.device, dtype: torch.dtype, budget_s: float) -> float | None:
    rates: list[float] = []
    generator = torch.Generator(device).manual_seed(0)  # so that the training's random state does not change
    deadline = time.perf_counter() + budget_s
    for size in _MATMUL_SIZES[device.type]:
        if rates and time.perf_counter() + _MIN_MATMULS * 2 * size**3 / rates[-1] > deadline:
            break  # a dtype that this device only emulates
        try:
            left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
            taken_s = median_seconds(lambda: left @ right, device, budget_s / 8)  # noqa: B023
        except RuntimeError:
            return None
        rates.append(2 * size**3 / taken_s)
    return statistics.median(rates)


def copy_rate(device: torch.device, seconds: float) -> float:
    source = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, seconds)


def operator_seconds(device: torch.device, seconds: float) -> float:
    """Return the seconds to dispatch one operator, as a mean over forward and backward, measured on tiny tensors.

    On a GPU, whose kernels the CPU queues ahead, only the CPU's time of the quickest run counts.
    """
    run = _tiny_step(device)
    with _Counter() as counter:
        run()
    taken_s = (
        min(call_seconds(run, device, seconds, waits=False))
        if device.type == "cuda"
        else median_seconds(run, device, seconds)
    )
    return taken_s / counter.operators


def _tiny_step(device: torch.device) -> Callable[[], None]:
    """Return a function that runs forward and backward of a few hundred kernels: fewer than a GPU's queue holds."""
    with torch.random.fork_rng(devices=[]):  # so that the training's random state does not change
        layer = [nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]
        model = nn.Sequential(*(copy.deepcopy(part) for _ in range(8) for part in layer)).to(device)
    rows = torch.ones(2, 8, requires_grad=True, device=device)
    return lambda: model(rows).sum().backward()


class _Counter(TorchDispatchMode):
    operators = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def measure_host(device: torch.device, seconds: float) -> HostSpec | None:
    """Measure the slowest host and the least share of a machine's memory, on all ranks at once; return None on the
    CPU. Collective.

    Copies go from pinned memory to the device and back.
    """
    if device.type == "cpu":
        return None
    host = torch.ones(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(host, device=device)
    rates = []
    for target, source in ((on_device, host), (host, on_device)):
        barrier(device)
        rates.append(
            host.nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True), device, seconds / 4)  # noqa: B023
        )
    share, memory_source = memory_of_rank()
    to_device, to_host, memory, update = over_ranks(
        [*rates, share, update_rate(device, seconds / 2)], dist.ReduceOp.MIN
    )
    return HostSpec(
        memory_bytes=int(memory),
        to_device_bytes_per_s=to_device,
        to_host_bytes_per_s=to_host,
        update_bytes_per_s=update,
        source=f"measured; memory: {memory_source}",
    )


def update_rate(device: torch.device, seconds: float, *, elements: int = _UPDATE_ELEMENTS) -> float:
    """Return the bytes per second that a fused AdamW step on the CPU reads and writes, with torch's number of
    threads.
    """
    parameter = torch.nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.zeros(elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # makes the states
    barrier(device)
    taken_s = median_seconds(optimizer.step, torch.device("cpu"), seconds)
    return OptimizerSpec().traffic_per_element() * parameter.nbytes / taken_s
