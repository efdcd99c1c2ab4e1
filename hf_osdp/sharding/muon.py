"""torch's Muon on shards: momentum is gathered in bf16, and each rank computes the whole orthogonal update and
applies its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from ..distributed.collectives import gather_rows
from ..planner.training_job import OptimizerSpec, OptimizerStep
from .gradients import local


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is torch's own Muon; a subclass may do something else.

    Return False for bf16 without Nesterov: there torch's overwrites the momentum with the update (`Tensor.bfloat16`
    makes no copy).
    """
    if type(optimizer) is not torch.optim.Muon:
        return False
    groups = (group for group in optimizer.param_groups if not group["nesterov"])
    return all(
        getattr(parameter, "dtype", None) != torch.bfloat16 for group in groups for parameter in group["params"]
    )


def spec_of_muon(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return what torch's Muon holds: momentum, and temporaries for its matrices."""
    shapes = {tuple(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]}
    return OptimizerSpec(
        name="muon", states=1, step=OptimizerStep.FOR_LOOP, loop_scratch=0.0, matrices=tuple(sorted(shapes))
    )


@torch.no_grad()
def step_sharded(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Iterable[nn.Parameter]) -> None:
    """Step a group's sharded parameters as `torch.optim.Muon.step` does. Collective.

    Newton-Schulz begins with a cast to bf16, so that a gather in bf16 loses nothing.
    """
    lr, momentum = float(group["lr"]), group["momentum"]
    for parameter in parameters:
        shard_group = _shard_group(parameter)
        if parameter.grad is None or shard_group is None:
            continue
        shard, gradient, state = local(parameter), local(parameter.grad), optimizer.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(state["momentum_buffer"], momentum) if group["nesterov"] else state["momentum_buffer"]
        update = gather_rows(update.bfloat16(), parameter.shape[0], shard_group)
        update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        first = shard_group.rank() * -(-parameter.shape[0] // shard_group.size())
        shard.mul_(1 - lr * group["weight_decay"])
        shard.add_(
            update[first : first + shard.shape[0]], alpha=-_adjust_lr(lr, group["adjust_lr_fn"], parameter.shape)
        )


def _shard_group(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the group over which a matrix is sharded by rows; None if this rank has all rows."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    return next(
        (
            mesh.get_group(axis)
            for axis, place in enumerate(parameter.placements)
            if place.is_shard() and mesh.size(axis) > 1
        ),
        None,
    )
