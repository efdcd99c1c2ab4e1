"""Norm, clipping and loss scaling of gradients on different meshes and devices, for which torch's own functions are
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad, clip_grads_with_norm_

from ..distributed.mesh import collective_device, world_size


@torch.no_grad()
def total_norm(grads: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients as one vector, each element counted once.

    Collective: one all-reduce.

    A gradient in s shards on W ranks is held W/s times, so

        norm^p = sum over ranks of sum over gradients of (s / W) * |local shard|_p^p

    and for p = inf the largest local norm. The sum is computed in float64.

    Gradients are DTensors on any meshes that span all ranks, or plain tensors that are equal on every rank; on the
    device or on the host. A rank whose shard is empty takes part. The norm is a 0-d tensor, equal on every rank, in
    their widest dtype (at least float32).
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive; use 1, 2 or inf.")
    grads = list(grads)
    value, dtype = _local_power(grads, norm_type), torch.float32
    for grad in grads:
        dtype = torch.promote_types(dtype, grad.dtype)
    if world_size() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return (value if math.isinf(norm_type) else value.pow(1.0 / norm_type)).to(dtype)


def _local_power(grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return this rank's part of the sum in `total_norm`: a 0-d tensor of float64, on the device that communicates."""
    device = collective_device() if world_size() > 1 else _main_device(grads)
    groups: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
    for grad in grads:
        groups.setdefault((shard_size(grad), local(grad).device), []).append(local(grad))
    value = torch.zeros((), dtype=torch.float64, device=device)
    for (shards, _), locals_ in groups.items():
        norms = torch.stack([_norm(tensor, norm_type).double() for tensor in locals_]).to(device)
        if math.isinf(norm_type):
            value = torch.maximum(value, norms.max())
        else:
            value = value + norms.pow(norm_type).sum() * (shards / world_size())
    return value


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients in place to a norm of at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`; return the
    norm before. Collective.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = total_norm((parameter.grad for parameter in parameters if parameter.grad is not None), norm_type)
    clip_grads_with_norm_(_with_local_gradients(parameters), max_norm, norm)
    return norm


def clip_across_meshes() -> None:
    """Let `torch.nn.utils.clip_grad_norm_` clip gradients on several meshes, or shards beside whole tensors, by our
    `total_norm`.

    torch stacks the norms of all gradients, and scales them by one list operator; both fail for those ("must have the
    same mesh"; read in torch 2.11 to 2.13). It has no hook, and a script may hold `clip_grad_norm_` already, so the
    two functions that it calls are wrapped.
    """
    stock_norm, stock_scale = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    if stock_norm.__module__ == __name__:
        return

    def norm_of(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len({grad.device_mesh if isinstance(grad, DTensor) else None for grad in grads}) > 1:
            grads = [total_norm(grads, norm_type)]
        return stock_norm(grads, norm_type, error_if_nonfinite, foreach)

    def scale(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not isinstance(total_norm, DTensor):
            parameters = _with_local_gradients(parameters)
        stock_scale(parameters, max_norm, total_norm, foreach)

    clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = norm_of, scale


def _with_local_gradients(parameters: Iterable[torch.Tensor]) -> Any:  # noqa: ANN401
    """Return what torch's functions take for parameters; their gradients are those parts of a rank."""
    return [SimpleNamespace(grad=local(parameter.grad)) for parameter in parameters if parameter.grad is not None]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its storage."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _main_device(grads: Sequence[torch.Tensor]) -> torch.device:
    """Return the accelerator if a gradient is on one, else the CPU: only some units are on the host."""
    return next((local(grad).device for grad in grads if local(grad).device.type != "cpu"), torch.device("cpu"))


def shard_size(tensor: torch.Tensor) -> int:
    """Return over how many ranks a tensor is sharded; the other ranks have replicas."""
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(
        tensor.device_mesh.size(axis) for axis, placement in enumerate(tensor.placements) if placement.is_shard()
    )


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of one local tensor; 0 if it is empty, because torch's infinity norm raises then."""
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(tensor, norm_type, dtype=torch.promote_types(tensor.dtype, torch.float32))


class OSDPGradScaler(torch.amp.GradScaler):
    """A `GradScaler` with which all ranks skip the same steps.

    torch's own reduces `found_inf` over the mesh of the first gradient only: with units on different meshes some ranks
    would step and others skip. Here local shards are checked and unscaled, and `found_inf` is the maximum over the
    world. Optimizers that unscale by themselves (`fused=True`) get the same `found_inf`.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step or skip, like torch's scaler.

        If gradients are on two devices, they are unscaled before a fused step too: torch would copy the scale to the
        host without waiting for the copy, and the step on the host could read what was in that memory before.
        """
        unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not unscales or len({device for device, _ in _local_grads(optimizer, allow_fp16=True)}) < 2:
            return super().step(optimizer, *args, **kwargs)
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._step_supports_amp_scaling = unscales  # type: ignore[attr-defined]

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Implement torch's hook behind `unscale_` and `step`: return 0.0 or 1.0 on each device with gradients."""
        per_device = {found_inf.device: found_inf.clone()}
        for (device, _), grads in _local_grads(optimizer, allow_fp16=allow_fp16).items():
            flag = per_device.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
        if world_size() > 1:
            worst = torch.stack([flag.to(collective_device()) for flag in per_device.values()]).max()
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            for flag in per_device.values():
                flag.copy_(worst)
        return per_device


def _local_grads(
    optimizer: torch.optim.Optimizer, *, allow_fp16: bool
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    grads: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            grad = local(parameter.grad)
            if grad.dtype is torch.float16 and not allow_fp16:
                raise ValueError(
                    "Gradients in float16 cannot be unscaled; keep parameters in float32 and set mixed_precision=fp16."
                )
            grads.setdefault((grad.device, grad.dtype), []).append(grad)
    return grads
