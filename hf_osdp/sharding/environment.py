"""Process group, device and precision of a run that no Accelerator or Trainer sets up."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..distributed.device import own_gpu
from ..distributed.mesh import collective_device
from ..distributed.process_group import check_ranks
from ..modeling.wrapping import has_running_statistics
from ..planner.description import DType
from ..planner.job import Precision

_log = logging.getLogger(__name__)
_HALF = (torch.bfloat16, torch.float16)


def form_process_group(*, needed: bool) -> None:
    """Form the process group that the launcher's variables describe; where they are not set, one of this process if `needed`.

    Raises:
        LaunchError: ranks are missing, or run different versions.
    """
    check_ranks()
    device = training_device()
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    elif needed:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def training_device() -> torch.device:
    """Return this process's device and make it the current one: that of the process group, else CUDA where there is CUDA."""
    if dist.is_initialized():
        return collective_device()
    return own_gpu() if torch.cuda.is_available() else torch.device("cpu")


def prepare_model(model: nn.Module, precision: Precision) -> None:
    """Hold master weights in float32, and switch off the cache of keys and values, which only takes memory in training."""
    hold_master_weights(model, precision)
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "use_cache", False):
        config.use_cache = False
        _log.info("%s.config.use_cache is now False: in training the cache of keys and values only takes memory.", type(model).__name__)


def hold_master_weights(model: nn.Module, precision: Precision) -> None:
    """Hold trainable parameters in float32 where training computes in less, and the statistics of their batch norms too."""
    if precision.compute not in (DType.BFLOAT16, DType.FLOAT16):
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in _HALF:
            parameter.data = parameter.data.float()
    for module in model.modules():
        if has_running_statistics(module, itself=True) and any(p.requires_grad for p in module.parameters()):
            for name, buffer in module.named_buffers():
                if buffer.dtype in _HALF:
                    module._buffers[name] = buffer.float()


def mp_policy(precision: Precision) -> MixedPrecisionPolicy | None:
    """Return FSDP2's policy for a precision; None where each parameter keeps its dtype."""
    if precision.compute is None or precision.autocast:
        return None
    reduce = precision.reduce or precision.compute
    return MixedPrecisionPolicy(param_dtype=getattr(torch, precision.compute.value), reduce_dtype=getattr(torch, reduce.value))
