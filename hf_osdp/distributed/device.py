"""The GPU of this process, and torch's allocator on it, which uses expandable segments unless the user chose
otherwise.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from .launcher import number, set_variable, variable

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch 2.11 to 2.13 read both, the second for compatibility (c10/core/AllocatorConfig.cpp,
c10/cuda/CUDAAllocatorConfig.cpp).
"""
_EXPANDABLE = "expandable_segments"


def own_gpu() -> torch.device:
    """Return this process's GPU, and make it torch's current device.

    It is the process group's device (`init_process_group(device_id=...)`, which does not change torch's current
    device), if set. Else it is torch's current device if a group exists or the current device is not the first; else
    `LOCAL_RANK` modulo the number of GPUs that this process sees, since a launcher may show it only one.
    """
    current = torch.cuda.current_device()
    bound = getattr(dist.group.WORLD, "bound_device_id", None) if dist.is_initialized() else None
    if bound is not None:
        chosen = bound.index
    elif current or dist.is_initialized():
        chosen = current
    else:
        chosen = number("LOCAL_RANK") % torch.cuda.device_count()
    if chosen != current:
        torch.cuda.set_device(chosen)
    return torch.device("cuda", chosen)


def prefer_expandable_segments() -> None:
    """Switch on expandable segments of torch's CUDA allocator, unless the user set `expandable_segments` or chose
    another allocator.

    FSDP2's buffers and parameters differ in size from unit to unit; in expandable segments they leave few gaps
    (docs/estimates.md). Child processes inherit the setting. If CUDA is in use already, as after
    `TrainingArguments()`, segments that torch has reserved stay as they are, and new ones expand. Do nothing without
    CUDA or on another system than Linux.
    """
    settings = _allocator_settings()
    chosen = _EXPANDABLE in settings or settings.get("backend", "native") != "native"
    if chosen or torch.version.cuda is None or sys.platform != "linux":
        return
    name = next((name for name in reversed(_VARIABLES) if variable(name)), _VARIABLES[0])
    text = f"{variable(name)},{_EXPANDABLE}:True".lstrip(",")
    torch._C._accelerator_setAllocatorSettings(text)  # torch reads the variable only when it is imported
    set_variable(name, text)


def has_fixed_segments() -> bool:
    """Return whether this process's CUDA allocator has segments that do not expand, after
    `prefer_expandable_segments`.
    """
    settings = _allocator_settings()
    if settings.get("backend", "native") != "native":
        return False
    if settings.get(_EXPANDABLE) != "True":
        return True
    return torch.cuda.is_initialized() and not all(
        segment["is_expandable"] for segment in torch.cuda.memory_snapshot()
    )


def free_workspaces(device: torch.device) -> int:
    """Free the workspaces that torch keeps in its allocator for cuBLAS and cuBLASLt, and return their bytes; the next
    matrix products allocate them again. Plans count them as memory that the device reserves. Free none where CUDA
    graphs were captured, which may use them when they are replayed.
    """
    if any(segment["segment_pool_id"] != (0, 0) for segment in torch.cuda.memory_snapshot()):
        return 0
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()  # no public call; torch 2.11 to 2.13, used by its CUDA graphs
    return before - torch.cuda.memory_allocated(device)


def _allocator_settings() -> dict[str, str]:
    """Return the allocator's settings by name: from environment variables and, since torch 2.13, from calls."""
    texts = [variable(name) for name in _VARIABLES]
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # torch 2.13
        texts.append(torch._C._accelerator_getAllocatorSettings())
    return dict(part.split(":", 1) for text in texts for part in text.replace(" ", "").split(",") if ":" in part)
