"""Measure the rates of a device and its host (computation, copies, operators), and the overhead of FSDP2 and the
optimizer.

FSDP2's overhead is measured with FSDP2 itself: a few units without computation run under `fully_shard` with
collectives that send nothing. Three kinds of units, with few or many tensors and few or many bytes, separate the costs
per call, per tensor and per byte.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from ..distributed.fsdp_internals import DefaultAllGather, DefaultReduceScatter
from ..distributed.mesh import world_size
from ..planner.description import DType
from ..planner.hardware import FsdpOverhead, HostSpec, WorkTime
from ..planner.training_job import OptimizerSpec, OptimizerStep
from .memory_limits import memory_of_rank
from .timing import barrier, call_seconds, median_seconds, over_ranks, rounds, trimmed_mean, work_clock

_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)
_MATMUL_SIZES = {"cpu": (256, 512, 768), "cuda": (2048, 4096, 8192)}
"""Sides of square matrices: large enough to reach the rate of a transformer's products, small enough to be quick."""
_MIN_MATMULS = 3
# These sizes exceed the caches:
_COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
_LINK_BYTES = 256 * 2**20
_UPDATE_ELEMENTS = 2**25
_UNITS = 4
_WIDTH = 64
_KINDS = ((1, 128), (16, 128), (16, 2**16))
"""Tensors of a unit and elements of each: one, many, and many that are large (4 MiB together)."""
_MIN_ROUNDS, _MAX_ROUNDS = 4, 21
"""The first round warms up."""
_STEPS = (OptimizerStep.FOR_LOOP, OptimizerStep.FOREACH, OptimizerStep.FUSED)


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


def measure_fsdp_overhead(device: torch.device, seconds: float) -> FsdpOverhead | None:
    """Measure FSDP2's own work, on all ranks at once, and return the times of the slowest. Collective.

    On CUDA it is the CPU's time to queue that work, of the quickest round; bytes move at memory speed there. Return
    None without a process group, and on the CPU for a single process, which is not sharded.
    """
    alone, on_gpu = world_size() == 1, device.type == "cuda"
    if not dist.is_initialized() or (alone and not on_gpu):
        return None
    clock = time.perf_counter if on_gpu else work_clock(device)
    models = [_EmptyModel(tensors, numel, device, clock) for tensors, numel in _KINDS[: 2 if on_gpu else 3]]
    taken: dict[str, list[list[float]]] = {}
    """Seconds of one unit, for each kind of units."""
    for measure in (
        _EmptyModel.gather,
        _EmptyModel.reduce_and_update,
    ):  # not interleaved, so that each reuses its own freed memory
        for number in rounds(seconds / 2, least=_MIN_ROUNDS, most=_MAX_ROUNDS):
            for kind, model in enumerate(models):
                for name, whole_s in measure(model).items():
                    if number:
                        taken.setdefault(name, [[] for _ in models])[kind].append(whole_s / _UNITS)
    typical = min if on_gpu else trimmed_mean
    gather, reduce = (_fit(list(map(typical, taken[name]))) for name in ("gather", "reduce"))
    updates = {step: _fit(list(map(typical, taken[step.value]))) for step in _STEPS}
    world = world_size()
    return FsdpOverhead(
        gather=replace(gather, seconds_per_byte=gather.seconds_per_byte / (1 + 1 / world)),
        reduce=reduce,
        updates={
            step: replace(work, call_s=0.0, seconds_per_byte=work.seconds_per_byte * world)
            for step, work in updates.items()
        },
    )


def _fit(taken: list[float]) -> WorkTime:
    """Fit the seconds per call, per tensor and per byte of whole parameters to the kinds of units; without the third
    kind, bytes take none.
    """
    one, many, *large = over_ranks(taken)
    tensor_s = max(0.0, (many - one) / (_KINDS[1][0] - _KINDS[0][0]))
    nbytes = 4 * _KINDS[2][0] * (_KINDS[2][1] - _KINDS[1][1])
    return WorkTime(
        call_s=max(0.0, one - tensor_s),
        tensor_s=tensor_s,
        seconds_per_byte=max(0.0, (large[0] - many) / nbytes) if large else 0.0,
    )


class _EmptyModel:
    """Sharded units of one kind without computation, with one optimizer for each kind of step."""

    def __init__(self, tensors: int, numel: int, device: torch.device, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._units = [_Unit(tensors, numel, clock) for _ in range(_UNITS)]
        self._model = nn.Sequential(*self._units).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for unit in self._units:
            sharded: FSDPModule = fully_shard(unit, mesh=mesh)
            sharded.set_custom_all_gather(_SilentAllGather())
            sharded.set_custom_reduce_scatter(_SilentReduceScatter())
        fully_shard(self._model, mesh=mesh)
        options: dict[OptimizerStep, dict[str, Any]] = {step: dict(step.options) for step in _STEPS}
        parameters = list(self._model.parameters())
        self._optimizers = {
            step: torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, **options[step]) for step in _STEPS
        }
        self._input = torch.zeros(1, requires_grad=True, device=device)

    def gather(self) -> dict[str, float]:
        """Run a step that frees parameters after forward, and return the seconds of forward, which gathers them."""
        seconds = self._step(free=True)[0]
        self._model.zero_grad()
        return {"gather": seconds}

    def reduce_and_update(self) -> dict[str, float]:
        """Run a step that keeps parameters, so that backward only reduces, then each optimizer; return their
        seconds.
        """
        times = {"reduce": self._step(free=False)[1]}
        for step, optimizer in self._optimizers.items():
            started = self._clock()
            optimizer.step()
            times[step.value] = self._clock() - started
        self._model.zero_grad()
        return times

    def _step(self, *, free: bool) -> tuple[float, float]:
        for unit in self._units:
            assert isinstance(unit, FSDPModule)
            unit.set_reshard_after_forward(free)
            unit.gradients_s = 0.0
        barrier(self._device)
        started = self._clock()
        output = self._model(self._input)
        between = self._clock()
        output.sum().backward()
        return between - started, self._clock() - between - sum(unit.gradients_s for unit in self._units)


class _Unit(nn.Module):
    """Parameters that forward does not use; backward makes a new gradient for each."""

    def __init__(self, tensors: int, numel: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.gradients_s = 0.0
        """Seconds spent on making gradients, which is not FSDP2's work."""
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(numel // _WIDTH, _WIDTH)) for _ in range(tensors))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(value, self, *self.tensors)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, unit: _Unit, *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.unit, ctx.shapes = unit, [tensor.shape for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        started = ctx.unit.clock()
        gradients = [torch.zeros(shape, device=gradient.device) for shape in ctx.shapes]
        ctx.unit.gradients_s += ctx.unit.clock() - started
        return gradient, None, *gradients


class _SilentAllGather(DefaultAllGather):
    def __call__(self, output_tensor: object, input_tensor: object, group: object, async_op: bool = False) -> None:
        """Send nothing."""


class _SilentReduceScatter(DefaultReduceScatter):
    def __call__(
        self, output_tensor: object, input_tensor: object, group: object, op: object, async_op: bool = False
    ) -> Any:  # noqa: ANN401
        """Send nothing."""
