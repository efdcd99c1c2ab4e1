"""What a unit's collectives take under a layout: seconds, with those of encoding where fewer bits are sent, and bytes of buffers."""

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
    wire: WireFormat | None
    """None where it is sent as it is: then nothing is encoded, and no buffers are needed."""

    @property
    def sent_bytes(self) -> int | None:
        """Bytes of the whole encoded tensor."""
        return None if self.wire is None else self.wire.gathered_bytes(self.elements, self.ranks)

    def gather_buffers(self) -> int:
        """Return what a gather allocates beside its output: codes of all ranks, and temporaries."""
        if self.wire is None:
            return 0
        part = -(-self.elements // self.ranks)
        return self.wire.gathered_bytes(self.elements, self.ranks) + self.wire.temporary_bytes(part)

    def reduce_buffers(self, *, sums_apart: bool) -> int:
        """Return what a reduction allocates beside input and output: codes sent and received, temporaries, and a float32 sum if `apart`."""
        if self.wire is None:
            return 0
        sums = 4 * -(-self.elements // self.ranks) if sums_apart else 0
        return self.gather_buffers() + self.wire.gathered_bytes(self.elements, self.ranks) + sums

    def gather_seconds(self, hardware: Hardware) -> float:
        """Return the time to encode a rank's part and to decode all."""
        if self.wire is None:
            return 0.0
        traffic = self.wire.encode_traffic / self.ranks + self.wire.decode_traffic
        return self.elements * traffic / hardware.device.memory_bytes_per_s

    def reduce_seconds(self, hardware: Hardware) -> float:
        """Return the time to encode the other ranks' parts, and to add theirs up."""
        if self.wire is None:
            return 0.0
        traffic = (self.wire.encode_traffic + self.wire.decode_traffic) * (self.ranks - 1) / self.ranks
        return self.elements * traffic / hardware.device.memory_bytes_per_s


def messages(unit: UnitDescription, layout: UnitLayout, world_size: int) -> tuple[Message, Message, Message]:
    """Return the messages of a unit's all-gather, of its reduce-scatter, and of the all-reduce between replicas, of what a rank holds."""
    g, between = layout.shard_size, layout.shard_size // layout.stage_size
    held, trained = (sum(p.sharded_numel(g) for p in parameters) for parameters in (unit.parameters, unit.trainable))
    return (
        Message(elements=held * between, ranks=between, wire=layout.gather_wire),
        Message(elements=trained * between, ranks=between, wire=layout.reduce_wire),
        Message(elements=trained, ranks=world_size // g, wire=layout.replica_wire),
    )


def wire_seconds(
    unit: UnitDescription, layout: UnitLayout, hardware: Hardware, gathered_bytes: int, reduced_bytes: int
) -> tuple[float, float, float]:
    """Return the seconds of the three collectives of `messages`, of a whole tensor of so many bytes each; replicas reduce their part."""
    gather, scatter, replicas = messages(unit, layout, hardware.world_size)
    size, stage = layout.shard_size, layout.stage_size
    gather_s = sharded_seconds(hardware, Collective.ALL_GATHER, size, stage, gathered_bytes, gather.sent_bytes)
    scatter_s = sharded_seconds(hardware, Collective.REDUCE_SCATTER, size, stage, reduced_bytes, scatter.sent_bytes)
    part = reduced_bytes // size if replicas.sent_bytes is None else replicas.sent_bytes
    replicas_s = collective_seconds(hardware, Collective.ALL_REDUCE, replicate_ring(hardware, size), part)
    return (
        gather_s + gather.gather_seconds(hardware),
        scatter_s + scatter.reduce_seconds(hardware),
        replicas_s + replicas.reduce_seconds(hardware) + replicas.gather_seconds(hardware),
    )
