"""Formats of fewer bits for a unit's parameters and gradients on slow links: bytes, and the cost to encode and decode.

    bf16    rounded to bfloat16
    int8    codes of 8 bits, with a float32 scale for each block of 256 (ZeRO++, arXiv 2306.10209)
    int4    codes of 4 bits with a scale for each block of 128; a Hadamard matrix rotates each 32 values before they
            are rounded, so that one large value does not reduce the precision of the others (SDP4Bit, arXiv
            2410.15526); only for gradients

Rounding is to the nearest, without random numbers, so that a resumed run sends the same values.
"""

from __future__ import annotations

from enum import Enum

PIECE_ELEMENTS = 2**20
"""Elements encoded or decoded at once, which bounds the temporaries."""
EXACT = "exact"
"""Name of communication in the original dtype."""
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


def formats_up_to(coarsest: WireFormat | None) -> tuple[WireFormat, ...]:
    """Return the formats that are allowed if the user allows `coarsest`; none for None (exact)."""
    order = tuple(WireFormat)
    return () if coarsest is None else order[: order.index(coarsest) + 1]
