"""Collectives of a unit: FSDP2's own, or in two stages over nodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from .fsdp_internals import AllGather, DefaultAllGather, DefaultReduceScatter, ReduceScatter

# torch 2.13 deprecates the names that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
"""FSDP2 passes either."""


def gather_rows(local: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather a tensor of `rows` rows; each rank has ceil(rows / ranks) of them, the last ranks fewer or none.

    Collective.
    """
    each = -(-rows // group.size())
    whole = local.new_empty((each * group.size(), *local.shape[1:]))
    part = whole[each * group.rank() :][:each]
    part[: local.shape[0]] = local
    all_gather_single(whole, part, group=group)
    return whole[:rows]


class Works(dist.Work):
    """Several works as one, which keeps tensors alive until it has been waited for.

    FSDP2 waits only for instances of `dist.Work`.
    """

    def __init__(self, works: Sequence[dist.Work], *, held: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._held = list(works), tuple(held)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        self._works, self._held = [], ()
        return True


class Transport(Protocol):
    """Sends flat, contiguous tensors for one stage of a collective."""

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill each output with the ranks' inputs in rank order; an input may be a view of its place in the output.

        With `async_op` return the work, which keeps the inputs alive until it has been waited for.
        """

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: ReduceOp, group: dist.ProcessGroup
    ) -> None:
        """Write this rank's chunk of the reduced inputs to each output; the inputs may be overwritten."""


class BackendTransport:
    """The process group's own collectives.

    Several gathers or reductions run as one launch if it `coalesces`, as NCCL can, else one after the other. gloo's
    reduce-scatter is an all-reduce of a copy of its input; with `reduces_in_place` the input itself is all-reduced,
    which takes no more memory than planned.
    """

    def __init__(self, *, coalesces: bool, reduces_in_place: bool = False) -> None:
        self._coalesces, self.reduces_in_place = coalesces, reduces_in_place

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        pairs = list(zip(outputs, inputs, strict=True))
        if len(pairs) == 1 or not self._coalesces:
            works = [all_gather_single(output, given, group=group, async_op=async_op) for output, given in pairs]
        else:
            with _coalescing_manager(group=group, async_ops=async_op) as coalesced:
                for output, given in pairs:
                    all_gather_single(output, given, group=group)
            works = coalesced.works
        return Works(works, held=inputs) if async_op else None

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: ReduceOp, group: dist.ProcessGroup
    ) -> None:
        if self.reduces_in_place:
            for output, given in zip(outputs, inputs, strict=True):
                dist.all_reduce(given, op=op, group=group)
                output.copy_(given.view(group.size(), -1)[group.rank()])
            return
        coalesces = self._coalesces and len(outputs) > 1
        with _coalescing_manager(group=group) if coalesces else nullcontext():
            for output, given in zip(outputs, inputs, strict=True):
                _reduce_scatter(output, given, op=op, group=group)


def plain_transport(group: dist.ProcessGroup, device_type: str) -> BackendTransport:
    """Return the transport for tensors on `device_type` (`"cpu"` or `"cuda"`) in two stages, or encoded."""
    backend = group._get_backend(torch.device(device_type)).name()
    return BackendTransport(coalesces=backend == "nccl", reduces_in_place=backend == "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A rank's groups for a two-stage collective; its rank overall is `rank in between * size of within + rank in
    within`.
    """

    between: dist.ProcessGroup
    """Ranks with the same local rank, one of each node."""
    within: dist.ProcessGroup
    """Ranks of this node."""


class TransportAllGather(AllGather):
    """Gather by a transport. In two stages, gather between nodes first, so that each byte crosses the slow link once
    per node.

    With `async_op` it returns the work of the last stage; the first of two has been issued to the current stream, or
    has ended.
    """

    allocate = DefaultAllGather.allocate

    def __init__(self, transport: Transport, stages: Stages | None = None, between: Transport | None = None) -> None:
        """Use a transport; in two `stages` also their groups, and the transport `between` nodes if it differs."""
        self.transport, self.stages, self.between = transport, stages, between or transport

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.stages is None:
            return self.transport.all_gather([output_tensor], [input_tensor], group, async_op=async_op)
        nodes = self.stages.between.size()
        between_nodes = input_tensor.new_empty(nodes * input_tensor.numel())
        self.between.all_gather([between_nodes], [input_tensor], self.stages.between)
        parts = output_tensor.chunk(nodes), between_nodes.chunk(nodes)
        return self.transport.all_gather(*parts, self.stages.within, async_op=async_op)


class TransportReduceScatter(ReduceScatter):
    """Reduce by a transport, which may overwrite the input.

    In two stages, reduce inside the node first, then between nodes.
    """

    allocate = DefaultReduceScatter.allocate

    def __init__(self, transport: Transport, stages: Stages | None = None, between: Transport | None = None) -> None:
        self.transport, self.stages, self.between = transport, stages, between or transport

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> None:
        if self.stages is None:
            self.transport.reduce_scatter([output_tensor], [input_tensor], op, group)
            return
        nodes = self.stages.between.size()
        between_nodes = output_tensor.new_empty(nodes * output_tensor.numel())
        self.transport.reduce_scatter(between_nodes.chunk(nodes), input_tensor.chunk(nodes), op, self.stages.within)
        # A mean of means is the mean; a factor (PREMUL_SUM) was applied in the first stage.
        second = (
            dist.ReduceOp.AVG if op == dist.ReduceOp.AVG else dist.ReduceOp.SUM
        )  # `in` misses a ReduceOp that holds AVG
        self.between.reduce_scatter([output_tensor], [between_nodes], second, self.stages.between)


def unit_collectives(
    group: dist.ProcessGroup,
    device_type: str,
    stages: Stages | None = None,
    gather: Transport | None = None,
    reduce: Transport | None = None,
) -> tuple[AllGather, ReduceScatter]:
    """Return the collectives of a unit in its shard group, for tensors on `device_type` (`"cpu"` or `"cuda"`).

    In one stage they are FSDP2's own, except gloo's reduce-scatter, which would copy its input. If given, the
    transports `gather` and `reduce` replace the plain one; with `stages` they do so between nodes.
    """
    plain = plain_transport(group if stages is None else stages.within, device_type)
    if stages is not None:
        return TransportAllGather(plain, stages, gather), TransportReduceScatter(plain, stages, reduce)
    if reduce is None and plain.reduces_in_place:
        reduce = plain
    gathers = TransportAllGather(gather) if gather else DefaultAllGather()
    return gathers, TransportReduceScatter(reduce) if reduce else DefaultReduceScatter()
