"""Equal weights on every rank, before they are sharded."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.mesh import collective_device, world_size
from ..errors import PlanMismatchError
from ..modeling.units import canonical_name


@torch.no_grad()
def broadcast_parameters(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers. Collective.

    Replicated and HSDP units only ever average gradients: replicas that start unequal stay unequal. Tensors that are on the meta
    device on any rank are left out on all; whoever loads them later makes them equal.

    Raises:
        PlanMismatchError: the ranks' models have tensors of other names, shapes or dtypes.
    """
    if world_size() == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    signature = repr([(canonical_name(name), tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named])
    mine = (hashlib.sha256(signature.encode()).hexdigest(), [tensor.is_meta for _, tensor in named])
    everyone = [mine] * world_size()
    dist.all_gather_object(everyone, mine)
    if different := [rank for rank, (other, _) in enumerate(everyone) if other != everyone[0][0]]:
        raise PlanMismatchError(
            f"The model on ranks {different} has other parameters or buffers than on rank 0; build the same model on every rank."
        )
    for (_, tensor), *on_meta in zip(named, *(flags for _, flags in everyone), strict=True):
        if tensor.numel() and not any(on_meta):
            _broadcast(tensor, collective_device())


def _broadcast(tensor: torch.Tensor, device: torch.device) -> None:
    """Send one tensor from rank 0 as bytes: backends differ in the dtypes that they know."""
    staged = tensor.detach().to(device).contiguous()
    dist.broadcast(staged.reshape(-1).view(torch.uint8), src=0)
    if staged.data_ptr() != tensor.data_ptr():
        tensor.copy_(staged)
