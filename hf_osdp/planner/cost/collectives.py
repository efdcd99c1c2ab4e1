"""Seconds of collectives in the groups that a plan uses: measured, else of rings (equations: docs/planner_search.md)."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from ..hardware import Collective, Hardware

TWO_STAGE = {
    Collective.ALL_GATHER: Collective.TWO_STAGE_ALL_GATHER,
    Collective.REDUCE_SCATTER: Collective.TWO_STAGE_REDUCE_SCATTER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A communication group: every rank of the world is in one such group, all run at once."""

    size: int
    node_crossings: int
    """Hops of the ring that leave a node."""
    sharing: int
    """Groups that leave the same node at once and share its outer link."""


def shard_ring(hardware: Hardware, shard_size: int) -> Ring:
    """Return the groups of `shard_size` neighbouring ranks: one copy of a unit's parameters."""
    return _ring(hardware.devices_per_node, hardware.world_size, shard_size, neighbours=True)


def replicate_ring(hardware: Hardware, shard_size: int) -> Ring:
    """Return the groups of the ranks that hold the same shard: every `shard_size`-th rank."""
    return _ring(hardware.devices_per_node, hardware.world_size, shard_size, neighbours=False)


def between_ring(hardware: Hardware, shard_size: int, stage_size: int) -> Ring:
    """Return the groups between nodes of collectives in two stages: ranks of the same place in nodes of `stage_size`."""
    return _ring(hardware.devices_per_node, shard_size, stage_size, neighbours=False)


def sharded_seconds(
    hardware: Hardware, collective: Collective, shard_size: int, stage_size: int, nbytes: int, sent_bytes: int | None = None
) -> float:
    """Return the seconds of an all-gather or reduce-scatter of `nbytes` of whole tensor among `shard_size` ranks.

    It runs in one stage (`stage_size=1`), or in two, one after the other: between nodes, and among `stage_size` ranks of a node. What is
    sent in fewer bits, of two stages between nodes alone, has `sent_bytes` there.
    """
    if stage_size == 1:
        return collective_seconds(hardware, collective, shard_ring(hardware, shard_size), nbytes if sent_bytes is None else sent_bytes)
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
    """Return the slowest of the groups of `size` neighbours, or of every `size`-th rank: most hops between nodes, fullest outer link."""
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
    rate = hardware.intra_node.bytes_per_s
    if ring.node_crossings:
        share = hardware.inter_node.bytes_per_s / ring.sharing
        rate = share if ring.node_crossings == ring.size else min(rate, share)
    return latency + hops / ring.size * nbytes / rate
