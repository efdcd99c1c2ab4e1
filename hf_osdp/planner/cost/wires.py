"""What the wire formats of a layout cost: seconds of a unit's collectives with encoding and decoding, and bytes of the buffers."""

from __future__ import annotations

from dataclasses import dataclass

from ..decision import UnitLayout
from ..description import UnitDescription
from ..hardware import Collective, Hardware
from ..wire import WireFormat
from .collectives import collective_seconds, replicate_ring, sharded_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one direction sends in the group whose link is slow."""

    elements: int
    """Of the whole tensor in that group."""
    ranks: int

    def sent_bytes(self, wire: WireFormat) -> int:
        """Return the bytes of the whole encoded tensor."""
        return wire.gathered_bytes(self.elements, self.ranks)

    def gather_buffers(self, wire: WireFormat | None) -> int:
        """Return what a gather allocates beside its output: codes of all ranks, and temporaries."""
        if wire is None:
            return 0
        return self.sent_bytes(wire) + wire.temporary_bytes(-(-self.elements // self.ranks))

    def reduce_buffers(self, wire: WireFormat | None, *, sums_apart: bool) -> int:
        """Return what a reduction allocates beside input and output: codes sent and received, temporaries, and a float32 sum if `apart`."""
        if wire is None:
            return 0
        return self.gather_buffers(wire) + self.sent_bytes(wire) + (4 * -(-self.elements // self.ranks) if sums_apart else 0)

    def gather_seconds(self, wire: WireFormat | None, hardware: Hardware) -> float:
        """Return the time to encode a rank's part and to decode all."""
        if wire is None:
            return 0.0
        codec = hardware.codec(wire)
        return self.elements * (codec.encode_s / self.ranks + codec.decode_s)

    def reduce_seconds(self, wire: WireFormat | None, hardware: Hardware) -> float:
        """Return the time to encode the other ranks' parts, and to add theirs up."""
        if wire is None:
            return 0.0
        codec = hardware.codec(wire)
        return self.elements * (codec.encode_s + codec.decode_s) * (self.ranks - 1) / self.ranks


def gather_message(unit: UnitDescription, layout: UnitLayout) -> Message:
    """Return the message of a unit's all-gather."""
    g = layout.shard_size
    return _sharded_message(sum(g * p.sharded_numel(g) for p in unit.parameters), layout)


def reduce_message(unit: UnitDescription, layout: UnitLayout) -> Message:
    """Return the message of a unit's reduce-scatter."""
    g = layout.shard_size
    return _sharded_message(sum(g * p.sharded_numel(g) for p in unit.trainable), layout)


def replica_message(unit: UnitDescription, layout: UnitLayout, world_size: int) -> Message:
    """Return the message of the all-reduce between replicas, of what a rank holds."""
    g = layout.shard_size
    return Message(elements=sum(p.sharded_numel(g) for p in unit.trainable), ranks=world_size // g)


def _sharded_message(elements: int, layout: UnitLayout) -> Message:
    return Message(elements=elements // layout.stage_size, ranks=layout.shard_size // layout.stage_size)


def gather_seconds(unit: UnitDescription, layout: UnitLayout, hardware: Hardware, nbytes: int) -> float:
    """Return the seconds of a unit's all-gather of `nbytes`, in the layout's format."""
    message, wire = gather_message(unit, layout), layout.gather_wire
    sent = message.sent_bytes(wire) if wire else None
    link_s = sharded_seconds(hardware, Collective.ALL_GATHER, layout.shard_size, layout.stage_size, nbytes, sent)
    return link_s + message.gather_seconds(wire, hardware)


def reduce_seconds(unit: UnitDescription, layout: UnitLayout, hardware: Hardware, nbytes: int) -> float:
    """Return the seconds of a unit's reduce-scatter of `nbytes`, in the layout's format."""
    message, wire = reduce_message(unit, layout), layout.reduce_wire
    sent = message.sent_bytes(wire) if wire else None
    link_s = sharded_seconds(hardware, Collective.REDUCE_SCATTER, layout.shard_size, layout.stage_size, nbytes, sent)
    return link_s + message.reduce_seconds(wire, hardware)


def replica_seconds(unit: UnitDescription, layout: UnitLayout, hardware: Hardware, nbytes: int) -> float:
    """Return the seconds of a unit's all-reduce of `nbytes` between replicas, in the layout's format."""
    message, wire = replica_message(unit, layout, hardware.world_size), layout.replica_wire
    sent = message.sent_bytes(wire) if wire else nbytes
    link_s = collective_seconds(hardware, Collective.ALL_REDUCE, replicate_ring(hardware, layout.shard_size), sent)
    return link_s + message.reduce_seconds(wire, hardware) + message.gather_seconds(wire, hardware)
