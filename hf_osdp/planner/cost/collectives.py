"""Seconds and buffer bytes of collectives in a plan's groups: as measured, else estimated by rings
(docs/planner.md).
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from ..decision import Message, UnitLayout
from ..description import UnitDescription
from ..hardware import Collective, Hardware

TWO_STAGE = {
    Collective.ALL_GATHER: Collective.TWO_STAGE_ALL_GATHER,
    Collective.REDUCE_SCATTER: Collective.TWO_STAGE_REDUCE_SCATTER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A communication group. Every rank of the world is in one such group, and all groups run at once."""

    size: int
    node_crossings: int
    """Hops of the ring between nodes."""
    sharing: int
    """Groups that share the outer link of one node."""


def shard_ring(hardware: Hardware, shard_size: int) -> Ring:
    """Return the groups of `shard_size` neighbouring ranks: one copy of a unit's parameters."""
    return _ring(hardware.devices_per_node, hardware.world_size, shard_size, neighbours=True)


def replicate_ring(hardware: Hardware, shard_size: int) -> Ring:
    """Return the groups of the ranks that hold the same shard: every `shard_size`-th rank."""
    return _ring(hardware.devices_per_node, hardware.world_size, shard_size, neighbours=False)


def between_ring(hardware: Hardware, shard_size: int, stage_size: int) -> Ring:
    """Return the groups between nodes of collectives in two stages: ranks with the same local rank in nodes of
    `stage_size`.
    """
    return _ring(hardware.devices_per_node, shard_size, stage_size, neighbours=False)


def sharded_seconds(
    hardware: Hardware,
    collective: Collective,
    shard_size: int,
    stage_size: int,
    nbytes: int,
    sent_bytes: int | None = None,
) -> float:
    """Return the seconds of an all-gather or reduce-scatter of a whole tensor of `nbytes` among `shard_size` ranks.

    It runs in one stage (`stage_size=1`), or in two stages, one after the other: between nodes, and among `stage_size`
    ranks of a node. `sent_bytes` are the bytes of an encoded tensor, which in two stages is sent only between nodes.
    """
    if stage_size == 1:
        return collective_seconds(
            hardware, collective, shard_ring(hardware, shard_size), nbytes if sent_bytes is None else sent_bytes
        )
    if nbytes == 0:
        return 0.0
    between, within = between_ring(hardware, shard_size, stage_size), shard_ring(hardware, stage_size)
    within_s = _lap_seconds(hardware, within, nbytes)
    exact_s = _lap_seconds(hardware, between, nbytes // stage_size)
    if (measured := hardware.timing(TWO_STAGE[collective], shard_size, crosses_nodes=True)) is not None:
        if sent_bytes is None:
            return measured(nbytes)
        return max(within_s, measured(nbytes) - exact_s) + _lap_seconds(hardware, between, sent_bytes)
    return within_s + (exact_s if sent_bytes is None else _lap_seconds(hardware, between, sent_bytes))


def collective_seconds(hardware: Hardware, collective: Collective, ring: Ring, nbytes: int) -> float:
    """Return the seconds of one collective in a group; 0 for a group of one rank or an empty tensor.

    `nbytes` are those of the whole tensor: all shards together for all-gather and reduce-scatter.
    """
    if ring.size == 1 or nbytes == 0:
        return 0.0
    if (measured := hardware.timing(collective, ring.size, crosses_nodes=ring.node_crossings > 0)) is not None:
        return measured(nbytes)
    return (2 if collective is Collective.ALL_REDUCE else 1) * _lap_seconds(hardware, ring, nbytes)


@functools.lru_cache(maxsize=512)
def _ring(per_node: int, world_size: int, size: int, *, neighbours: bool) -> Ring:
    """Return the slowest group of `size` neighbours, or of every `size`-th rank: with most hops between nodes and
    the most shared link.
    """
    if neighbours:
        groups = [range(start, start + size) for start in range(0, world_size, size)]
    else:
        groups = [range(start, world_size, size) for start in range(size)]
    left = []
    for ranks in groups:
        nodes = [rank // per_node for rank in ranks]
        left.append([node for node, following in zip(nodes, [*nodes[1:], nodes[0]], strict=True) if node != following])
    sharing = Counter(node for hops in left for node in hops)
    return Ring(size=len(groups[0]), node_crossings=max(map(len, left)), sharing=max(sharing.values(), default=1))


def _lap_seconds(hardware: Hardware, ring: Ring, nbytes: int) -> float:
    hops = ring.size - 1
    outer = min(hops, ring.node_crossings)
    latency = (hops - outer) * hardware.intra_node.latency_s + outer * hardware.inter_node.latency_s
    rate = hardware.intra_node_bytes_per_s
    if ring.node_crossings:
        share = hardware.inter_node.bytes_per_s / ring.sharing
        rate = share if ring.node_crossings == ring.size else min(rate, share)
    return latency + hops / ring.size * nbytes / rate


def messages(unit: UnitDescription, layout: UnitLayout, world_size: int) -> tuple[Message, ...]:
    """Return the messages of a unit's all-gather, of its reduce-scatter, and of the all-reduce of a rank's shard
    between replicas.
    """
    g, between = layout.shard_size, layout.shard_size // layout.stage_size
    held, trained = (sum(p.sharded_numel(g) for p in parameters) for parameters in (unit.parameters, unit.trainable))
    return layout.messages((held * between, between), (trained * between, between), (trained, world_size // g))


def unit_collective_seconds(
    unit: UnitDescription, layout: UnitLayout, hardware: Hardware, gathered_bytes: int, reduced_bytes: int
) -> tuple[float, float, float]:
    """Return the seconds of a unit's all-gather, reduce-scatter and all-reduce between replicas, coding included.

    `gathered_bytes` and `reduced_bytes` are those of the whole tensor; the all-reduce takes the rank's part of
    `reduced_bytes`.
    """
    gather, scatter, replicas = messages(unit, layout, hardware.world_size)
    size, stage = layout.shard_size, layout.stage_size
    gather_s = sharded_seconds(hardware, Collective.ALL_GATHER, size, stage, gathered_bytes, gather.sent_bytes)
    scatter_s = sharded_seconds(hardware, Collective.REDUCE_SCATTER, size, stage, reduced_bytes, scatter.sent_bytes)
    part = reduced_bytes // size if replicas.sent_bytes is None else replicas.sent_bytes
    replicas_s = collective_seconds(hardware, Collective.ALL_REDUCE, replicate_ring(hardware, size), part)
    rate = hardware.device.memory_bytes_per_s
    return (
        gather_s + gather.gather_seconds(rate),
        scatter_s + scatter.reduce_seconds(rate),
        replicas_s + replicas.reduce_seconds(rate) + replicas.gather_seconds(rate),
    )
