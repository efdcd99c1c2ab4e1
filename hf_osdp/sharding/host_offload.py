"""Units whose parameters, gradients and optimizer states live in the host's memory: FSDP2's offload, for some units and not others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from ..planner.plan import Plan


def offload_policy(*, on_host: bool, device_type: str, pin_memory: bool | None = None) -> OffloadPolicy:
    """What FSDP2 is told of one unit.

    Args:
        on_host: whether the unit lives on the host.
        device_type: of the device, `"cuda"` or `"cpu"`.
        pin_memory: page-locked memory, which copies beside compute need; None takes it wherever there is another device than the
            CPU. On the CPU FSDP2 fails with it: there is no accelerator to lock pages for.
    """
    if not on_host:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type != "cpu" if pin_memory is None else pin_memory)


def uses_host(plan: Plan) -> bool:
    """Whether some unit lives on the host."""
    return any(unit.on_host for unit in plan.units)


def parameter_groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of a module: one field in torch up to 2.11, a list after it."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


def is_on_host(group: Any) -> bool:
    """Whether a parameter group of FSDP2 lives on the host."""
    return isinstance(group.offload_policy, CPUOffloadPolicy)


def host_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The sharded parameters of all units that live on the host."""
    return [p.sharded_param for group in _groups(model) if is_on_host(group) for p in group.fsdp_params]


@torch.no_grad()
def move_to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """`model.to(device)` without what lives on the host: FSDP2 refuses to train that where it has been moved.

    Args:
        model: after `apply_plan`, showing shards.
        device: where the rest belongs.

    Returns:
        The same model.
    """
    return _apply(model, device, lambda tensor, place: tensor if tensor.device == place else tensor.to(place))


@torch.no_grad()
def empty_on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """`model.to_empty(device=device)`, but for units that live on the host, which get memory there."""
    return _apply(model, device, lambda tensor, place: torch.empty_like(tensor, device=place))


def _groups(model: nn.Module) -> Iterator[Any]:
    """Every parameter group once; the modules of a unit share theirs."""
    seen: set[int] = set()
    for module in model.modules():
        for group in parameter_groups(module):
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def _apply(model: nn.Module, device: torch.device, move: Callable[[torch.Tensor, torch.device], torch.Tensor]) -> nn.Module:
    """`move(tensor, where it belongs)` for every parameter and buffer; torch calls with the parameters themselves."""
    host = {id(parameter) for parameter in host_parameters(model)}
    cpu = torch.device("cpu")
    return model._apply(lambda tensor: move(tensor, cpu if id(tensor) in host else device))
