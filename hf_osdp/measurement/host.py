"""What lies beside a device: the host's memory, the link to it, and how fast its cores take optimizer steps."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..distributed.topology import find_topology
from ..planner.hardware import HostSpec
from ..planner.job import OptimizerSpec
from .host_link import measure_host_link
from .machine_memory import memory_limits, rank_share
from .rates import median_seconds
from .synchronize import distributed, smallest, wait_for_all

_ELEMENTS = 2**25
"""Of the parameter that is updated: 128 MiB and three times that beside it, more than the caches of a server hold."""


def measure_host(device: torch.device, seconds: float) -> HostSpec | None:
    """The host beside this rank's device, all ranks at work at once. Collective.

    Args:
        device: the device; the CPU has no other memory beside it.
        seconds: about how long to measure.

    Returns:
        Rates of the slowest rank and the least share of a machine's memory, the same on every rank; None on the CPU.
    """
    if device.type == "cpu":
        return None
    link = measure_host_link(device, seconds / 2)
    share, where = memory_of_rank()
    memory, rate = smallest([share, update_rate(device, seconds / 2)], device)
    return HostSpec(
        memory_bytes=int(memory),
        to_device_bytes_per_s=link.to_device_bytes_per_s,
        to_host_bytes_per_s=link.to_host_bytes_per_s,
        update_bytes_per_s=rate,
        source=f"measured; memory: {where}",
    )


def memory_of_rank() -> tuple[int, str]:
    """This rank's share of its machine's memory, and where that comes from, which is rank 0's. Collective."""
    limits, local = memory_limits(), find_topology().ranks_per_node
    names = [limit.name for limit in limits]
    everyone = [names]
    first = 0
    if distributed():
        everyone = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, names)
        first = dist.get_rank() // local * local
    share, where = rank_share(limits, everyone[first : first + local])
    said = [where]
    if distributed():
        dist.broadcast_object_list(said, src=0)
    return share, said[0]


def update_rate(device: torch.device, seconds: float, *, elements: int = _ELEMENTS) -> float:
    """Bytes that a fused AdamW step on this process's cores reads and writes each second, with the threads that torch has.

    Args:
        device: whose ranks start together.
        seconds: about how long to measure.
        elements: of the parameter, in float32.
    """
    parameter = torch.nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.zeros(elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # makes the states
    wait_for_all(device)
    taken_s = median_seconds(optimizer.step, torch.device("cpu"), seconds)
    return OptimizerSpec().traffic_per_element * parameter.nbytes / taken_s
