"""Costs of local steps: bytes of the outer state, and a synchronisation's seconds per optimizer step.

With M machines of L ranks, P trained elements of a unit and H local steps, for every layout of the unit,

    bytes of a rank    2 ceil(P / L) max(4, itemsize)                      parameters of the last synchronisation, outer momentum
    link_s             2 (M - 1) (P b / (M outer rate) + P / (L N) α)      all-reduce of the rank's part; the ranks share the outer link
    seconds a step     (link_s + coding + gather inside the machine + passes over memory) / H

with messages of N elements, and b bytes of a sent element: those of `LocalSteps.wire`, or without it the dtype's and at least 4.
"""

from __future__ import annotations

from ..decision import UnitLayout
from ..description import ParameterSpec, UnitDescription
from ..hardware import Collective, Hardware
from ..job import TrainingJob
from ..local_steps import LocalSteps
from ..wire import PIECE_ELEMENTS, WireFormat, formats_up_to
from .collectives import Message, collective_seconds, replicate_ring

_PASSES = 14
"""Reads and writes of an element in an outer step: difference, momentum, update, copies into the message and out of it."""


def outer_tensors(parameter: ParameterSpec, shard_size: int, world_size: int, job: TrainingJob) -> tuple[int, ...]:
    """Return the bytes of each tensor of a parameter's outer state on one rank; no tensors without local steps."""
    own = -(-parameter.sharded_numel(shard_size) * shard_size // world_size)
    return () if job.local_steps is None else (own * max(4, parameter.dtype.itemsize),) * 2


def outer_seconds(unit: UnitDescription, layout: UnitLayout, hardware: Hardware, local: LocalSteps) -> float:
    """Return the seconds of a unit's synchronisation per optimizer step; `hardware` is one machine, with the link to others."""
    elements = sum(layout.shard_size * p.sharded_numel(layout.shard_size) for p in unit.trainable)
    nbytes = sum(layout.shard_size * p.sharded_numel(layout.shard_size) * max(4, p.dtype.itemsize) for p in unit.trainable)
    sent_s = between_seconds(elements, nbytes, hardware, local, local.wire)
    gather_s = collective_seconds(hardware, Collective.ALL_GATHER, replicate_ring(hardware, layout.shard_size), nbytes // layout.shard_size)
    passes_s = _PASSES * nbytes / hardware.world_size / hardware.device.memory_bytes_per_s
    return (sent_s + gather_s + passes_s) / local.steps


def between_seconds(elements: int, nbytes: int, hardware: Hardware, local: LocalSteps, wire: WireFormat | None) -> float:
    """Return the seconds to average `elements` between machines in a wire format, coding included."""
    own = -(-elements // hardware.world_size)
    message = Message(elements=own, ranks=local.machines, wire=wire)
    sent = nbytes if message.sent_bytes is None else hardware.world_size * message.sent_bytes
    link, hops = hardware.inter_node, 2 * (local.machines - 1)
    link_s = hops * (sent / local.machines / link.bytes_per_s + own / PIECE_ELEMENTS * link.latency_s)
    return link_s + message.reduce_seconds(hardware) + message.gather_seconds(hardware)


def fastest_wire(hardware: Hardware, local: LocalSteps, coarsest: WireFormat | None) -> WireFormat | None:
    """Return the allowed format in which float32 differences take the least time; None if exact values do."""
    formats = (None, *formats_up_to(coarsest))
    return min(formats, key=lambda wire: between_seconds(2**24, 2**26, hardware, local, wire))
