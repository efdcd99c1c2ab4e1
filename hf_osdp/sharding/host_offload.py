"""Units whose parameters, gradients and optimizer states live in the host's memory: FSDP2's offload, for some units and not others."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ..planner.plan import Plan


def uses_host(plan: Plan) -> bool:
    """Return whether some unit lives on the host."""
    return any(unit.on_host for unit in plan.units)


def parameter_groups(module: nn.Module | FSDPModule) -> list[FSDPParamGroup]:
    """Return FSDP2's parameter groups of a module: torch up to 2.11 has one field, later a list."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


def host_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the sharded parameters of all units that live on the host, each once."""
    groups = dict.fromkeys(group for module in model.modules() for group in parameter_groups(module))
    return [p.sharded_param for group in groups if isinstance(group.offload_policy, CPUOffloadPolicy) for p in group.fsdp_params]


@torch.no_grad()
def move_to_device(model: nn.Module, device: torch.device, *, empty: bool = False) -> nn.Module:
    """Do what `model.to(device)` does, but for units that live on the host: FSDP2 refuses to train those where they have been moved.

    Args:
        model: sharded or plain.
        device: for all that does not live on the host.
        empty: as `model.to_empty(device=device)` does, and give units on the host memory there.
    """
    host = {id(parameter) for parameter in host_parameters(model)}

    def moved(tensor: torch.Tensor) -> torch.Tensor:  # torch calls with the parameters themselves
        place = torch.device("cpu") if id(tensor) in host else device
        if empty:
            return torch.empty_like(tensor, device=place)
        return tensor if tensor.device == place else tensor.to(place)

    return model._apply(moved)
