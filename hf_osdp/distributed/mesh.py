"""Device meshes of a plan, the topology of nodes and ranks, and the device for collectives of the default process
group.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import HardwareError
from ..planner.decision import REPLICAS, WHOLE_WORLD, groups_of
from ..planner.plan import Plan
from ..planner.training_job import divisors
from .collectives import Stages
from .device import own_gpu
from .launcher import variables
from .process_group import all_gather_objects, host_barrier, own_timeout

REPLICATE_AXIS = "replicate"
SHARD_AXIS = "shard"
NODES_AXIS = "nodes"
Layout = tuple[int, int]
"""Stage size (1 for a single stage) and shard size."""
_topologies: WeakKeyDictionary[dist.ProcessGroup, Topology] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes with equally many ranks, which are numbered node by node."""

    nodes: int
    ranks_per_node: int


class Meshes:
    """Meshes of the default process group. Collective: all ranks call in the same order.

    Shard groups are neighbouring ranks, so that they stay inside a node if their size allows it.
    """

    def __init__(self, device_type: str) -> None:
        """Take `"cuda"` or `"cpu"`, as `init_device_mesh` does; raise ValueError without a process group."""
        if not dist.is_initialized():
            raise ValueError(
                "Meshes need a process group; start the program with torchrun, or call"
                " torch.distributed.init_process_group."
            )
        self.device_type = device_type
        self.world_size = dist.get_world_size()
        self._formed: dict[Layout, DeviceMesh] = {}
        self._replicas: dist.ProcessGroup | None = None
        self._is_shared = True
        """Whether the plan has replicas and units of FSDP2 over all ranks."""

    def mesh(self, shard_size: int) -> DeviceMesh:
        """Return the mesh whose shard axis has `shard_size` ranks: (W,) if all W ranks shard, else (W / shard_size,
        shard_size).
        """
        return self._mesh((1, shard_size), mesh_axes(self.world_size, shard_size))

    def stages(self, shard_size: int, stage_size: int) -> Stages:
        """Return this rank's groups between nodes of `stage_size` ranks and inside its node, for collectives over
        `shard_size` ranks.
        """
        axes = stage_axes(self.world_size, shard_size, stage_size)
        nodes = self.mesh(stage_size)
        if (
            shard_size == self.world_size
        ):  # the replicas of a node group are the ranks with the same number in each node
            return Stages(between=nodes.get_group(REPLICATE_AXIS), within=nodes.get_group(SHARD_AXIS))
        return Stages(
            between=self._mesh((stage_size, shard_size), axes).get_group(NODES_AXIS),
            within=nodes.get_group(SHARD_AXIS),
        )

    def replicas(self) -> dist.ProcessGroup:
        """Return the group of all ranks for replicated units: one of their own beside units of FSDP2 that use the
        default group, because their reductions keep an order of their own.
        """
        if not self._is_shared:
            return dist.distributed_c10d._get_default_group()
        if self._replicas is None:
            host_barrier()
            self._replicas = dist.new_group(timeout=own_timeout())
        return self._replicas

    def prepare(self, plan: Plan) -> None:
        """Make all meshes that the plan needs, in the same order on every rank. Collective."""
        for stage_size, shard_size in sorted(self._needed(plan)):
            if stage_size == 1:
                self.mesh(shard_size)
            else:
                self.stages(shard_size, stage_size)
        used = {group for unit in plan.units for group in groups_of(unit, self.world_size)}
        self._is_shared = {REPLICAS, WHOLE_WORLD} <= used
        if self._is_shared:
            self.replicas()

    def _mesh(self, layout: Layout, axes: dict[str, int]) -> DeviceMesh:
        if layout not in self._formed:
            host_barrier()
            mesh = init_device_mesh(self.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
            for group in mesh.get_all_groups():  # torch forms them with its default timeout
                c10d._set_pg_timeout(own_timeout(), group)
            self._formed[layout] = mesh
        return self._formed[layout]

    def _needed(self, plan: Plan) -> set[Layout]:
        staged = {(unit.stage_size, unit.shard_size) for unit in plan.units if unit.two_stage}
        sizes = {plan.world_size, *(unit.shard_size for unit in plan.units), *(stage_size for stage_size, _ in staged)}
        return staged | {(1, size) for size in sizes}


def mesh_axes(world_size: int, shard_size: int) -> dict[str, int]:
    """Return the axes of a mesh and their sizes; the last axis varies fastest with the rank. See `Meshes.mesh`."""
    if shard_size < 1 or world_size % shard_size:
        sizes = ", ".join(map(str, divisors(world_size)))
        raise ValueError(f"shard_size={shard_size} does not divide the world size {world_size}; use {sizes}.")
    if shard_size == world_size:
        return {SHARD_AXIS: world_size}
    return {REPLICATE_AXIS: world_size // shard_size, SHARD_AXIS: shard_size}


def stage_axes(world_size: int, shard_size: int, stage_size: int) -> dict[str, int]:
    """Return the axes of the mesh for collectives in two stages; sizes are those of a `UnitDecision`.

    See `Meshes.stages`.
    """
    return {REPLICATE_AXIS: world_size // shard_size, NODES_AXIS: shard_size // stage_size, SHARD_AXIS: stage_size}


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the default process group; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def collective_device() -> torch.device:
    """Return the device that tensors need for a collective of the default process group."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return own_gpu()
    return torch.device("cpu")


def find_topology() -> Topology:
    """Return the nodes of the process group, the same on every rank; without a process group there is one rank on one
    node.

    Nodes are distinguished by the number of torchrun's agent, else by the host's name. Cached for each process group;
    collective on first use. Errors are those of `topology_of`.
    """
    if (world := dist.group.WORLD) is None:
        return Topology(nodes=1, ranks_per_node=1)
    if world not in _topologies:
        set_here = variables()
        by_torchrun = "LOCAL_WORLD_SIZE" in set_here and "GROUP_RANK" in set_here
        _topologies[world] = topology_of(
            all_gather_objects(f"node {set_here['GROUP_RANK']}" if by_torchrun else socket.gethostname())
        )
    return _topologies[world]


def topology_of(names: Sequence[str]) -> Topology:
    """Return the topology from each rank's node name; raise HardwareError if nodes have unequal or non-consecutive
    ranks.
    """
    runs = [(name, len(list(ranks))) for name, ranks in groupby(names)]
    if len(runs) != len(set(names)) or len({count for _, count in runs}) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in runs)
        raise HardwareError(
            f"Nodes have different numbers of processes, or processes that are not numbered consecutively ({listed});"
            " start equally many on each, together (with srun: --distribution=block), because groups are neighbouring"
            " ranks."
        )
    return Topology(nodes=len(runs), ranks_per_node=runs[0][1])
