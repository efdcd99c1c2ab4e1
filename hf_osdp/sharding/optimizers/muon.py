"""torch's Muon on shards: momentum is gathered in bf16, and each rank computes the whole orthogonal update and
applies its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from ...distributed.collectives import gather_rows
from ...planner.optimizers import MUON, upper_bound
from ...planner.training_job import OptimizerSpec, OptimizerStep
from ..gradients import local
from .kind import ElementWise, Kind


class Muon(Kind):
    """torch's own Muon; a subclass may do something else.

    In bf16 without Nesterov a trial decides: there torch's overwrites the momentum with the update (`Tensor.bfloat16`
    makes no copy).
    """

    gathers = True

    @classmethod
    def includes(cls, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) is torch.optim.Muon and all(
            getattr(parameter, "dtype", None) != torch.bfloat16
            for group in optimizer.param_groups
            if not group["nesterov"]
            for parameter in group["params"]
        )

    def known(self, device_type: str = "cuda") -> OptimizerSpec:
        """Return the momentum, and temporaries for the matrices."""
        shapes = {tuple(parameter.shape) for group in self.optimizer.param_groups for parameter in group["params"]}
        return OptimizerSpec(
            name=MUON, states=1, step=OptimizerStep.FOR_LOOP, loop_scratch=0.0, matrices=tuple(sorted(shapes))
        )

    @torch.no_grad()
    def step_gathered(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        """Step a group's sharded parameters as `torch.optim.Muon.step` does. Collective.

        Newton-Schulz begins with a cast to bf16, so that a gather in bf16 loses nothing.
        """
        lr, momentum = float(group["lr"]), group["momentum"]
        for parameter in parameters:
            shard_group = _shard_group(parameter)
            if parameter.grad is None or shard_group is None:
                continue
            shard, gradient, state = local(parameter), local(parameter.grad), self.optimizer.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            update = (
                gradient.lerp(state["momentum_buffer"], momentum) if group["nesterov"] else state["momentum_buffer"]
            )
            update = gather_rows(update.bfloat16(), parameter.shape[0], shard_group)
            update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
            first = shard_group.rank() * -(-parameter.shape[0] // shard_group.size())
            shard.mul_(1 - lr * group["weight_decay"])
            shard.add_(
                update[first : first + shard.shape[0]], alpha=-_adjust_lr(lr, group["adjust_lr_fn"], parameter.shape)
            )


def spec_beside_adamw(model: nn.Module, *, device_type: str) -> OptimizerSpec:
    """Return what Muon for a model's matrices and AdamW for its embeddings, head and vectors hold."""
    tables = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    of_tables = {id(parameter) for table in tables if table is not None for parameter in table.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in of_tables]
    if not matrices:
        raise ValueError(
            f"Muon trains matrices, and {type(model).__name__} has none outside of its embeddings; use adamw."
        )
    kinds = Muon(torch.optim.Muon(matrices)), ElementWise(torch.optim.AdamW(trained))
    return upper_bound([kind.known(device_type) for kind in kinds])


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
