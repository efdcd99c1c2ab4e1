"""NCCL communicators of a plan: each holds memory on the device, so that every mesh that a plan forms has its price.

`Meshes.prepare` (distributed/mesh.py) forms a mesh for each shard size g of W ranks, and for stages of s ranks within g:

    g = 1 or g = W          none: the axis over all ranks is the default process group, one rank alone needs none
    1 < g < W               2: one axis over the g ranks that share a copy, one over the W / g replicas
    stages of s             those of g = s, and where g < W 3 more: replicas, nodes and ranks of a node

`DeviceMesh._init_one_process_group` (torch 2.11 to 2.13) takes the default group for an axis over all ranks and forms one for
any other. NCCL takes a group's memory when it first communicates, or at once where the default group is bound to a device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

Mesh = tuple[int, int]
"""Shard size and stage size of one mesh; stage size 1 where it has none."""


@functools.lru_cache(maxsize=4096)
def meshes_of(shard_size: int, stage_size: int, world_size: int) -> frozenset[Mesh]:
    """Meshes that a layout needs and that have groups of their own."""
    sizes = {size for size in (shard_size, stage_size) if 1 < size < world_size}
    staged = {(shard_size, stage_size)} if 1 < stage_size < shard_size < world_size else set()
    return frozenset({(size, 1) for size in sizes} | staged)


def groups_in(meshes: Iterable[Mesh]) -> int:
    """Communicators that these meshes have beside that of all ranks."""
    return sum(2 if stage_size == 1 else 3 for _, stage_size in meshes)


def communicators_of(layouts: Iterable[tuple[int, int]], world_size: int) -> int:
    """Communicators of several ranks that a plan has on each rank, that of all ranks included.

    Args:
        layouts: shard size and stage size of each unit.
        world_size: ranks.
    """
    if world_size == 1:
        return 0
    return 1 + groups_in(frozenset().union(*(meshes_of(*layout, world_size) for layout in set(layouts))))
