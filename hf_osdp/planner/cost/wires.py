"""Which wire format each direction of a unit's communication takes, and what that costs in seconds and bytes.

A direction takes the format whose collective, with encoding and decoding, is fastest by the estimate. Formats are offered in groups that
lie inside a node, or have one rank of each node (those between the nodes of two stages, replicas of whole nodes): among several ranks of
several nodes, an exchange of codes would send more over the slow link than a ring's partial sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..decision import UnitLayout
from ..description import DType, UnitDescription
from ..hardware import Collective, Hardware
from ..job import TrainingJob
from ..wire import WireFormat, formats_up_to
from .collectives import Ring, between_ring, collective_seconds, replicate_ring, shard_ring, sharded_seconds


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
        traffic = wire.encode_traffic / self.ranks + wire.decode_traffic
        return self.elements * traffic / hardware.device.memory_bytes_per_s

    def reduce_seconds(self, wire: WireFormat | None, hardware: Hardware) -> float:
        """Return the time to encode the other ranks' parts, and to add theirs up."""
        if wire is None:
            return 0.0
        traffic = (wire.encode_traffic + wire.decode_traffic) * (self.ranks - 1) / self.ranks
        return self.elements * traffic / hardware.device.memory_bytes_per_s


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


def with_wires(unit: UnitDescription, layout: UnitLayout, hardware: Hardware, job: TrainingJob) -> UnitLayout:
    """Return the layout with the fastest format for each direction that the job allows."""
    formats = formats_up_to(job.communication)
    g, stage = layout.shard_size, layout.stage_size
    ring = between_ring(hardware, g, stage) if layout.two_stage else shard_ring(hardware, g)
    wired = layout
    if g > 1 and _is_even(ring):
        gathered = {job.precision.gathered_dtype(p) for p in unit.parameters}
        nbytes = sum(g * p.sharded_numel(g) * job.precision.gathered_dtype(p).itemsize for p in unit.parameters)
        if len(gathered) == 1:
            allowed = _useful([wire for wire in formats if wire.for_parameters], next(iter(gathered)))
            gather = _fastest(allowed, lambda w: gather_seconds(unit, replace(layout, gather_wire=w), hardware, nbytes))
            wired = replace(wired, gather_wire=gather)
        allowed, reduced = _of_gradients(unit, formats, job, g)
        reduce = _fastest(allowed, lambda w: reduce_seconds(unit, replace(layout, reduce_wire=w), hardware, reduced))
        wired = replace(wired, reduce_wire=reduce)
    replicas = replicate_ring(hardware, g)
    if replicas.size > 1 and _is_even(replicas):
        allowed, reduced = _of_gradients(unit, formats, job, g)
        replica = _fastest(allowed, lambda w: replica_seconds(unit, replace(layout, replica_wire=w), hardware, reduced // g))
        wired = replace(wired, replica_wire=replica)
    return wired if wired.wires else layout


def _of_gradients(unit: UnitDescription, formats: tuple[WireFormat, ...], job: TrainingJob, g: int) -> tuple[list[WireFormat], int]:
    """Return the formats of use for a unit's gradients, and the bytes of these as they are."""
    reduced = {job.precision.reduced_dtype(p) for p in unit.trainable}
    nbytes = sum(g * p.sharded_numel(g) * job.precision.reduced_dtype(p).itemsize for p in unit.trainable)
    return _useful(formats, next(iter(reduced))) if len(reduced) == 1 else [], nbytes


def _useful(formats: list[WireFormat] | tuple[WireFormat, ...], dtype: DType) -> list[WireFormat]:
    return [wire for wire in formats if wire.bits < 8 * dtype.itemsize]


def _is_even(ring: Ring) -> bool:
    """Return whether a group lies inside a node, or has one rank of each node."""
    return ring.node_crossings in (0, ring.size)


def _fastest(formats: list[WireFormat], seconds: Callable[[WireFormat | None], float]) -> WireFormat | None:
    """Return the format that takes least; the finer of equals, and none where nothing is sent."""
    return min((None, *formats), key=seconds)
