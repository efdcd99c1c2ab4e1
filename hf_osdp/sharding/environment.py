"""Process group, device and precision of a plain loop."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..distributed.device import own_gpu
from ..distributed.process_group import check_ranks
from ..modeling.batch_norm import has_running_statistics
from ..planner.description import DType
from ..planner.job import Precision
from .apply import default_device_type

_log = logging.getLogger(__name__)


def form_process_group(*, needed: bool) -> None:
    """Form the process group that torchrun's variables describe; where they are not set, one of this process if `needed`.

    Raises:
        LaunchError: ranks are missing, or run different versions.
    """
    check_ranks()
    if dist.is_initialized():
        training_device()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        own_gpu()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    elif needed:
        # Mixed precision is FSDP2's, with one process as with many.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def training_device() -> torch.device:
    """This process's device, made the current one: CUDA where the process group moves CUDA tensors or, without one, where there is CUDA."""
    device_type = default_device_type() if dist.is_initialized() else ("cuda" if torch.cuda.is_available() else "cpu")
    return own_gpu() if device_type == "cuda" else torch.device("cpu")


def hold_master_weights(model: nn.Module, precision: Precision) -> None:
    """Trainable parameters in float32 where training computes in less: the optimizer updates those. Statistics of their batch norms too."""
    if precision.compute not in (DType.BFLOAT16, DType.FLOAT16):
        return
    half = (torch.bfloat16, torch.float16)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in half:
            parameter.data = parameter.data.float()
    for module in model.modules():
        if has_running_statistics(module, itself=True) and any(p.requires_grad for p in module.parameters()):
            for name, buffer in module.named_buffers():
                if buffer.dtype in half:
                    module._buffers[name] = buffer.float()


def prepare_model(model: nn.Module, precision: Precision) -> None:
    """What training changes in a model before it is described: master weights in float32, and no cache of keys and values.

    The cache is for generation; in training it only takes memory. The Trainer
    switches it off, too.
    """
    hold_master_weights(model, precision)
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
        _log.info("%s.config.use_cache is now False: in training the cache of keys and values only takes memory.", type(model).__name__)


def mp_policy(precision: Precision) -> MixedPrecisionPolicy | None:
    """FSDP2's policy for a precision; None where each parameter keeps its dtype."""
    if precision.compute is None or precision.autocast:
        return None
    reduce = precision.reduce or precision.compute
    return MixedPrecisionPolicy(param_dtype=getattr(torch, precision.compute.value), reduce_dtype=getattr(torch, reduce.value))
