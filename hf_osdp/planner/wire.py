"""Formats of fewer bits for a unit's parameters and gradients on slow links: bytes, the cost to encode and decode, and
a layout's fields for them. `distributed/wire.py` encodes and sends, `offered_wires.py` chooses.

    bf16    rounded to bfloat16
    int8    codes of 8 bits, with a float32 scale for each block of 256 (ZeRO++, arXiv 2306.10209)
    int4    codes of 4 bits with a scale for each block of 128; a Hadamard matrix rotates each 32 values before they
            are rounded, so that one large value does not reduce the precision of the others (SDP4Bit, arXiv
            2410.15526); only for gradients

Rounding is to the nearest, without random numbers, so that a resumed run sends the same values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

PIECE_ELEMENTS = 2**20
"""Elements encoded or decoded at once, which bounds the temporaries."""
HADAMARD_SIZE = 32
"""Values that `int4` rotates together."""


class WireFormat(str, Enum):
    """Format of values on a link."""

    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def block_size(self) -> int:
        """Elements that share a scale; 1 without scales."""
        return {WireFormat.BF16: 1, WireFormat.INT8: 256, WireFormat.INT4: 128}[self]

    @property
    def bits(self) -> int:
        """Bits of one element's code."""
        return {WireFormat.BF16: 16, WireFormat.INT8: 8, WireFormat.INT4: 4}[self]

    @property
    def for_parameters(self) -> bool:
        """Whether parameters may be sent in this format: errors of parameters do not average out over steps, those
        of gradients do.
        """
        return self is not WireFormat.INT4

    @property
    def encode_traffic(self) -> int:
        """Bytes read and written to encode one float32 element, over all operators."""
        return {WireFormat.BF16: 6, WireFormat.INT8: 33, WireFormat.INT4: 51}[self]

    @property
    def decode_traffic(self) -> int:
        """Bytes read and written to decode one float32 element and add it to a sum."""
        return {WireFormat.BF16: 18, WireFormat.INT8: 25, WireFormat.INT4: 44}[self]

    def code_bytes(self, elements: int) -> int:
        """Return the bytes of a tensor's codes, in whole blocks."""
        return -(-elements // self.block_size) * self.block_size * self.bits // 8

    def nbytes(self, elements: int) -> int:
        """Return the bytes of an encoded tensor: codes, followed by the scales."""
        scales = 0 if self is WireFormat.BF16 else 4 * (-(-elements // self.block_size))
        return self.code_bytes(elements) + scales

    def gathered_bytes(self, elements: int, ranks: int) -> int:
        """Return the bytes of all encoded parts if each of `ranks` encodes an equal part of `elements`, rounded up."""
        return ranks * self.nbytes(-(-elements // ranks))

    def temporary_bytes(self, elements: int) -> int:
        """Return the most bytes that encoding or decoding takes beyond the tensor and its codes."""
        blocks = -(-min(elements, PIECE_ELEMENTS) // self.block_size)
        if self is WireFormat.BF16:
            return 4 * blocks
        scales, turns = 12 * blocks, 8 * HADAMARD_SIZE**2 if self is WireFormat.INT4 else 0
        return (8 if turns else 4) * blocks * self.block_size + scales + turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A tensor that the ranks of a group send in one direction, encoded or not."""

    elements: int
    """Elements of the whole tensor in the group."""
    ranks: int
    wire: WireFormat | None
    """None sends exact values, without encoding and its buffers."""

    @property
    def sent_bytes(self) -> int | None:
        """Bytes of the whole encoded tensor; None without encoding."""
        return None if self.wire is None else self.wire.gathered_bytes(self.elements, self.ranks)

    def gather_buffers(self) -> int:
        """Return the bytes that a gather allocates beside its output: codes of all ranks, and temporaries."""
        temporary = 0 if self.wire is None else self.wire.temporary_bytes(-(-self.elements // self.ranks))
        return (self.sent_bytes or 0) + temporary

    def reduce_buffers(self, *, separate_sums: bool) -> int:
        """Return the bytes of a reduction beside input and output: codes both ways, temporaries, with `separate_sums`
        a float32 sum.
        """
        sums = 4 * -(-self.elements // self.ranks) if separate_sums and self.wire is not None else 0
        return self.gather_buffers() + (self.sent_bytes or 0) + sums

    def gather_seconds(self, memory_bytes_per_s: float) -> float:
        """Return the seconds to encode a rank's part and to decode all parts, at memory speed."""
        traffic = 0.0 if self.wire is None else self.wire.encode_traffic / self.ranks + self.wire.decode_traffic
        return self.elements * traffic / memory_bytes_per_s

    def reduce_seconds(self, memory_bytes_per_s: float) -> float:
        """Return the seconds to encode the parts of other ranks, and to decode and sum the received ones."""
        traffic = 0.0 if self.wire is None else self.wire.encode_traffic + self.wire.decode_traffic
        return self.elements * (self.ranks - 1) / self.ranks * traffic / memory_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The formats of a unit's messages; None sends exact values."""

    gather_wire: WireFormat | None = None
    """Format of parameters in all-gathers, in two stages only between nodes."""
    reduce_wire: WireFormat | None = None
    """Format of gradients in reduce-scatters, in two stages only between nodes."""
    replica_wire: WireFormat | None = None
    """Format of gradients in the all-reduce between replicas."""

    def check_formats(self, shard_size: int) -> None:
        """Raise ValueError if a message that has a format is not sent."""
        if shard_size == 1 and (self.gather_wire or self.reduce_wire):
            raise ValueError(
                "gather_wire and reduce_wire need a sharded unit; with shard_size=1 nothing is gathered or scattered."
            )
        if self.gather_wire is not None and not self.gather_wire.for_parameters:
            raise ValueError(f"gather_wire={self.gather_wire.value} is only for gradients; use int8 or bf16.")

    @property
    def formats(self) -> dict[str, WireFormat]:
        """Formats of fewer bits, by `gather`, `reduce` and `replicas`; exact messages are left out."""
        wires = {"gather": self.gather_wire, "reduce": self.reduce_wire, "replicas": self.replica_wire}
        return {name: wire for name, wire in wires.items() if wire is not None}

    @staticmethod
    def coarsest(layouts: Iterable[Wires]) -> str | None:
        """Return the name of the coarsest format of any unit; None if all values are exact."""
        sent = {wire for layout in layouts for wire in layout.formats.values()}
        return next((wire.value for wire in reversed(WireFormat) if wire in sent), None)

    def messages(self, *sizes: tuple[int, int]) -> tuple[Message, ...]:
        """Return the messages of an all-gather, a reduce-scatter and an all-reduce of these elements and ranks."""
        wires = self.gather_wire, self.reduce_wire, self.replica_wire
        return tuple(
            Message(elements=elements, ranks=ranks, wire=wire)
            for (elements, ranks), wire in zip(sizes, wires, strict=True)
        )
