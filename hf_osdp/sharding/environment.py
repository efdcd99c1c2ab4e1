"""Process group, device and precision of a run without Accelerator or Trainer; parameters of units on the host."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..distributed.device import own_gpu
from ..distributed.launcher import variable
from ..distributed.mesh import collective_device, rank
from ..distributed.process_group import prepare_group
from ..errors import OSDPError
from ..modeling.build import disable_cache
from ..modeling.wrapping import has_running_statistics
from ..planner.description import DType
from ..planner.plan import Plan
from ..planner.training_job import Precision
from .host import host_parameters
from .replica_buckets import owners_of
from .replicas import is_under_plan

_log = logging.getLogger(__name__)
_HALF = (torch.bfloat16, torch.float16)


def form_process_group(*, needed: bool, device_type: str | None = None) -> None:
    """Form the process group that the launcher's variables describe; without them, form a group of one process if
    `needed`.
    """
    prepare_group()
    device = torch.device("cpu") if device_type == "cpu" else training_device()
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if variable("RANK") and variable("WORLD_SIZE"):
        dist.init_process_group(backend)
    elif needed:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def training_device() -> torch.device:
    """Return this process's device and make it the current one: the process group's device, else CUDA if available."""
    if dist.is_initialized():
        return collective_device()
    return own_gpu() if torch.cuda.is_available() else torch.device("cpu")


def prepare_to_plan(model: nn.Module) -> None:
    """Refuse a model that is under a plan, and detach the tensors that its modules hold from an earlier call, as
    `torch.nn.utils.prune` does: calls make new ones, and a model with a gradient's history cannot be copied.
    """
    if any(map(is_under_plan, model.modules())):
        raise OSDPError(
            f"{type(model).__name__} is under a plan, or sharded by FSDP2, already; go on with that, or load the model"
            " anew."
        )
    for module in model.modules():
        held = vars(module)
        held |= {name: v.detach() for name, v in held.items() if isinstance(v, torch.Tensor) and v.grad_fn is not None}


def prepare_model(model: nn.Module, precision: Precision) -> None:
    """Prepare for a plan and the precision, and disable the key-value cache, which only takes memory in training."""
    prepare_to_plan(model)
    prepare_precision(model, precision)
    if disable_cache(model):
        _log.info(
            "%s.config.use_cache is now False: the key-value cache only takes memory in training.",
            type(model).__name__,
        )


def prepare_precision(model: nn.Module, precision: Precision) -> None:
    """If the compute dtype has 16 bits, hold trainable parameters and the statistics of their batch norms in
    float32; log a warning if that changes parameters.
    """
    if precision.compute not in (DType.BFLOAT16, DType.FLOAT16):
        return
    rounded = [p for p in model.parameters() if p.requires_grad and p.dtype in _HALF]
    if rounded and rank() == 0:
        _log.warning(
            "%d trained parameters of the model in %s will be in float32, twice their memory, as mixed precision"
            " needs; to train them as they are, leave mixed precision (bf16, fp16) out.",
            len(rounded), " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in rounded})),
        )  # fmt: skip
    for parameter in rounded:
        parameter.data = parameter.data.float()
    for module in model.modules():
        if has_running_statistics(module, itself=True) and any(p.requires_grad for p in module.parameters()):
            for name, buffer in module.named_buffers():
                if buffer.dtype in _HALF:
                    module._buffers[name] = buffer.float()


def mp_policy(precision: Precision) -> MixedPrecisionPolicy | None:
    """Return FSDP2's policy for a precision; None if each parameter keeps its dtype."""
    if precision.compute is None or precision.autocast:
        return None
    reduce = precision.reduce or precision.compute
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute.value), reduce_dtype=getattr(torch, reduce.value)
    )


def uses_host(plan: Plan) -> bool:
    return any(unit.away for unit in plan.units)


@torch.no_grad()
def move_to_device(model: nn.Module, device: torch.device, *, empty: bool = False) -> nn.Module:
    """Move a model like `model.to(device)` (or `to_empty`), except units on the host, which FSDP2 refuses to train
    once moved.
    """
    host = {id(parameter) for parameter in host_parameters(model)}

    def move(tensor: torch.Tensor) -> torch.Tensor:  # torch passes the parameters themselves, so that `id` finds them
        target = torch.device("cpu") if id(tensor) in host else device
        if empty:
            return torch.empty_like(tensor, device=target)
        return tensor if tensor.device == target else tensor.to(target)

    return apply_tied(model, move)


def apply_tied(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Call `model._apply(fn)` and tie parameters again: torch makes one for each owner where `fn` changes the kind
    of tensor (to meta).
    """
    owners = [*owners_of(model).values()]
    model._apply(fn)
    for (first, leaf), *others in owners:
        for module, name in others:
            module._parameters[name] = first._parameters[leaf]
    return model
