"""Which GPU is this process's: the one place that chooses."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..quantities import whole_number


def own_gpu() -> torch.device:
    """Return this process's GPU, and make it torch's current one.

    It is the process group's own (`init_process_group(device_id=...)`, which leaves torch's current device as it is). Without one it is
    torch's current device, where a group exists or another device than the first was chosen; else that of `LOCAL_RANK`, counted round
    the GPUs that this process sees, of which a launcher may show it one.

    Raises:
        ValueError: `LOCAL_RANK` is not a number.
    """
    current = torch.cuda.current_device()
    bound = getattr(dist.group.WORLD, "bound_device_id", None) if dist.is_initialized() else None
    if bound is not None:
        chosen = bound.index
    elif current or dist.is_initialized():
        chosen = current
    else:
        chosen = whole_number(os.environ, "LOCAL_RANK", 0) % torch.cuda.device_count()
    if chosen != current:
        torch.cuda.set_device(chosen)
    return torch.device("cuda", chosen)
