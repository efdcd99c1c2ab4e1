"""What FSDP2 and the optimizer do beside compute and links, measured with FSDP2 itself.

A few units without compute run forward and backward under `fully_shard` with collectives that send nothing. What is left
of the time is FSDP2's own work: hooks, views, copies into and out of buffers, gradients made into DTensors. Three kinds
of units, with few and many tensors and with few and many bytes, tell apart what a call, a tensor and a byte cost.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ..distributed.mesh import world_size
from ..planner.hardware import FsdpOverhead, WorkTime
from ..planner.job import OptimizerStep
from .timing import barrier, over_ranks, rounds, trimmed_mean

_UNITS = 4
_WIDTH = 64
_KINDS = ((1, 128), (16, 128), (16, 2**16))
"""Tensors of a unit and elements of each: one, many, and many that are large (4 MiB together)."""
_LEAST_ROUNDS, _MOST_ROUNDS = 4, 21
"""The first warms up."""
_STEPS = (OptimizerStep.FOR_LOOP, OptimizerStep.FOREACH, OptimizerStep.FUSED)


def measure_fsdp_overhead(device: torch.device, seconds: float) -> FsdpOverhead | None:
    """Measure FSDP2's own work on the CPU, on all ranks at once. Collective.

    Returns:
        Times of the slowest rank, the same on every rank. None with a single process, which is not sharded, and on CUDA,
        where the CPU queues kernels ahead and copies go at the speed of memory.
    """
    if device.type != "cpu" or world_size() == 1:
        return None
    models = [_EmptyModel(tensors, numel, device) for tensors, numel in _KINDS]
    taken: dict[str, list[list[float]]] = {}
    """Seconds of one unit, of each kind of units."""
    for measure in (_EmptyModel.gather, _EmptyModel.reduce_and_update):  # one after the other, so that each finds memory as it left it
        for number in rounds(seconds / 2, least=_LEAST_ROUNDS, most=_MOST_ROUNDS):
            for kind, model in enumerate(models):
                for name, whole_s in measure(model).items():
                    if number:
                        taken.setdefault(name, [[] for _ in _KINDS])[kind].append(whole_s / _UNITS)
    gather, reduce = (_fit(taken[name]) for name in ("gather", "reduce"))
    updates = {step: _fit(taken[step.value]) for step in _STEPS}
    world = world_size()
    return FsdpOverhead(
        gather=replace(gather, seconds_per_byte=gather.seconds_per_byte / (1 + 1 / world)),
        reduce=reduce,
        updates={step: replace(one, call_s=0.0, seconds_per_byte=one.seconds_per_byte * world) for step, one in updates.items()},
    )


def measure_hooks(device: torch.device, seconds: float) -> float:
    """Return the seconds that the CPU takes for FSDP2's hooks around a unit in forward, not waiting for the device. Collective.

    It is the quickest round of the slowest rank.
    """
    model = _EmptyModel(*_KINDS[0], device)
    taken = [model.gather()["gather"] for _ in rounds(seconds, least=_LEAST_ROUNDS, most=_MOST_ROUNDS)]
    return over_ranks([min(taken) / _UNITS])[0]


def _fit(taken: list[list[float]]) -> WorkTime:
    """Return the seconds of a call, a tensor and a byte of whole parameters, from the three kinds of units."""
    one, many, large = over_ranks([trimmed_mean(seconds) for seconds in taken])
    tensor_s = max(0.0, (many - one) / (_KINDS[1][0] - _KINDS[0][0]))
    nbytes = 4 * _KINDS[2][0] * (_KINDS[2][1] - _KINDS[1][1])
    return WorkTime(call_s=max(0.0, one - tensor_s), tensor_s=tensor_s, seconds_per_byte=max(0.0, (large - many) / nbytes))


class _EmptyModel:
    """Sharded units of one kind without compute, with an optimizer of each kind of step."""

    def __init__(self, tensors: int, numel: int, device: torch.device) -> None:
        self._device = device
        self._units = [_Unit(tensors, numel) for _ in range(_UNITS)]
        self._model = nn.Sequential(*self._units).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for unit in self._units:
            sharded: FSDPModule = fully_shard(unit, mesh=mesh)
            sharded.set_custom_all_gather(_SilentAllGather())
            sharded.set_custom_reduce_scatter(_SilentReduceScatter())
        fully_shard(self._model, mesh=mesh)
        options: dict[OptimizerStep, dict[str, Any]] = {step: dict(step.options) for step in _STEPS}
        parameters = list(self._model.parameters())
        self._optimizers = {step: torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, **options[step]) for step in _STEPS}
        self._input = torch.zeros(1, requires_grad=True, device=device)

    def gather(self) -> dict[str, float]:
        """Take a step that frees parameters after forward, for the seconds of gathers."""
        seconds = self._step(free=True)[0]
        self._model.zero_grad()
        return {"gather": seconds}

    def reduce_and_update(self) -> dict[str, float]:
        """Take a step that keeps parameters, so that backward only reduces, and one of each optimizer."""
        times = {"reduce": self._step(free=False)[1]}
        for step, optimizer in self._optimizers.items():
            started = time.perf_counter()
            optimizer.step()
            times[step.value] = time.perf_counter() - started
        self._model.zero_grad()
        return times

    def _step(self, *, free: bool) -> tuple[float, float]:
        """Return the seconds of forward and backward."""
        for unit in self._units:
            assert isinstance(unit, FSDPModule)
            unit.set_reshard_after_forward(free)
            unit.gradients_s = 0.0
        barrier(self._device)
        started = time.perf_counter()
        output = self._model(self._input)
        between = time.perf_counter()
        output.sum().backward()
        return between - started, time.perf_counter() - between - sum(unit.gradients_s for unit in self._units)


class _Unit(nn.Module):
    """Parameters that forward does nothing with; backward makes a new gradient for each."""

    def __init__(self, tensors: int, numel: int) -> None:
        super().__init__()
        self.gradients_s = 0.0
        """Seconds that making gradients took, which is not FSDP2's work."""
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(numel // _WIDTH, _WIDTH)) for _ in range(tensors))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Pass the value on."""
        passed: torch.Tensor = _Pass.apply(value, self, *self.tensors)
        return passed


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, unit: _Unit, *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.unit, ctx.shapes = unit, [tensor.shape for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        started = time.perf_counter()
        gradients = [torch.zeros(shape, device=gradient.device) for shape in ctx.shapes]
        ctx.unit.gradients_s += time.perf_counter() - started
        return gradient, None, *gradients


class _SilentAllGather(DefaultAllGather):
    def __call__(self, output_tensor: object, input_tensor: object, group: object, async_op: bool = False) -> None:
        """Send nothing."""


class _SilentReduceScatter(DefaultReduceScatter):
    def __call__(self, output_tensor: object, input_tensor: object, group: object, op: object, async_op: bool = False) -> Any:  # noqa: ANN401
        """Send nothing."""
