"""How a stage's bytes travel: the backend's own collectives, or, for gloo, pieces from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

PIECE_BYTES = 256 * 2**10
"""Longer messages between two ranks go one way at a time over gloo, and take up to twice as long (measured on 2 ranks of one
machine and over a rate-limited link: 1.0 against 1.5 to 2.0 times the time)."""

# torch 2.13 deprecates the names that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
"""FSDP2 hands in either."""


class Transport(Protocol):
    """Several gathers or reductions in one group at once. Tensors are flat and contiguous."""

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, async_op: bool = False
    ) -> dist.Work | None:
        """Each output becomes the ranks' inputs one after the other; an input may be a view of its place there.

        Returns:
            With `async_op` the work, which holds on to the inputs until it was waited for.
        """

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: ReduceOp, group: dist.ProcessGroup
    ) -> None:
        """Each output becomes this rank's chunk of the reduced inputs. The inputs' content is lost."""


class BackendTransport:
    """The process group's own collectives.

    Args:
        coalesces: those of one call are one launch, as NCCL can; else one after the other.
    """

    def __init__(self, *, coalesces: bool) -> None:
        self._coalesces = coalesces

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, async_op: bool = False
    ) -> dist.Work | None:
        """Gather as `Transport` says."""
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
        """Reduce as `Transport` says."""
        coalesces = self._coalesces and len(outputs) > 1
        with _coalescing_manager(group=group) if coalesces else nullcontext():
            for output, given in zip(outputs, inputs, strict=True):
                _reduce_scatter(output, given, op=op, group=group)


class PieceTransport:
    """Pieces that each rank sends to others: what gloo's own collectives do in one message, or not at all.

    An all-gather sends the input to every other rank. A reduce-scatter sends partial sums around the ring of ranks, so that a
    group of neighbours crosses the link between two nodes once each way, and receives into the output, so that it needs no memory.
    """

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, async_op: bool = False
    ) -> dist.Work | None:
        """Gather as `Transport` says."""
        ranks, me = dist.get_world_size(group), dist.get_rank(group)
        works: list[dist.Work] = []
        for output, given in zip(outputs, inputs, strict=True):
            places = output.view(ranks, -1)
            if places[me].data_ptr() != given.data_ptr():
                places[me].copy_(given)
            for hop in range(1, ranks):
                to, source = (me + hop) % ranks, (me - hop) % ranks
                for sent, received in zip(_pieces(given), _pieces(places[source]), strict=True):
                    works.append(_begun(dist.irecv(received, group=group, group_src=source)))
                    works.append(_begun(dist.isend(sent, group=group, group_dst=to)))
        work = Works(works, held=inputs)
        if async_op:
            return work
        work.wait()
        return None

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: ReduceOp, group: dist.ProcessGroup
    ) -> None:
        """Reduce as `Transport` says."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"gloo reduces gradients by SUM or AVG, not {op}; leave set_gradient_divide_factor alone on the CPU.")
        ring = _Ring(group)
        ring.reduce_scatter([lane for output, given in zip(outputs, inputs, strict=True) for lane in _lanes(output, given, ring.size)])
        if op == dist.ReduceOp.AVG:
            for output in outputs:
                output.div_(ring.size)


@dataclass(frozen=True, slots=True)
class _Lane:
    """A piece of the output, and the same piece of each rank's chunk of the input."""

    output: torch.Tensor
    chunks: Sequence[torch.Tensor]


class _Ring:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self._me = dist.get_world_size(group), dist.get_rank(group)

    def reduce_scatter(self, lanes: Sequence[_Lane]) -> None:
        """Pass on, in step k, the partial sum of the chunk k + 1 ranks behind; a lane's next step starts as soon as its piece is there."""
        me, size = self._me, self.size
        if size == 1:
            for lane in lanes:
                lane.output.copy_(lane.chunks[0])
            return
        sends, receives = [], []
        for lane in lanes:  # receives first: two ranks that both only send do so one way at a time
            receives.append(self._receive(lane.output))
            sends.append(self._send(lane.chunks[(me - 1) % size]))
        for step in range(size - 1):
            arriving = (me - step - 2) % size
            for number, lane in enumerate(lanes):
                receives[number].wait()
                if arriving == me:
                    lane.output.add_(lane.chunks[me])
                    continue
                lane.chunks[arriving].add_(lane.output)
                receives[number] = self._receive(lane.output)
                sends.append(self._send(lane.chunks[arriving]))
        for send in sends:
            send.wait()

    def _send(self, tensor: torch.Tensor) -> dist.Work:
        return _begun(dist.isend(tensor, group=self._group, group_dst=(self._me + 1) % self.size))

    def _receive(self, tensor: torch.Tensor) -> dist.Work:
        return _begun(dist.irecv(tensor, group=self._group, group_src=(self._me - 1) % self.size))


class Works(dist.Work):
    """Several works as one. FSDP2 waits only for instances of `dist.Work`."""

    def __init__(self, works: Sequence[dist.Work], *, held: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._held = list(works), tuple(held)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        self._works, self._held = [], ()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def transport_of(group: dist.ProcessGroup, device_type: str) -> Transport:
    """Return the transport for tensors on `device_type` (`"cpu"` or `"cuda"`) in a group."""
    backend = _backend(group, device_type)
    return PieceTransport() if backend == "gloo" else BackendTransport(coalesces=backend == "nccl")


def runs_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether gloo moves the group's tensors on `device_type`."""
    return _backend(group, device_type) == "gloo"


def _backend(group: dist.ProcessGroup, device_type: str) -> str:
    return group._get_backend(torch.device(device_type)).name()


def _begun(work: dist.Work | None) -> dist.Work:
    """Return the work of a rank that is in the group; torch has None for others."""
    assert work is not None
    return work


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(tensor, max(1, PIECE_BYTES // tensor.element_size()))


def _lanes(output: torch.Tensor, given: torch.Tensor, ranks: int) -> list[_Lane]:
    chunks = [_pieces(chunk) for chunk in given.view(ranks, -1)]
    return [_Lane(piece, [chunk[number] for chunk in chunks]) for number, piece in enumerate(_pieces(output))]
