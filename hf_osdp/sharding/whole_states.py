"""Whole weights and optimizer states into a sharded model, of which some units may live on the host.

Torch's own functions refuse full state dicts where tensors lie on two devices, and broadcast the memory of what is not contiguous.
Here each tensor is broadcast by itself, and each rank copies its part to wherever that lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard

from ..distributed.mesh import collective_device, world_size
from ..distributed.transport import all_gather_single
from ..modeling.split.positions import own_positions
from ..modeling.units import canonical_name


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """All of a parameter or buffer. Collective.

    The group of a mesh of CUDA devices may be NCCL's alone, which moves no CPU tensors; shards on the host go over the device.
    """
    if not isinstance(value, DTensor):
        return value
    device_type = value.device_mesh.device_type
    if value.to_local().device.type != device_type:
        value = value.to(device_type)
    return _gathered(value)


@torch.no_grad()
def _gathered(value: DTensor) -> torch.Tensor:
    """All of a tensor whose rows lie on the ranks of one axis of its mesh, by one plain collective.

    `full_tensor` issues a functional one, whose `wait_tensor` ended a gloo rank by a segmentation fault (torch 2.13, once).
    """
    axes = [axis for axis, placement in enumerate(value.placements) if not placement.is_replicate()]
    if not axes:
        return value.to_local()
    if len(axes) > 1 or type(value.placements[axes[0]]) is not Shard or value.placements[axes[0]].dim != 0:
        return value.full_tensor()
    group, local = value.device_mesh.get_group(axes[0]), value.to_local()
    rows = -(-value.shape[0] // group.size())
    part = local.new_zeros((rows, *value.shape[1:]))
    part[: local.shape[0]] = local
    whole = local.new_empty((rows * group.size(), *value.shape[1:]))
    all_gather_single(whole, part, group=group)
    return whole[: value.shape[0]]


@torch.no_grad()
def load_whole_weights(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Load whole weights. Collective; one tensor at a time is whole on the device.

    Args:
        model: sharded.
        state: the model's own names → whole tensors; only rank 0's content counts.
        strict: refuse missing and unexpected names.

    Raises:
        RuntimeError: names or shapes do not fit; on every rank.
    """
    targets = {canonical_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    given = _from_rank_zero(lambda: _fitting(targets, state, strict=strict))
    done: set[int] = set()
    for name in given:
        if id(targets[name]) not in done:  # tied weights come once
            done.add(id(targets[name]))
            _broadcast_into(targets[name], state.get(name))


@torch.no_grad()
def load_whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's whole state. Collective; one tensor at a time is whole on the device.

    Args:
        model: sharded.
        optimizer: of this model's parameters, with the same parameter groups.
        state: `{"state": {name: {...}}, "param_groups": [...]}` by the model's own names; only rank 0's content counts.

    Raises:
        RuntimeError: rank 0's state has a parameter that this optimizer does not; on every rank.
    """
    with own_positions(optimizer):
        mine = get_optimizer_state_dict(model, optimizer)

    def told() -> dict[str, Any]:
        for name, own in state["state"].items():
            _check_state(name, own, mine["state"])
        # Copies: torch takes them over, and the next step would change the caller's.
        plain = {n: {k: deepcopy(v) for k, v in own.items() if not _has_shape(v)} for n, own in state["state"].items()}
        return {"plain": plain, "param_groups": state["param_groups"]}

    rest = _from_rank_zero(told)
    # A parameter that had no gradient when it was saved has no state.
    found = {name: {**own, **rest["plain"][name]} for name, own in mine["state"].items() if name in rest["plain"]}
    for name, own in found.items():
        for key, value in own.items():
            if _has_shape(value):
                _broadcast_into(value, state["state"][name][key] if state else None)
    set_named_optimizer_state(model, optimizer, {"state": found, "param_groups": rest["param_groups"]})


def set_named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """torch's `set_optimizer_state_dict`, where parameters may have no state.

    Raises:
        RuntimeError: groups or shapes do not fit.
    """
    with own_positions(optimizer):
        if not state["state"]:
            state = {**state, "state": get_optimizer_state_dict(model, optimizer)["state"]}
            set_optimizer_state_dict(model, optimizer, state)
            optimizer.state.clear()
        else:
            set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))


def _check_state(name: str, saved: Mapping[str, Any], mine: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a parameter's state that is another optimizer's.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    if name not in mine:
        raise RuntimeError(f"The optimizer's state has {name!r}, which this optimizer does not update.")
    kept = [{key: tuple(value.shape) for key, value in own.items() if _has_shape(value)} for own in (saved, mine[name])]
    if kept[0] != kept[1]:
        raise RuntimeError(f"The optimizer's state of {name!r} is {kept[0]}, this optimizer's is {kept[1]}.")


def _has_shape(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _fitting(targets: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], *, strict: bool) -> list[str]:
    """Names that are in both, in the model's order."""
    missing, unexpected = [n for n in targets if n not in state], [n for n in state if n not in targets]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Weights do not fit the model: {len(missing)} missing {missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}."
        )
    for name in (found := [n for n in targets if n in state]):
        if targets[name].shape != state[name].shape:
            raise RuntimeError(f"{name!r} has shape {tuple(state[name].shape)}, the model has {tuple(targets[name].shape)}.")
    return found


def _from_rank_zero(fn: Callable[[], Any]) -> Any:
    """What `fn` gives on rank 0; all ranks raise where it does, or the others would wait for tensors that never come."""
    answer: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            answer = [fn(), None]
        except Exception as error:
            answer = [None, str(error)]
    if world_size() > 1:
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise RuntimeError(answer[1])
    return answer[0]


def _broadcast_into(target: torch.Tensor, source: torch.Tensor | None) -> None:
    """Give every rank its part of rank 0's tensor."""
    if world_size() == 1:
        _take_part(target, source)
        return
    whole = torch.empty(target.shape, dtype=target.dtype, device=collective_device())
    if dist.get_rank() == 0:
        whole.copy_(source)
    dist.broadcast(whole, src=0)
    _take_part(target, whole)


def _take_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into a parameter, buffer or state, wherever that lies."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    mesh, place = target.device_mesh, target.device_mesh.get_coordinate()
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            pieces = torch.chunk(whole, mesh.size(axis), dim=placement.dim)
            whole = pieces[place[axis]] if place[axis] < len(pieces) else whole.narrow(placement.dim, 0, 0)
    target.to_local().copy_(whole)
