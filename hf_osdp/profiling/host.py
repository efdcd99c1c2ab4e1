"""What lies beside a device: the host's memory, the link to it, and how fast its cores take optimizer steps."""

from __future__ import annotations

import torch

from ..collectives.topology import find_topology
from ..planner.hardware import HostSpec
from ..planner.job import OptimizerSpec
from .host_link import measure_host_link
from .rates import median_seconds
from .together import smallest, wait_for_all

_ELEMENTS = 2**25
"""Of the parameter that is updated: 128 MiB and three times that beside it, more than the caches of a server hold."""


def measure_host(device: torch.device, seconds: float) -> HostSpec | None:
    """The host beside this rank's device, all ranks at work at once. Collective.

    Args:
        device: the device; the CPU has no other memory beside it.
        seconds: about how long to measure.

    Returns:
        Rates of the slowest rank and an equal share of the least node's memory, the same on every rank; None on the CPU.
    """
    if device.type == "cpu":
        return None
    import psutil

    link = measure_host_link(device, seconds / 2)
    share = psutil.virtual_memory().available // find_topology().ranks_per_node
    memory, rate = smallest([share, update_rate(device, seconds / 2)], device)
    return HostSpec(
        memory_bytes=int(memory),
        to_device_bytes_per_s=link.to_device_bytes_per_s,
        to_host_bytes_per_s=link.to_host_bytes_per_s,
        update_bytes_per_s=rate,
        source="measured",
    )


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
