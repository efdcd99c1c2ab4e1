"""Norm, clipping and loss scaling of gradients on different meshes and devices, for which torch's own functions are
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from ..distributed.mesh import collective_device, world_size
from ..modeling.replaced import replaced

_Layouts: TypeAlias = dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]]
"""Local parts of gradients by how many shards they have, their device and dtype."""


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
    layouts = _by_layout(grads)
    value, dtype = _local_power(layouts, norm_type), torch.float32
    for _, _, own in layouts:
        dtype = torch.promote_types(dtype, own)
    if world_size() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return (value if math.isinf(norm_type) else value.pow(1.0 / norm_type)).to(dtype)


def _by_layout(grads: Iterable[torch.Tensor]) -> _Layouts:
    """Return this rank's parts of gradients by the number of shards, device and dtype."""
    sizes: dict[tuple[int, Any], int] = {}
    layouts: _Layouts = {}
    for grad in [*grads]:  # all at once, so that the ids of meshes stay theirs
        part, size = grad, 1
        if isinstance(grad, DTensor):
            part, spec = grad._local_tensor, grad._spec
            layout = id(spec.mesh), spec.placements
            if layout not in sizes:
                sizes[layout] = shard_size(grad)
            size = sizes[layout]
        layouts.setdefault((size, part.device, part.dtype), []).append(part)
    return layouts


def _local_power(layouts: _Layouts, norm_type: float) -> torch.Tensor:
    """Return this rank's part of the sum in `total_norm`: a 0-d tensor of float64, on the device that communicates.

    Empty shards are left out, because torch's infinity norm raises for them.
    """
    device = collective_device() if world_size() > 1 else _main_device(layouts)
    value = torch.zeros((), dtype=torch.float64, device=device)
    for (shards, _, dtype), parts in layouts.items():
        if not (parts := [part for part in parts if part.numel()]):
            continue
        own = torch._foreach_norm(parts, norm_type, dtype=torch.promote_types(dtype, torch.float32))
        norms = torch.stack(own).double().to(device)
        if math.isinf(norm_type):
            value = torch.maximum(value, norms.max())
        else:
            value = value + norms.pow(norm_type).sum() * (shards / world_size())
    return value


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients in place to a norm of at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`; return the
    norm before. Collective if parameters are sharded.
    """
    clip_across_meshes()
    return clip_grad.clip_grad_norm_(parameters, max_norm, norm_type)


def clip_across_meshes() -> None:
    """Let `torch.nn.utils.clip_grad_norm_` clip shards by our `total_norm`, also on several meshes and beside whole
    tensors.

    torch stacks the norms of all gradients, and scales them by one list operator; both fail on several meshes ("must
    have the same mesh"; read in torch 2.11 to 2.13). It has no hook, and a script may hold `clip_grad_norm_` already,
    so the two functions that it calls are wrapped.
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
        if any(isinstance(grad, DTensor) for grad in grads):
            grads = [total_norm(grads, norm_type)]
        return stock_norm(grads, norm_type, error_if_nonfinite, foreach)

    def scale(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        held: Any = [SimpleNamespace(grad=local(each.grad)) for each in parameters if each.grad is not None]
        stock_scale(held, max_norm, total_norm, foreach)  # torch reads nothing else of them

    clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = norm_of, scale


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its storage."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _main_device(layouts: _Layouts) -> torch.device:
    """Return the accelerator if a gradient is on one, else the CPU: only some units are on the host."""
    return next((device for _, device, _ in layouts if device.type != "cpu"), torch.device("cpu"))


def shard_size(tensor: torch.Tensor) -> int:
    """Return over how many ranks a tensor is sharded; the other ranks have replicas."""
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(
        tensor.device_mesh.size(axis) for axis, placement in enumerate(tensor.placements) if placement.is_shard()
    )


class OSDPGradScaler(torch.amp.GradScaler):
    """A `GradScaler` with which all ranks skip the same steps.

    torch's own reduces `found_inf` over the mesh of the first gradient only: with units on different meshes some ranks
    would step and others skip. Here local shards are checked and unscaled, and `found_inf` is the maximum over the
    world.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step or skip, like torch's scaler.

        Gradients are unscaled before a fused step too: for those on the host torch would copy the scale without
        waiting for the copy, and the step could read what was in that memory before.
        """
        with replaced(optimizer, _step_supports_amp_scaling=False):
            return super().step(optimizer, *args, **kwargs)

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Implement torch's hook behind `unscale_` and `step`: return 0.0 or 1.0 on each device with gradients."""
        per_device = {found_inf.device: found_inf.clone()}
        given = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        by_place: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for grad in map(local, filter(torch.is_tensor, given)):
            by_place.setdefault((grad.device, grad.dtype), []).append(grad)
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype in by_place):
            raise ValueError(
                "Gradients in float16 cannot be unscaled; keep parameters in float32 and set mixed_precision=fp16."
            )
        for (device, _), grads in by_place.items():
            flag = per_device.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
        if world_size() > 1:
            worst = torch.stack([flag.to(collective_device()) for flag in per_device.values()]).max()
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            for flag in per_device.values():
                flag.copy_(worst)
        return per_device
