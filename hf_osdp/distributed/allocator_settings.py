"""torch's allocator for CUDA: segments that expand, unless the user has said otherwise."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping

import torch

_log = logging.getLogger(__name__)
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch 2.11 to 2.13 read both, the second for compatibility (c10/core/AllocatorConfig.cpp, c10/cuda/CUDAAllocatorConfig.cpp)."""
_EXPANDABLE, _BACKEND = "expandable_segments", "backend"
_OWN_BACKEND = "native"


def prefer_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Have torch's allocator for CUDA expand its segments (`expandable_segments:True`), if nobody has set it or taken another allocator.

    FSDP2's buffers and parameters differ in size from unit to unit; in segments that expand they leave no gaps (docs/allocator.md).
    Other settings of the user's stay. Processes that this one starts find it set. Nothing happens where CUDA is initialised
    already, torch is built without CUDA, or the system is not Linux.

    Args:
        environment: where the variables are.

    Returns:
        Whether it was set by this call.
    """
    if torch.version.cuda is None or sys.platform != "linux" or torch.cuda.is_initialized():
        return False
    settings = allocator_settings(environment)
    if _EXPANDABLE in settings or settings.get(_BACKEND, _OWN_BACKEND) != _OWN_BACKEND:
        return False
    variable = next((name for name in reversed(_VARIABLES) if environment.get(name)), _VARIABLES[0])
    text = ",".join([*filter(None, [environment.get(variable)]), f"{_EXPANDABLE}:True"])
    torch._C._accelerator_setAllocatorSettings(text)  # the variable itself is read when torch is loaded
    environment[variable] = text
    _log.debug("%s=%s", variable, text)
    return True


def expands_segments(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether the allocator's segments expand in this process, as `TrainingJob.expandable_segments` takes it.

    On a machine without CUDA a plan is for a run elsewhere, which `prefer_expandable_segments` begins.
    """
    setting = allocator_settings(environment).get(_EXPANDABLE)
    if setting is not None:
        return setting == "True"
    return torch.version.cuda is None or not torch.cuda.is_initialized()


def allocator_settings(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Return the allocator's settings by name: those of variables and, since torch 2.13, of calls."""
    texts = [environment.get(name, "") for name in _VARIABLES]
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # torch 2.13
        texts.append(torch._C._accelerator_getAllocatorSettings())
    pairs = (part.split(":", 1) for text in texts for part in text.replace(" ", "").split(",") if ":" in part)
    return dict(pairs)
