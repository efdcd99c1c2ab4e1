"""What FSDP2 and the optimizer do beside compute and links, measured with FSDP2 itself.

A few units without compute run forward and backward under `fully_shard` with collectives that send nothing. What is left
of the time is FSDP2's own work: hooks, views, copies into and out of buffers, gradients made into DTensors. Three kinds
of units, with few and many tensors and with few and many bytes, tell apart what a call, a tensor and a byte cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ..planner.hardware import Handling, WorkTime
from ..planner.job import OptimizerStep
from .synchronize import largest, rounds, synchronize, typical, wait_for_all

_UNITS = 4
_WIDTH = 64
_KINDS = ((1, 128), (16, 128), (16, 2**16))
"""Tensors of a unit and elements of each: one, many, and many that are large (4 MiB together)."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 20
_STEPS = (OptimizerStep.FOR_LOOP, OptimizerStep.FOREACH, OptimizerStep.FUSED)


def measure_handling(device: torch.device, seconds: float) -> Handling | None:
    """Measure it on the CPU, on all ranks at once. Collective.

    Args:
        device: where training runs.
        seconds: about how long to measure.

    Returns:
        Times of the slowest rank, the same on every rank. None with a single process, which is not sharded, and on CUDA,
        where the CPU queues kernels ahead and copies go at the speed of memory.
    """
    if device.type != "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    rigs = [_Rig(tensors, numel, device) for tensors, numel in _KINDS]
    for measure in (_Rig.gather, _Rig.reduce_and_update):  # one after the other, so that each finds memory as it left it
        for number in rounds(seconds / 2, device, least=_LEAST_ROUNDS + 1, most=_MOST_ROUNDS + 1):
            for rig in rigs:
                times = measure(rig)
                if number:  # the first warms up
                    rig.note(times)
    gather, reduce, *updates = (
        _fit(rigs, lambda rig, name=name: rig.taken[name], device) for name in ("gather", "reduce", *(step.value for step in _STEPS))
    )
    world = dist.get_world_size()
    return Handling(
        gather=WorkTime(call_s=gather.call_s, tensor_s=gather.tensor_s, seconds_per_byte=gather.seconds_per_byte / (1 + 1 / world)),
        reduce=reduce,
        updates={
            step: WorkTime(tensor_s=update.tensor_s, seconds_per_byte=update.seconds_per_byte * world)
            for step, update in zip(_STEPS, updates, strict=True)
        },
    )


def measure_hooks(device: torch.device, seconds: float) -> float:
    """Seconds that the CPU takes for FSDP2's hooks around a unit in forward, not waiting for the device. Collective.

    Args:
        device: where training runs.
        seconds: about how long to measure.

    Returns:
        The quickest round of the slowest rank, the same on every rank.
    """
    rig = _Rig(*_KINDS[0], device)
    taken = [rig.gather()["gather"] for _ in rounds(seconds, device, least=_LEAST_ROUNDS + 1, most=_MOST_ROUNDS + 1)]
    return largest([min(taken) / _UNITS], device)[0]


def _fit(rigs: list[_Rig], taken: Callable[[_Rig], list[float]], device: torch.device) -> WorkTime:
    """Seconds of a call, a tensor and a byte of whole parameters, from the three kinds of units."""
    one, many, large = largest([typical(taken(rig)) for rig in rigs], device)
    tensor_s = max(0.0, (many - one) / (_KINDS[1][0] - _KINDS[0][0]))
    nbytes = 4 * _KINDS[2][0] * (_KINDS[2][1] - _KINDS[1][1])
    return WorkTime(call_s=max(0.0, one - tensor_s), tensor_s=tensor_s, seconds_per_byte=max(0.0, (large - many) / nbytes))


@dataclass(slots=True)
class _Meter:
    """Seconds that do not belong to FSDP2."""

    apart_s: float = 0.0


class _Rig:
    """Sharded units of one kind, with an optimizer of each kind of step; `taken` has seconds of one unit."""

    def __init__(self, tensors: int, numel: int, device: torch.device) -> None:
        self._meter, self._device = _Meter(), device
        self._model = nn.Sequential(*(_Unit(tensors, numel, self._meter) for _ in range(_UNITS))).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for unit in self._model:
            fully_shard(unit, mesh=mesh)
            unit.set_custom_all_gather(_SilentAllGather())
            unit.set_custom_reduce_scatter(_SilentReduceScatter())
        fully_shard(self._model, mesh=mesh)
        self._optimizers = {step: torch.optim.AdamW(self._model.parameters(), lr=0.0, weight_decay=0.0, **step.options) for step in _STEPS}
        self._input = torch.zeros(1, requires_grad=True, device=device)
        self.taken: dict[str, list[float]] = {"gather": [], "reduce": [], **{step.value: [] for step in _STEPS}}

    def gather(self) -> dict[str, float]:
        """A step that frees parameters after forward, for the time of a gather."""
        seconds = self._step(free=True)[0]
        self._model.zero_grad()
        return {"gather": seconds}

    def reduce_and_update(self) -> dict[str, float]:
        """A step that keeps them, so that backward only reduces, and one of each optimizer."""
        times = {"reduce": self._step(free=False)[1]}
        for step, optimizer in self._optimizers.items():
            started = time.perf_counter()
            optimizer.step()
            times[step.value] = time.perf_counter() - started
        self._model.zero_grad()
        return times

    def note(self, times: dict[str, float]) -> None:
        """Keep seconds of all units."""
        for name, seconds in times.items():
            self.taken[name].append(seconds / _UNITS)

    def _step(self, *, free: bool) -> tuple[float, float]:
        """Seconds of forward and backward."""
        for unit in self._model:
            unit.set_reshard_after_forward(free)
        synchronize(self._device)
        wait_for_all(self._device)
        self._meter.apart_s = 0.0
        started = time.perf_counter()
        output = self._model(self._input)
        between = time.perf_counter()
        output.sum().backward()
        return between - started, time.perf_counter() - between - self._meter.apart_s


class _Unit(nn.Module):
    """Parameters that forward does nothing with; backward makes a new gradient for each."""

    def __init__(self, tensors: int, numel: int, meter: _Meter) -> None:
        super().__init__()
        self._meter = meter
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(numel // _WIDTH, _WIDTH)) for _ in range(tensors))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(value, self._meter, *self.tensors)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, meter: _Meter, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.meter, ctx.shapes = meter, [tensor.shape for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        started = time.perf_counter()
        gradients = [torch.zeros(shape, device=gradient.device) for shape in ctx.shapes]
        ctx.meter.apart_s += time.perf_counter() - started
        return gradient, None, *gradients


class _Fresh:
    """Buffers as FSDP2's own collectives take them."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _SilentAllGather(_Fresh, AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        """Send nothing."""


class _SilentReduceScatter(_Fresh, ReduceScatter):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        """Send nothing."""
