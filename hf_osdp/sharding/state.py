"""A model's weights and its optimizer's state under Hugging Face names, sharded or whole.

Torch's own functions refuse full state dicts with tensors on two devices, and broadcast non-contiguous tensors by
their raw memory. Here each tensor is gathered and broadcast alone, and each rank copies its part to the device of its
shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..distributed.collectives import gather_rows
from ..distributed.consensus import on_rank_zero, require_same
from ..distributed.mesh import collective_device, rank, world_size
from ..distributed.process_group import all_gather_objects, require_all
from ..modeling.split.names import (
    is_split,
    merge_optimizer_state,
    merge_state_dict,
    split_optimizer_state,
)
from ..modeling.split.whole_tensor import WholeTensor
from ..modeling.units import canonical_name, named_parameters
from .gradients import local
from .optimizers import bare_optimizer, kind_of
from .replicas import is_under_plan, replicas_of
from .unit_order import orders_of

_SET_BY_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""Keys of an optimizer's groups that schedulers add."""
OptimizerState = dict[str, Any]
"""`{"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}`"""


def _for_checkpoint(value: Any, parameter: torch.Tensor) -> Any:  # noqa: ANN401  # numbers too
    """Return an optimizer's state as it is saved: a plain tensor of the shard's shape becomes a DTensor, sharded as
    its parameter.
    """
    if (
        not torch.is_tensor(value)
        or isinstance(value, DTensor)
        or not value.dim()
        or value.shape != local(parameter).shape
    ):
        return value
    return DTensor(value, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else value


def free_gathered(model: nn.Module) -> None:
    """Free all gathered parameters, so that the model's parameters are shards.

    After a forward without backward, units that keep gathered parameters still expose them; an optimizer made from
    these would update copies instead of the shards.
    """
    for order in orders_of(model):
        order.end_step()
    if (replicas := replicas_of(model)) is not None:
        replicas.rest()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def broadcast_parameters(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers to every rank before they are sharded. Collective.

    Replicated and HSDP units synchronise only gradients, so replicas that start unequal stay unequal. Tensors that are
    on the meta device on any rank are skipped on all; loading them later must make them equal. Refuse ranks whose
    models have different tensors.
    """
    if world_size() == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    signature = repr([(canonical_name(name), tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named])
    require_same({"the hash of the model's tensors": hashlib.sha256(signature.encode()).hexdigest()[:8]})
    on_meta = all_gather_objects([tensor.is_meta for _, tensor in named])
    for (_, tensor), *flags in zip(named, *on_meta, strict=True):
        if tensor.numel() and not any(flags):
            staged = tensor.detach().to(collective_device()).contiguous()
            dist.broadcast(
                staged.reshape(-1).view(torch.uint8), src=0
            )  # as bytes: backends differ in the dtypes that they support
            if staged.data_ptr() != tensor.data_ptr():
                tensor.copy_(staged)


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by Hugging Face names; tied names share one object, sliced parameters are
    `WholeTensor`s.
    """
    state = {canonical_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    return merge_state_dict(state, model, join=WholeTensor)


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole weights under their Hugging Face names. Collective; one parameter at a time is whole on the device.

    Rank 0 gets copies on the CPU, in which tied weights are one tensor and sliced ones are joined; other ranks get an
    empty dict.
    """
    for order in orders_of(model):
        order.end_step()
    weights = named_weights(model)
    if any(isinstance(value, (DTensor, WholeTensor)) for value in weights.values()):
        require_all(f"{type(model).__name__}.full_state_dict")
    copies = {
        key: _copy_on_rank_zero(value) for key, value in {id(value): value for value in weights.values()}.items()
    }
    return {name: copies[id(value)] for name, value in weights.items()} if rank() == 0 else {}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Load rank 0's whole weights by Hugging Face names into a sharded or plain model. Collective; one at a time is on
    the device.

    All ranks raise RuntimeError if shapes do not fit or, with `strict`, names are missing or unexpected.
    """
    if not (is_under_plan(model) or is_split(model)):
        model.load_state_dict(dict(state), strict=strict)
        return
    targets = named_weights(model)
    shapes = on_rank_zero(lambda: {name: tuple(value.shape) for name, value in state.items()})
    missing, unexpected = (
        [name for name in targets if name not in shapes],
        [name for name in shapes if name not in targets],
    )
    if strict and (missing or unexpected):
        lists = f"{len(missing)} missing {missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}"
        raise RuntimeError(f"Weights do not fit the model: {lists}.")
    found = {name: target for name, target in targets.items() if name in shapes}
    for name, target in found.items():
        if target.shape != shapes[name]:
            raise RuntimeError(f"{name!r} has shape {shapes[name]}, but the model's has {tuple(target.shape)}.")
    for name in {id(target): name for name, target in found.items()}.values():  # tied weights are loaded once
        broadcast_into(targets[name], state[name] if rank() == 0 else None)


@torch.no_grad()
def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create missing states by a step with zero gradients, and restore the weights: foreign optimizers may decay
    them or divide by 0.
    """
    foreign = not optimizer.state and not type(optimizer).__module__.startswith("torch.optim.")
    parameters = [local(parameter) for group in optimizer.param_groups for parameter in group["params"] if foreign]
    before = [parameter.clone() for parameter in parameters]
    _init_optim_state(optimizer)
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, as_target: bool = False) -> OptimizerState:
    """Return an optimizer's own tensors by its parameters' Hugging Face names; states of sliced parameters are
    `WholeTensor`s.

    With `as_target`, create missing states, to load into them.
    """
    optimizer, kind = bare_optimizer(optimizer), kind_of(optimizer)
    fresh = not optimizer.state
    with _for_torch(optimizer):
        _make_states(optimizer)
        others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        state: OptimizerState = dict(get_optimizer_state_dict(model, optimizer))
    if fresh and not as_target:
        optimizer.state.clear()
        state["state"], others = {}, {}
    if kind.has_plain_states:
        named = named_parameters(model)
        saved = {name: kind.saved_states(named[name], own) for name, own in state["state"].items()}
        state["state"] = {
            name: {k: _for_checkpoint(v, named[name]) for k, v in own.items()} for name, own in saved.items()
        }
    state["state"] |= others
    if kind.lr_is_tensor:
        for group in state["param_groups"]:
            group["lr"] = float(group["lr"])
    return merge_optimizer_state(state, model, join=WholeTensor) if is_split(model) else state


@contextmanager
def _for_torch(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make the optimizer's state dict as torch's functions expect it: of its own parameters only."""
    hook = optimizer.register_state_dict_post_hook(_without_others)
    yield
    hook.remove()


def _without_others(optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Remove states under keys that are no parameters, such as names, which torch's functions do not expect."""
    held = {key for group in state["param_groups"] for key in group["params"]}
    state["state"] = {key: own for key, own in state["state"].items() if key in held}


def set_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Set an optimizer's state, in the form that `optimizer_state` returns; parameters without a state are allowed."""
    optimizer, kind = bare_optimizer(optimizer), kind_of(optimizer)
    state = split_optimizer_state(state, model) if is_split(model) else state
    all_states, state = state["state"], {**state}
    _without_others(optimizer, state)
    if kind.has_plain_states:
        named = named_parameters(model)
        states = {name: kind.load_states(named[name], own) for name, own in state["state"].items()}
        state = {**state, "state": states}
    with _for_torch(optimizer):
        if state["state"]:
            set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
        else:
            set_optimizer_state_dict(
                model, optimizer, {**state, "state": get_optimizer_state_dict(model, optimizer)["state"]}
            )
            optimizer.state.clear()
    optimizer.state.update((key, own) for key, own in all_states.items() if key not in state["state"])
    if kind.lr_is_tensor:
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)


def check_states(
    saved: Mapping[str, Mapping[str, Sequence[int]]],
    group_keys: set[str],
    mine: OptimizerState,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raise RuntimeError if saved states' shapes or groups' keys differ from those of an optimizer with the state
    `mine`.
    """

    def refuse(held: Iterable[str], own: Iterable[str]) -> NoReturn:
        lists, kind = (
            [", ".join(sorted(names)) or "nothing" for names in (held, own)],
            type(bare_optimizer(optimizer)).__name__,
        )
        raise RuntimeError(
            f"it is the state of another optimizer: it holds {lists[0]}, but this run's {kind} holds {lists[1]}"
        )

    for name, shapes in saved.items():
        if name not in mine["state"]:
            raise RuntimeError(f"it has a state of {name!r}, which this optimizer does not update")
        own = _shapes(mine["state"][name])
        if shapes.keys() != own.keys():
            refuse(shapes, own)
        if wrong := next((key for key, shape in shapes.items() if tuple(shape) != own[key]), None):
            raise RuntimeError(
                f"{wrong} of {name!r} has shape {tuple(shapes[wrong])}, but this optimizer's has {own[wrong]}"
            )
    own_keys = set().union(*(group.keys() for group in mine["param_groups"]))
    if (extra := group_keys - own_keys - _SET_BY_SCHEDULERS) and (
        lacking := own_keys - group_keys - _SET_BY_SCHEDULERS
    ):
        refuse(extra, lacking)


def _shapes(states: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        key: tuple(value.shape) for key, value in states.items() if isinstance(value, torch.Tensor) and value.dim()
    }


@torch.no_grad()
def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return an optimizer's whole state, copied to the CPU of rank 0, else empty.

    Collective; one tensor at a time is on the device.
    """
    state = optimizer_state(model, optimizer)
    states = {
        name: {key: _copy_on_rank_zero(value) if torch.is_tensor(value) else value for key, value in own.items()}
        for name, own in state["state"].items()
    }
    return {"state": states, "param_groups": [dict(group) for group in state["param_groups"]]} if rank() == 0 else {}


@torch.no_grad()
def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load a state of `full_optimizer_state_dict`, of any layout and slices.

    Collective; all raise RuntimeError if it does not fit.
    """
    mine = optimizer_state(model, optimizer, as_target=True)

    def without_tensors() -> tuple[dict[str, dict[str, tuple[int, ...]]], OptimizerState]:
        shapes = {name: _shapes(own) for name, own in state["state"].items()}
        # Copy them: torch uses the objects themselves, and the next step would change the caller's.
        plain = {
            name: {k: deepcopy(v) for k, v in own.items() if k not in shapes[name]}
            for name, own in state["state"].items()
        }
        return shapes, {"state": plain, "param_groups": state["param_groups"]}

    shapes, loaded = on_rank_zero(without_tensors)
    check_states(shapes, set().union(*(group.keys() for group in loaded["param_groups"])), mine, optimizer)
    for name, own in mine["state"].items():
        if name in shapes:  # parameters without a gradient at the time of saving have no state
            for key in _shapes(own):
                broadcast_into(own[key], state["state"][name][key] if rank() == 0 else None)
            loaded["state"][name] = {**own, **loaded["state"][name]}
    set_optimizer_state(model, optimizer, loaded)


def _copy_on_rank_zero(value: torch.Tensor) -> torch.Tensor:
    """Gather a tensor, and return a copy on the CPU on rank 0, an empty tensor elsewhere. Collective."""
    if isinstance(value, WholeTensor):
        parts = [_copy_on_rank_zero(part) for part in value.parts]
        return torch.cat(parts, dim=value.whole.dim) if rank() == 0 else parts[0]
    whole = gathered(value) if isinstance(value, DTensor) else value
    return whole.detach().to("cpu", copy=True) if rank() == 0 else torch.empty(0)


def gathered(value: DTensor) -> torch.Tensor:
    """Gather a tensor that is sharded over one axis of its mesh, by one plain collective.

    The group of a CUDA mesh may have only NCCL, which cannot send CPU tensors, so shards on the host are copied to the
    device first. `full_tensor` would issue a functional collective, whose `wait_tensor` once crashed a gloo rank with
    a segmentation fault (torch 2.13).
    """
    if value.to_local().device.type != value.device_mesh.device_type:
        value = value.to(value.device_mesh.device_type)  # type: ignore[assignment]
    axes = [axis for axis, placement in enumerate(value.placements) if not placement.is_replicate()]
    if not axes:
        return value.to_local()
    place = value.placements[axes[0]]
    if len(axes) > 1 or type(place) is not Shard:
        return value.full_tensor()
    shard, group, dim = value.to_local(), value.device_mesh.get_group(axes[0]), place.dim
    if dim == 0:
        return gather_rows(shard, value.shape[0], group)
    rows = gather_rows(shard, shard.shape[0] * group.size(), group)  # FSDP2 cuts other dimensions evenly
    return torch.cat(rows.chunk(group.size()), dim)


def broadcast_into(target: torch.Tensor, source: torch.Tensor | None) -> None:
    """Broadcast rank 0's whole tensor, and copy each rank's part into its parameter, buffer or state. Collective."""
    if isinstance(target, WholeTensor):
        for part, start, size in zip(target.parts, target.whole.starts, target.whole.sizes, strict=True):
            broadcast_into(part, None if source is None else source.narrow(target.whole.dim, start, size))
        return
    whole = source
    if world_size() > 1:
        whole = torch.empty(target.shape, dtype=target.dtype, device=collective_device())
        if source is not None:
            whole.copy_(source)
        dist.broadcast(whole, src=0)
    assert whole is not None
    if isinstance(target, DTensor):
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(whole)
