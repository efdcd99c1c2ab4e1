"""Which ranks share a node: found from the launcher's variables, agreed on by all ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import HardwareError
from .process_group import waiting_group

_found: WeakKeyDictionary[dist.ProcessGroup, Topology] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Equal nodes; ranks are numbered node by node."""

    nodes: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def find_topology() -> Topology:
    """Nodes of the process group, the same on every rank; without a process group there is one rank on one node.

    Collective the first time; it is found once for each process group.

    Raises:
        HardwareError: nodes hold different numbers of ranks, or a node's ranks are not numbered one after the other.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Topology(nodes=1, ranks_per_node=1)
    world = dist.group.WORLD
    assert world is not None
    if world not in _found:
        names = [""] * dist.get_world_size()
        dist.all_gather_object(names, node_name(), group=waiting_group())
        _found[world] = topology_of(names)
    return _found[world]


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """Return what tells this rank's node from others: torchrun's number of its agent there, else the host's name.

    Args:
        environment: variables to read; None reads this process's.
    """
    environment = os.environ if environment is None else environment
    if "GROUP_RANK" in environment and "LOCAL_WORLD_SIZE" in environment:
        return f"node {environment['GROUP_RANK']}"
    return socket.gethostname()


def topology_of(names: Sequence[str]) -> Topology:
    """Return the topology of ranks that lie on nodes of these names, in rank order.

    Raises:
        HardwareError: see `find_topology`.
    """
    runs = [(name, len(list(ranks))) for name, ranks in groupby(names)]
    if len(runs) != len(set(names)):
        split = next(name for name, _ in runs if sum(other == name for other, _ in runs) > 1)
        raise HardwareError(
            f"Ranks of {split} are not numbered one after the other; start the ranks of a node together (with srun:"
            " --distribution=block), because groups are neighbouring ranks."
        )
    counts = [count for _, count in runs]
    if len(set(counts)) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in runs)
        raise HardwareError(
            f"Nodes hold different numbers of processes ({listed}); start equally many on each, for example {min(counts)},"
            " because groups follow the nodes."
        )
    return Topology(nodes=len(runs), ranks_per_node=counts[0])
