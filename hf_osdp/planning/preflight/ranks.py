"""What this process sees of its device, and what all ranks found together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from ...distributed.device import own_gpu
from ...distributed.topology import find_topology
from ...distributed.waiting import waiting_group
from ...measurement.memory_limits import memory_limits, tightest
from ...planner.hardware import DeviceSpec
from .devices import DeviceMemory, native_bf16
from .findings import Finding, refuse_errors


def device_memory(device_type: str, model: nn.Module | None = None) -> DeviceMemory | None:
    """The memory of this rank's device now; None where a plan is made for a device that is not here. Collective.

    Args:
        device_type: `"cpu"` or `"cuda"`.
        model: what of it lies on the CPU is this process's, and each other rank's of the node.
    """
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return None
        device = own_gpu()
        free, total = torch.cuda.mem_get_info(device)
        name = f"{torch.cuda.get_device_name(device)} {device.index}"
        return DeviceMemory(name=name, total_bytes=total, free_bytes=free, own_bytes=torch.cuda.memory_reserved(device))
    memory, ranks = tightest(memory_limits()), find_topology().ranks_per_node
    parameters = () if model is None else model.parameters()
    held = sum(p.numel() * p.element_size() for p in parameters if p.device.type == "cpu")
    return DeviceMemory(name="cpu", total_bytes=memory.total_bytes, free_bytes=memory.free_bytes, own_bytes=ranks * held, sharing=ranks)


def bf16_on(device: DeviceSpec | None, device_type: str) -> str | None:
    """The device's name where it computes bfloat16 natively; asked of torch where no rates are known."""
    if device is not None:
        return device.name if native_bf16(device) else None
    if device_type == "cuda" and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.cuda.get_device_name(own_gpu())
    return None


def agreed(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """What all ranks found, each thing once: rank 0's words, else those of the first that found it. Collective.

    Args:
        findings: this rank's.

    Returns:
        The same on every rank, errors excepted.

    Raises:
        PreflightError: there is an error among them; the same line on every rank.
    """
    by_rank: list[Sequence[Finding]] = [tuple(findings)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        by_rank = [()] * dist.get_world_size()
        dist.all_gather_object(by_rank, tuple(findings), group=waiting_group())
    first: dict[tuple[object, object], Finding] = {}
    for rank, found in enumerate(by_rank):
        for finding in found:
            said = finding if rank == 0 else replace(finding, message=f"On rank {rank}: {finding.message}")
            first.setdefault((finding.check, finding.severity), said)
    refuse_errors(first.values())
    return tuple(first.values())
