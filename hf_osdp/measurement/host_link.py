"""How fast bytes move between the host's memory and the device."""

from __future__ import annotations

import torch

from ..planner.profile import HostLink
from .rates import median_seconds
from .synchronize import smallest, wait_for_all

_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""More than the caches hold."""


def measure_host_link(device: torch.device, seconds: float) -> HostLink:
    """Rates of copies from pinned host memory to the device and back, on all ranks at once. Collective.

    Args:
        device: the device; on the CPU both are a copy in memory.
        seconds: about how long to measure, both directions together.

    Returns:
        Bytes a second in each direction, of the slowest rank.
    """
    nbytes = _BYTES[device.type]
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((there, host), (host, there)):
        wait_for_all(device)
        taken_s = median_seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True), device, seconds / 2)
        rates.append(nbytes / taken_s)
    to_device, to_host = smallest(rates, device)
    return HostLink(to_device_bytes_per_s=to_device, to_host_bytes_per_s=to_host)
