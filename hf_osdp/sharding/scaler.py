"""Loss scaling where gradients lie on different meshes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..distributed.mesh import collective_device, world_size
from .clip import local


class OSDPGradScaler(torch.amp.GradScaler):
    """A `GradScaler` with which all ranks skip the same steps.

    torch's own reduces `found_inf` over the mesh of the first gradient only: with units on different meshes some ranks
    would step and others skip. Here local shards are checked and unscaled, and `found_inf` is the maximum over the world.
    Optimizers that unscale by themselves (`fused=True`) get the same `found_inf`.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step or skip, as torch's.

        Where gradients lie on two devices, gradients are unscaled before a fused step too: torch would copy the scale to the host
        without waiting for it, and the step there would read what was in that memory before.
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


def _local_grads(optimizer: torch.optim.Optimizer, *, allow_fp16: bool) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return this rank's shards of the gradients, by device and dtype."""
    grads: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            grad = local(parameter.grad)
            if grad.dtype is torch.float16 and not allow_fp16:
                raise ValueError("Gradients in float16 cannot be unscaled; keep parameters in float32 and set mixed_precision=fp16.")
            grads.setdefault((grad.device, grad.dtype), []).append(grad)
    return grads
