"""Formats of fewer bits, in which a unit's parameters and gradients may cross slow links: bytes, and what they cost to make.

    bf16    rounded to bfloat16
    int8    codes of 8 bits, with a float32 scale for each block of 256 (ZeRO++, arXiv 2306.10209)
    int4    codes of 4 bits with a scale for each block of 128, in which 32 values at a time are turned by a Hadamard matrix before they
            are rounded, so that one large value does not take the others' precision (SDP4Bit, arXiv 2410.15526); for gradients alone

Rounding is to the nearest, without random numbers: a run and its resumed half send the same.
"""

from __future__ import annotations

from enum import Enum

PIECE_ELEMENTS = 2**20
"""Elements that are encoded or decoded at once, which bounds the temporaries."""
EXACT = "exact"
"""The name of sending all as it is."""
TURNED = 32
"""Values that `int4` turns together."""


class WireFormat(str, Enum):
    """How values cross a link."""

    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def block_size(self) -> int:
        """Elements that share a scale; 1 where there are no scales."""
        return {WireFormat.BF16: 1, WireFormat.INT8: 256, WireFormat.INT4: 128}[self]

    @property
    def bits(self) -> int:
        """Bits of one element's code."""
        return {WireFormat.BF16: 16, WireFormat.INT8: 8, WireFormat.INT4: 4}[self]

    @property
    def for_parameters(self) -> bool:
        """Whether parameters may be gathered so: an error of theirs does not average out over steps, as one of gradients does."""
        return self is not WireFormat.INT4

    @property
    def encode_traffic(self) -> int:
        """Bytes that are read and written to encode one float32 element, operator by operator."""
        return {WireFormat.BF16: 6, WireFormat.INT8: 33, WireFormat.INT4: 51}[self]

    @property
    def decode_traffic(self) -> int:
        """The same to decode one, and to add it to a sum."""
        return {WireFormat.BF16: 18, WireFormat.INT8: 25, WireFormat.INT4: 44}[self]

    def code_bytes(self, elements: int) -> int:
        """Return the bytes of the codes of a tensor: whole blocks."""
        return -(-elements // self.block_size) * self.block_size * self.bits // 8

    def nbytes(self, elements: int) -> int:
        """Return the bytes of an encoded tensor: codes, and behind them the scales."""
        scales = 0 if self is WireFormat.BF16 else 4 * (-(-elements // self.block_size))
        return self.code_bytes(elements) + scales

    def gathered_bytes(self, elements: int, ranks: int) -> int:
        """Return the bytes of `elements` of which each of `ranks` encodes an equal part, rounded up."""
        return ranks * self.nbytes(-(-elements // ranks))

    def temporary_bytes(self, elements: int) -> int:
        """Return the most that encoding or decoding a tensor takes beside the tensor and its codes."""
        blocks = -(-min(elements, PIECE_ELEMENTS) // self.block_size)
        if self is WireFormat.BF16:
            return 4 * blocks
        scales, turns = 12 * blocks, 8 * TURNED**2 if self is WireFormat.INT4 else 0
        return (8 if turns else 4) * blocks * self.block_size + scales + turns


def formats_up_to(coarsest: WireFormat | None) -> tuple[WireFormat, ...]:
    """Return the formats that are allowed where the user allows this one; none where all is to be sent as it is."""
    order = tuple(WireFormat)
    return () if coarsest is None else order[: order.index(coarsest) + 1]
