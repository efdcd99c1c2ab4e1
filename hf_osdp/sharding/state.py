"""A model's weights and its optimizer's state under Hugging Face names, sharded or whole.

Torch's own functions refuse full state dicts where tensors lie on two devices, and broadcast the memory of what is not contiguous.
Here each tensor is gathered and broadcast by itself, and each rank copies its part to wherever that lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import collective_device, rank, world_size
from ..distributed.transport import all_gather_single
from ..modeling.split.names import is_split, merge_optimizer_state, merge_state_dict, own_positions, split_optimizer_state
from ..modeling.units import canonical_name
from .optimizer_check import unwrapped
from .sliced_tensor import SlicedTensor
from .weight_reads import end_step

_SET_BY_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""Keys of an optimizer's groups that are not the optimizer's own."""
OptimizerState = dict[str, Any]
"""`{"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}`"""


def free_gathered(model: nn.Module) -> None:
    """Show shards everywhere.

    After a forward without backward, units that are kept go on showing gathered parameters; an optimizer made from those would update
    what nobody reads.
    """
    end_step(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ------------------------------------------------------------------------------------------------------------------- weights


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by Hugging Face names, tied names with one object; what is in slices as a `SlicedTensor`."""
    state = {canonical_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    return merge_state_dict(state, model, join=SlicedTensor)


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole weights under their Hugging Face names. Collective; one parameter at a time is whole on the device.

    Args:
        model: a sharded or a plain model, between steps.

    Returns:
        On rank 0 CPU copies (later steps do not change them; tied weights stay one tensor), on other ranks an empty dict.
        What is in slices is one tensor.
    """
    end_step(model)
    weights = named_weights(model)
    unique = {id(value): value for value in weights.values()}
    copies = {key: _copy_on_rank_zero(value) for key, value in unique.items()}
    return {name: copies[id(value)] for name, value in weights.items()} if rank() == 0 else {}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Load whole weights into a sharded or a plain model. Collective; one tensor at a time is whole on the device.

    Args:
        model: the model; its layout does not matter.
        state: Hugging Face names → whole tensors; only rank 0's content counts.
        strict: refuse missing and unexpected names.

    Raises:
        RuntimeError: names or shapes do not fit; on every rank.
    """
    if not isinstance(model, FSDPModule):
        model.load_state_dict(dict(state), strict=strict)
        return
    targets = named_weights(model)
    names, problem = on_rank_zero(lambda: _names_to_load(targets, state, strict=strict))
    if problem:
        raise RuntimeError(problem)
    for name in {id(targets[name]): name for name in names}.values():  # tied weights come once
        _broadcast_into(targets[name], state[name] if rank() == 0 else None)


def _names_to_load(
    targets: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], *, strict: bool
) -> tuple[list[str], str | None]:  # fmt: skip
    """Return names that are in both, in the model's order, and what does not fit."""
    missing, unexpected = [n for n in targets if n not in state], [n for n in state if n not in targets]
    if strict and (missing or unexpected):
        lists = f"{len(missing)} missing {missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}"
        return [], f"Weights do not fit the model: {lists}."
    for name in (found := [n for n in targets if n in state]):
        if targets[name].shape != state[name].shape:
            return [], f"{name!r} has shape {tuple(state[name].shape)}, the model has {tuple(targets[name].shape)}."
    return found, None


# ----------------------------------------------------------------------------------------------------------------- optimizers


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, as_target: bool = False) -> OptimizerState:
    """Return an optimizer's own tensors by its parameters' Hugging Face names; what is in slices as a `SlicedTensor`.

    Args:
        model: sharded or plain.
        optimizer: of this model's parameters.
        as_target: make states that are not there yet, to load into them.
    """
    optimizer = unwrapped(optimizer)
    fresh = not optimizer.state
    with own_positions(optimizer):
        state = get_optimizer_state_dict(model, optimizer)  # takes a step of zeros where there are no states
    if fresh and not as_target:
        optimizer.state.clear()
        state["state"] = {}
    return merge_optimizer_state(state, model, join=SlicedTensor) if is_split(model) else state


def set_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Set an optimizer's state, with values as `optimizer_state` gives them; parameters may have none.

    Raises:
        RuntimeError: groups or shapes do not fit.
    """
    optimizer = unwrapped(optimizer)
    state = split_optimizer_state(state, model) if is_split(model) else state
    with own_positions(optimizer):
        if state["state"]:
            set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
        else:
            state = {**state, "state": get_optimizer_state_dict(model, optimizer)["state"]}
            set_optimizer_state_dict(model, optimizer, state)
            optimizer.state.clear()


def states_problem(
    saved: Mapping[str, Mapping[str, Sequence[int]]], group_keys: set[str], mine: OptimizerState, optimizer: torch.optim.Optimizer
) -> str | None:
    """Return why saved states cannot be loaded into an optimizer; None where they can."""
    for name, shapes in saved.items():
        if name not in mine["state"]:
            return f"it has a state of {name!r}, which this optimizer does not update"
        own = shapes_of(mine["state"][name])
        if shapes.keys() != own.keys():
            return _other_optimizer(shapes, own, optimizer)
        if wrong := next((key for key, shape in shapes.items() if tuple(shape) != own[key]), None):
            return f"{wrong} of {name!r} has shape {tuple(shapes[wrong])}, this optimizer's has {own[wrong]}"
    own_keys = set().union(*(group.keys() for group in mine["param_groups"]))
    if (extra := group_keys - own_keys - _SET_BY_SCHEDULERS) and (lacking := own_keys - group_keys - _SET_BY_SCHEDULERS):
        return _other_optimizer(extra, lacking, optimizer)
    return None


def _other_optimizer(saved: Iterable[str], own: Iterable[str], optimizer: torch.optim.Optimizer) -> str:
    lists = [", ".join(sorted(names)) or "nothing" for names in (saved, own)]
    return (
        f"it is the state of another optimizer: it holds {lists[0]} where this run's {type(unwrapped(optimizer)).__name__} holds {lists[1]}"
    )


def shapes_of(states: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one parameter's states that have dimensions."""
    return {key: tuple(value.shape) for key, value in states.items() if _has_dims(value)}


def _has_dims(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


@torch.no_grad()
def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return an optimizer's whole state by its parameters' Hugging Face names. Collective; one tensor at a time is whole on the device.

    Returns:
        On rank 0 `{"state": {name: {...}}, "param_groups": [...]}` with CPU copies, on other ranks an empty dict.
    """
    state = optimizer_state(model, optimizer)
    states = {
        name: {key: _copy_on_rank_zero(value) if torch.is_tensor(value) else value for key, value in own.items()}
        for name, own in state["state"].items()
    }
    return {"state": states, "param_groups": [dict(group) for group in state["param_groups"]]} if rank() == 0 else {}


@torch.no_grad()
def load_full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `full_optimizer_state_dict` gave, whatever the layout and the slices were. Collective.

    Raises:
        RuntimeError: it is of another model, another optimizer, or other groups; on every rank.
    """
    mine = optimizer_state(model, optimizer, as_target=True)

    def without_tensors() -> tuple[OptimizerState, str | None]:
        saved = {name: shapes_of(own) for name, own in state["state"].items()}
        # Copies: torch takes them over, and the next step would change the caller's.
        plain = {name: {k: deepcopy(v) for k, v in own.items() if not _has_dims(v)} for name, own in state["state"].items()}
        keys = set().union(*(group.keys() for group in state["param_groups"]))
        return {"state": plain, "param_groups": state["param_groups"]}, states_problem(saved, keys, mine, optimizer)

    loaded, problem = on_rank_zero(without_tensors)
    if problem:
        raise RuntimeError(problem)
    for name, own in mine["state"].items():
        if name in loaded["state"]:  # a parameter that had no gradient when it was saved has no state
            for key, value in own.items():
                if _has_dims(value):
                    _broadcast_into(value, state["state"][name][key] if rank() == 0 else None)
            loaded["state"][name] = {**own, **loaded["state"][name]}
    set_optimizer_state(model, optimizer, loaded)


# -------------------------------------------------------------------------------------------------------------- whole tensors


def _copy_on_rank_zero(value: torch.Tensor) -> torch.Tensor:
    """Gather a tensor, and return a copy on the CPU of rank 0, an empty tensor elsewhere. Collective."""
    if isinstance(value, SlicedTensor):
        parts = [_copy_on_rank_zero(part) for part in value.parts]
        return torch.cat(parts, dim=value.whole.dim) if rank() == 0 else parts[0]
    whole = _gathered(value) if isinstance(value, DTensor) else value
    return whole.detach().to("cpu", copy=True) if rank() == 0 else torch.empty(0)


def _gathered(value: DTensor) -> torch.Tensor:
    """Gather a tensor whose rows lie on the ranks of one axis of its mesh, by one plain collective.

    The group of a mesh of CUDA devices may be NCCL's alone, which moves no CPU tensors: shards on the host go over the device.
    `full_tensor` issues a functional collective, whose `wait_tensor` ended a gloo rank by a segmentation fault (torch 2.13, once).
    """
    if value.to_local().device.type != value.device_mesh.device_type:
        value = value.to(value.device_mesh.device_type)  # type: ignore[assignment]
    axes = [axis for axis, placement in enumerate(value.placements) if not placement.is_replicate()]
    if not axes:
        return value.to_local()
    if len(axes) > 1 or value.placements[axes[0]] != Shard(0):
        return value.full_tensor()
    group, local = value.device_mesh.get_group(axes[0]), value.to_local()
    rows = -(-value.shape[0] // group.size())
    part = local.new_zeros((rows, *value.shape[1:]))
    part[: local.shape[0]] = local
    whole = local.new_empty((rows * group.size(), *value.shape[1:]))
    all_gather_single(whole, part, group=group)
    return whole[: value.shape[0]]


def _broadcast_into(target: torch.Tensor, source: torch.Tensor | None) -> None:
    """Copy rank 0's whole tensor into a parameter, buffer or state, on each rank its part. Collective."""
    if isinstance(target, SlicedTensor):
        for part, start, size in zip(target.parts, target.whole.starts, target.whole.sizes, strict=True):
            _broadcast_into(part, None if source is None else source.narrow(target.whole.dim, start, size))
        return
    whole = source
    if world_size() > 1:
        whole = torch.empty(target.shape, dtype=target.dtype, device=collective_device())
        if source is not None:
            whole.copy_(source)
        dist.broadcast(whole, src=0)
    assert whole is not None
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    mesh, place = target.device_mesh, target.device_mesh.get_coordinate()
    assert place is not None
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            pieces = torch.chunk(whole, mesh.size(axis), dim=placement.dim)
            whole = pieces[place[axis]] if place[axis] < len(pieces) else whole.narrow(placement.dim, 0, 0)
    target.to_local().copy_(whole)
