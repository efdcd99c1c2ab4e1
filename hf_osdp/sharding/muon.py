"""torch's Muon on shards: each rank updates its own rows by the whole orthogonal update, for which momentum is gathered once, in bf16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from ..distributed.collectives import gather_rows
from ..planner.job import OptimizerSpec, OptimizerStep
from .gradients import local


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is torch's own Muon; a subclass may do something else.

    Without Nesterov, torch's overwrites momentum in bf16 by the update (`Tensor.bfloat16` copies nothing there), which shards do not.
    """
    if type(optimizer) is not torch.optim.Muon:
        return False
    groups = (group for group in optimizer.param_groups if not group["nesterov"])
    return all(getattr(parameter, "dtype", None) != torch.bfloat16 for group in groups for parameter in group["params"])


def spec_of_muon(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return what torch's Muon holds: momentum, and temporaries of those matrices that it was given."""
    shapes = {tuple(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]}
    return OptimizerSpec(name="muon", states=1, step=OptimizerStep.FOR_LOOP, loop_scratch=0.0, matrices=tuple(sorted(shapes)))


@torch.no_grad()
def step_sharded(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Iterable[nn.Parameter]) -> None:
    """Take the step of a group's parameters that are sharded, as `torch.optim.Muon.step` does. Collective.

    Newton-Schulz begins with a cast to bf16, so that nothing is lost by a gather in bf16.
    """
    lr, momentum = float(group["lr"]), group["momentum"]
    for parameter in parameters:
        ranks = _sharing(parameter)
        if parameter.grad is None or ranks is None:
            continue
        shard, gradient, state = local(parameter), local(parameter.grad), optimizer.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(state["momentum_buffer"], momentum) if group["nesterov"] else state["momentum_buffer"]
        update = gather_rows(update.bfloat16(), parameter.shape[0], ranks)
        update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        first = ranks.rank() * -(-parameter.shape[0] // ranks.size())
        shard.mul_(1 - lr * group["weight_decay"])
        shard.add_(update[first : first + shard.shape[0]], alpha=-_adjust_lr(lr, group["adjust_lr_fn"], parameter.shape))


def is_shared(parameter: torch.Tensor) -> bool:
    """Return whether other ranks have rows of a matrix."""
    return _sharing(parameter) is not None


def _sharing(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that share a matrix by rows; None where this rank has all of it."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    return next((mesh.get_group(axis) for axis, place in enumerate(parameter.placements) if place.is_shard() and mesh.size(axis) > 1), None)
