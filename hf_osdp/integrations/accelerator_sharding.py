"""Lay a plan out on a model with rank 0's weights, and give its optimizers the shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.mesh import world_size
from ..preparation.plan_run import PlannedRun
from ..sharding.apply import apply_plan, refuse_hooks
from ..sharding.environment import (
    apply_tied,
    move_to_device,
    mp_policy,
)
from ..sharding.optimizer_steps import (
    parameter_names,
    rebind_parameters,
    release_parameters,
    step_on_shards,
)
from ..sharding.optimizers import kind_of
from ..sharding.state import free_gathered, load_full_state_dict
from .plugin import OSDPPlugin


def shard_model(
    model: nn.Module,
    run: PlannedRun,
    plugin: OSDPPlugin,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    device: torch.device,
) -> None:
    """Apply the plan to the model with rank 0's weights, and give the optimizers its sharded parameters, or refuse
    them. Collective.
    """
    for optimizer in optimizers:
        kind_of(optimizer).needs_whole()  # refuses those that no plan can train
    refuse_hooks(model)
    names = parameter_names(model)
    for optimizer in optimizers:
        release_parameters(optimizer, names)
    weights = _detach_weights(model) if plugin.cpu_ram_efficient_loading and world_size() > 1 else None
    apply_plan(
        model, run.plan, run.units,
        mp_policy=plugin.mixed_precision_policy or mp_policy(run.inputs.job.precision),
    )  # fmt: skip
    if weights is not None:
        _load_from_rank_zero(model, weights, device)
    else:
        move_to_device(model, device)  # FSDP2 moves only what it shards
    for optimizer in optimizers:
        rebind_parameters(optimizer, names, model)


def prepare_late_optimizers(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Prepare optimizers made after the plan was applied to their model, for example after an evaluation, or refuse
    them.
    """
    free_gathered(model)
    known = {id(parameter) for parameter in model.parameters()}
    if unknown := sum(
        id(p) not in known for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ):
        raise ValueError(
            f"The optimizer holds {unknown} parameters that are not the sharded model's; make it before the first"
            " forward,"
            " or prepare model and optimizer together."
        )
    for optimizer in optimizers:
        step_on_shards(optimizer, model)


def _detach_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move the model to the meta device, so that ranks allocate only shards; return its weights, non-persistent
    buffers included.
    """
    persistent = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in persistent}
    weights = {name: value.detach() for name, value in (*model.state_dict().items(), *buffers.items())}
    apply_tied(model, lambda tensor: tensor.to("meta"))
    return weights


def _load_from_rank_zero(model: nn.Module, weights: dict[str, torch.Tensor], device: torch.device) -> None:
    others = {name for name, _ in model.named_buffers()} - set(model.state_dict())
    move_to_device(model, device, empty=True)
    # Weights of operators in slices have their Hugging Face names here, not the sharded model's names.
    load_full_state_dict(model, {name: value for name, value in weights.items() if name not in others})
    for name, buffer in model.named_buffers():
        if name in others:
            if dist.get_rank() == 0:
                buffer.copy_(weights[name])
            dist.broadcast(buffer, src=0)
