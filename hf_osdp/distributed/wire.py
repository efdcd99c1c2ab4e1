"""Encode and decode tensors in the formats of `planner/wire.py`, and send them: collectives with fewer bits and
sums in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ..errors import OSDPError
from ..planner.wire import HADAMARD_SIZE, PIECE_ELEMENTS, WireFormat, Wires
from .collectives import BackendTransport, ReduceOp, Transport, Works
from .fsdp_internals import ParameterGroup

_LARGEST_CODE = {WireFormat.INT8: 127, WireFormat.INT4: 7}
"""The largest code; codes are symmetric around 0."""


def encode(values: torch.Tensor, codes: torch.Tensor, wire: WireFormat) -> None:
    """Encode values into the first bytes of `codes`, uint8 and at least `wire.nbytes(values.numel())` long; both have
    one dimension.

    The storage of `codes` must begin at a multiple of 4 bytes. A block with an infinity or NaN decodes to values that
    are all not finite, except zeros of a block's padding, so that a gradient scaler detects it.
    """
    rotation = _hadamard(values.device) if wire is WireFormat.INT4 else None
    for piece, packed, scales in _pieces(values, codes, wire):
        _encode_piece(piece, packed, scales, wire, rotation)


def decode(codes: torch.Tensor, values: torch.Tensor, wire: WireFormat, *, add: bool = False) -> None:
    """Replace values by those that `encode` wrote, or `add` them; the arguments are those of `encode`."""
    rotation = _hadamard(values.device) if wire is WireFormat.INT4 else None
    for piece, packed, scales in _pieces(values, codes, wire):
        decoded = _decoded(packed, scales, wire, rotation)[: piece.numel()]
        piece.add_(decoded) if add else piece.copy_(decoded)
        del decoded


def _encode_piece(
    piece: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, wire: WireFormat, rotation: torch.Tensor | None
) -> None:
    if wire is WireFormat.BF16:
        packed.view(torch.bfloat16).copy_(piece)
        return
    blocks = _whole_blocks(piece, wire.block_size)
    if rotation is not None:
        blocks = (blocks.float().view(-1, HADAMARD_SIZE) @ rotation).view_as(blocks)
    scales.copy_(blocks.abs().amax(dim=1).float().div_(_LARGEST_CODE[wire]))
    scaled = blocks.div(torch.where(scales == 0, 1.0, scales).unsqueeze(1)).round_()
    del blocks
    if rotation is None:
        packed.view(torch.int8).copy_(scaled.view(-1))
        return
    low, high = scaled.add_(8).to(torch.uint8).chunk(2, dim=1)
    torch.bitwise_or(low, high << 4, out=packed.view(-1, wire.block_size // 2))


def _decoded(
    packed: torch.Tensor, scales: torch.Tensor, wire: WireFormat, rotation: torch.Tensor | None
) -> torch.Tensor:
    if wire is WireFormat.BF16:
        return packed.view(torch.bfloat16).float()
    if rotation is None:
        return packed.view(torch.int8).view(-1, wire.block_size).float().mul_(scales.unsqueeze(1)).view(-1)
    both = packed.view(-1, wire.block_size // 2)
    rotated = torch.cat((both & 15, both >> 4), dim=1).float().sub_(8).mul_(scales.unsqueeze(1))
    return (rotated.view(-1, HADAMARD_SIZE) @ rotation).view(-1)  # symmetric and orthogonal: its own inverse


def _pieces(
    values: torch.Tensor, codes: torch.Tensor, wire: WireFormat
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield parts of the values with the codes and scales of each; bf16 has no scales."""
    size, end = wire.block_size, wire.code_bytes(values.numel())
    scales = codes[end : wire.nbytes(values.numel())]
    scales = scales if wire is WireFormat.BF16 else scales.view(torch.float32)
    whole = (
        values.numel() // size * size
    )  # the rest, which fills no block, is a separate piece, because padding copies it
    starts = [*range(0, whole, PIECE_ELEMENTS), *([whole] if whole < values.numel() else [])]
    for start in starts:
        piece = values[start : min(start + PIECE_ELEMENTS, whole) if start < whole else None]
        blocks = -(-piece.numel() // size)
        first = wire.code_bytes(start)
        yield (
            piece,
            codes[first : first + wire.code_bytes(piece.numel())],
            scales[start // size : start // size + blocks],
        )


def _whole_blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    if missing := -values.numel() % size:
        values = pad(values, (0, missing))
    return values.view(-1, size)


def _hadamard(device: torch.device) -> torch.Tensor:
    """Return Sylvester's orthonormal Hadamard matrix; it is not cached, because a cached one might be a
    simulation's fake tensor.
    """
    two = torch.full(
        (2, 2), 0.5**0.5, device=device, dtype=torch.float32
    )  # on the device: a copy from the host would wait for its stream
    two[1, 1].neg_()
    matrix = two
    while len(matrix) < HADAMARD_SIZE:
        matrix = torch.kron(matrix, two)
    return matrix


class WireTransport:
    """Sends tensors in a format of fewer bits over another transport. Each collective has ended on the current stream
    when it returns.

    All ranks of a group decode the same bytes, including their own part of a gather, so that replicas stay bitwise
    equal.
    """

    def __init__(self, transport: BackendTransport, wire: WireFormat) -> None:
        self._transport, self.wire = transport, wire

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        for output, given in zip(outputs, inputs, strict=True):
            if not given.is_floating_point():
                raise OSDPError(
                    "Parameters of several dtypes are gathered as bytes, which no wire format can round; plan again."
                )
            self._gather(given, output.view(group.size(), -1).unbind(), group)
        return Works((), held=()) if async_op else None

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: ReduceOp, group: dist.ProcessGroup
    ) -> None:
        for output, given in zip(outputs, inputs, strict=True):
            output.copy_(self._reduce(given.view(group.size(), -1).unbind(), op, group))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup) -> None:
        """Reduce a tensor in place: each rank sums one part, and sends the sum to all."""
        parts = tensor.view(-1).tensor_split(group.size())
        self._gather(self._reduce(parts, op, group), parts, group)

    def _gather(self, mine: torch.Tensor, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        codes = self._new_codes(mine, parts)
        own = codes[group.rank()]
        encode(mine.view(-1), own, self.wire)
        self._transport.all_gather([codes.view(-1)], [own], group)
        for part, row in zip(parts, codes, strict=True):
            decode(row, part, self.wire)

    def _reduce(self, parts: Sequence[torch.Tensor], op: ReduceOp, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the sum or mean of this rank's part over all ranks; its own values are added without rounding."""
        means = op == dist.ReduceOp.AVG  # a ReduceOp on the left may equal a RedOpType, but not the other way round
        if not (means or op == dist.ReduceOp.SUM):
            raise ValueError(
                f"A wire format reduces gradients by SUM or AVG, not {op}; do not call set_gradient_divide_factor."
            )
        me = group.rank()
        sent, received = self._new_codes(parts[0], parts), self._new_codes(parts[0], parts)
        for rank, part in enumerate(parts):
            if rank != me:
                encode(part, sent[rank], self.wire)
        dist.all_to_all_single(received, sent, group=group)
        total = parts[me].to(torch.promote_types(parts[me].dtype, torch.float32))
        for rank, row in enumerate(received):
            if rank != me:
                decode(row, total, self.wire, add=True)
        return total.div_(len(parts)) if means else total

    def _new_codes(self, like: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a row for each part, as long as the longest part needs."""
        nbytes = self.wire.nbytes(max(part.numel() for part in parts))
        return torch.empty(len(parts), nbytes, dtype=torch.uint8, device=like.device)


@dataclass(eq=False, kw_only=True)
class EncodedReplicas:
    """Replaces the process group of a unit's replicas, in which FSDP2 all-reduces gradients, to send fewer bits."""

    group: dist.ProcessGroup
    transport: WireTransport

    def __eq__(self, other: object) -> bool:
        """Equal the group itself: torch looks it up to log an error of a collective."""
        return other is self or other is self.group

    def __hash__(self) -> int:
        return hash(self.group)

    def size(self) -> int:
        """Return the number of replicas."""
        return self.group.size()

    def rank(self) -> int:
        """Return this rank's place among the replicas."""
        return self.group.rank()

    def allreduce(self, tensors: Sequence[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work:
        """Reduce in place, as `dist.all_reduce` asks a process group to."""
        for tensor in tensors:
            self.transport.all_reduce(tensor, options.reduceOp, self.group)
        return Works((), held=())


def transports(decision: Wires, plain: BackendTransport) -> list[Transport | None]:
    """Return what replaces the plain transport in a unit's gathers and reductions; None leaves it."""
    wires = decision.gather_wire, decision.reduce_wire
    return [None if wire is None else WireTransport(plain, wire) for wire in wires]


def encode_replicas(group: ParameterGroup, decision: Wires, plain: BackendTransport) -> None:
    """Let a unit's replicas all-reduce in the format of its decision."""
    if decision.replica_wire is not None:
        info: Any = group.mesh_info
        transport = WireTransport(plain, decision.replica_wire)
        info.replicate_process_group = EncodedReplicas(group=info.replicate_process_group, transport=transport)
