"""What this machine is, as far as `hf-osdp doctor` can tell without a start."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from ..planner.hardware import Backend, Hardware
from ..planning.preflight.devices import DeviceMemory
from ..quantities import format_bytes

_PACKAGES = ("torch", "accelerate", "transformers")


def machine_line() -> str:
    """Versions, devices, and what carries collectives here."""
    import torch
    import torch.distributed as dist

    from ..measurement.memory_limits import memory_limits, tightest

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = f"{len(cuda)} x {', '.join(dict.fromkeys(cuda))}" if cuda else "no CUDA device"
    carriers = [name for name, there in {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}.items() if there]
    memory = tightest(memory_limits())
    return (
        f"Python {platform.python_version()}, {versions}; {devices}; {' and '.join(carriers)}; {os.cpu_count()} cores, "
        f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} free"
    )


def memory_here(hardware: Hardware) -> DeviceMemory | None:
    """The fullest device of this machine, of the kind that is planned for; None where none is here.

    Args:
        hardware: what is planned for. The CPU counts where one node is.
    """
    import torch

    if hardware.backend is Backend.NCCL:
        if not torch.cuda.is_available():
            return None
        free, total, index = min((*torch.cuda.mem_get_info(index), index) for index in range(torch.cuda.device_count()))
        return DeviceMemory(name=f"{torch.cuda.get_device_name(index)} {index}", total_bytes=total, free_bytes=free, own_bytes=0)
    if hardware.nodes > 1:
        return None
    from ..measurement.memory_limits import memory_limits, tightest

    memory, sharing = tightest(memory_limits()), hardware.devices_per_node
    return DeviceMemory(name="cpu", total_bytes=memory.total_bytes, free_bytes=memory.free_bytes, own_bytes=0, sharing=sharing)
