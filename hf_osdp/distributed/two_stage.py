"""Collectives in two stages, for FSDP2's `set_custom_all_gather` and `set_custom_reduce_scatter`, and who listens to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ..planner.hardware import Collective
from .transport import PieceTransport, ReduceOp, Transport, runs_gloo, transport_of


class Listener(Protocol):
    """Hears of every collective that begins and ends on this rank."""

    def begins(self, collective: Collective, group: dist.ProcessGroup, nbytes: int) -> None:
        """`nbytes` are those of the whole tensor; on CUDA what is issued from now on belongs to it."""

    def ends(self) -> None:
        """All of it has been issued; on the CPU it is done, unless it returned a work to wait for."""


_listeners: list[Listener] = []
"""Of the whole process: backward runs in threads of autograd's, to which context variables do not go along."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell the listener of collectives inside the context."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def announced(collective: Collective, group: dist.ProcessGroup, whole: torch.Tensor) -> Iterator[None]:
    """Inside the context one collective is issued, of the tensor `whole`."""
    heard = tuple(_listeners)
    for listener in heard:
        listener.begins(collective, group, whole.numel() * whole.element_size())
    try:
        yield
    finally:
        for listener in heard:
            listener.ends()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A rank's groups of a collective over whole nodes; its place in the whole is `place between * ranks within + place within`."""

    between: dist.ProcessGroup
    """Ranks of the same place in each node."""
    within: dist.ProcessGroup
    """Ranks of this node."""

    @property
    def nodes(self) -> int:
        return self.between.size()

    @property
    def per_node(self) -> int:
        return self.within.size()

    def covers(self, group: dist.ProcessGroup) -> bool:
        """FSDP2 hands the same object smaller groups where `reshard_after_forward` is a number."""
        return group.size() == self.nodes * self.per_node


class _Allocating(Comm):
    """Buffers from torch's allocator, as FSDP2's own collectives take them."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TwoStageAllGather(_Allocating, AllGather):
    """Between nodes first, so that each byte crosses the slow link once a node, then inside the node, into place.

    With `async_op` the work returned is that of the second stage. The first has been issued to the current stream by then; gloo,
    which has no streams, has ended it.
    """

    def __init__(self, stages: Stages, transport: Transport) -> None:
        self.stages, self._transport = stages, transport

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if not self.stages.covers(group):
            return self._transport.all_gather([output_tensor], [input_tensor], group, async_op=async_op)
        with announced(Collective.TWO_STAGE_ALL_GATHER, group, output_tensor):
            nodes = self.stages.nodes
            of_my_place = input_tensor.new_empty(nodes * input_tensor.numel())
            self._transport.all_gather([of_my_place], [input_tensor], self.stages.between)
            return self._transport.all_gather(
                output_tensor.chunk(nodes), of_my_place.chunk(nodes), self.stages.within, async_op=async_op
            )  # fmt: skip


class TwoStageReduceScatter(_Allocating, ReduceScatter):
    """Inside the node first, then between nodes what is left: the all-gather's way back."""

    def __init__(self, stages: Stages, transport: Transport) -> None:
        self.stages, self._transport = stages, transport

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        """Done on the current stream when it returns: FSDP2 waits for nothing else."""
        if not self.stages.covers(group):
            self._transport.reduce_scatter([output_tensor], [input_tensor], op, group)
            return
        with announced(Collective.TWO_STAGE_REDUCE_SCATTER, group, input_tensor):
            nodes = self.stages.nodes
            of_my_place = output_tensor.new_empty(nodes * output_tensor.numel())
            self._transport.reduce_scatter(of_my_place.chunk(nodes), input_tensor.chunk(nodes), op, self.stages.within)
            # A mean of means is the mean; a factor (PREMUL_SUM) was applied in the first stage.
            second = op if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) else dist.ReduceOp.SUM
            self._transport.reduce_scatter([output_tensor], [of_my_place], second, self.stages.between)


class RingReduceScatter(_Allocating, ReduceScatter):
    """For gloo, which sends a reduce-scatter as an all-reduce: half the bytes, and no memory. The input's content is lost."""

    def __init__(self) -> None:
        self._transport = PieceTransport()

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        """Done when it returns."""
        with announced(Collective.REDUCE_SCATTER, group, input_tensor):
            self._transport.reduce_scatter([output_tensor], [input_tensor], op, group)


def flat_collectives(group: dist.ProcessGroup, device_type: str) -> tuple[AllGather, ReduceScatter]:
    """Return what a unit gathers and reduces with in one stage: FSDP2's own, but for gloo's reduce-scatter.

    Args:
        group: the unit's shard group.
        device_type: `"cpu"` or `"cuda"`.
    """
    return DefaultAllGather(), RingReduceScatter() if runs_gloo(group, device_type) else DefaultReduceScatter()


def two_stage_collectives(stages: Stages, device_type: str) -> tuple[AllGather, ReduceScatter]:
    """Return what a unit gathers and reduces with in two stages.

    Args:
        stages: the unit's groups.
        device_type: `"cpu"` or `"cuda"`.
    """
    transport = transport_of(stages.within, device_type)
    return TwoStageAllGather(stages, transport), TwoStageReduceScatter(stages, transport)
