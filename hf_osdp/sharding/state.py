"""A sharded model's weights as Hugging Face stores them, and its optimizer's state by their names, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from ..modeling.split.names import is_split, merge_optimizer_state, merge_state_dict, split_optimizer_state, split_state_dict
from ..modeling.split.positions import own_positions
from ..modeling.units import canonical_name
from .optimizer_check import unwrapped
from .weight_reads import end_step
from .whole_states import load_whole_optimizer_state, load_whole_weights, whole_tensor


def free_gathered(model: nn.Module) -> None:
    """Show shards everywhere. After a forward without backward, units that are kept go on showing gathered parameters; an
    optimizer made from those would update what nobody reads."""
    end_step(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights under their Hugging Face names. Collective; one parameter at a time is whole on the device.

    Args:
        model: a sharded or a plain model, between steps.

    Returns:
        On rank 0 CPU copies (later steps do not change them; tied weights stay one tensor), on other ranks an empty dict.
        What is in slices is one tensor.
    """
    end_step(model)
    keep = not dist.is_initialized() or dist.get_rank() == 0
    copies: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    # keep_vars: the parameters themselves, by whose identity ties are known.
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in copies:
            whole = whole_tensor(value)  # on every rank
            copies[id(value)] = whole.detach().to("cpu", copy=True) if keep else torch.empty(0)
        state[canonical_name(name)] = copies[id(value)]
    return merge_state_dict(state, model) if keep else {}


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Load whole weights into a sharded or a plain model. Collective; one tensor at a time is whole on the device.

    Args:
        model: the model; its layout does not matter.
        state: Hugging Face names → whole tensors; only rank 0's content counts.
        strict: refuse missing and unexpected names.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    if not isinstance(model, FSDPModule):
        model.load_state_dict(dict(state), strict=strict)
        return
    load_whole_weights(model, _in_slices(model, state) if is_split(model) else state, strict=strict)


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state by its parameters' Hugging Face names. Collective; one tensor at a time is whole on the device.

    Args:
        model: a sharded or a plain model, between steps.
        optimizer: of this model's parameters.

    Returns:
        On rank 0 `{"state": {name: {...}}, "param_groups": [...]}` with CPU copies, on other ranks an empty dict.
    """
    keep = not dist.is_initialized() or dist.get_rank() == 0
    optimizer = unwrapped(optimizer)
    with own_positions(optimizer):
        state = named_optimizer_state(optimizer, lambda: get_optimizer_state_dict(model, optimizer))
    states: dict[str, dict[str, Any]] = {}
    for name, own in state["state"].items():
        whole = {key: whole_tensor(value) if torch.is_tensor(value) else value for key, value in own.items()}  # on every rank
        if keep:
            states[name] = {key: value.to("cpu", copy=True) if torch.is_tensor(value) else value for key, value in whole.items()}
    if not keep:
        return {}
    full = {"state": states, "param_groups": [dict(group) for group in state["param_groups"]]}
    return merge_optimizer_state(full, model) if is_split(model) and states else full


def load_full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `full_optimizer_state_dict` gave, whatever the layout and the slices were. Collective.

    Args:
        model: a sharded or a plain model.
        optimizer: of this model's parameters, with the same parameter groups.
        state: only rank 0's content counts.

    Raises:
        RuntimeError: it is of another model, or of other groups.
    """
    own = split_optimizer_state(state, model) if state and is_split(model) else state
    load_whole_optimizer_state(model, unwrapped(optimizer), own)


def named_optimizer_state(optimizer: torch.optim.Optimizer, get: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `get` gives by torch's function, which takes a step to make states that are not there yet: those are not the optimizer's.

    Args:
        optimizer: as it is in training.
        get: a call of `get_optimizer_state_dict`.
    """
    fresh = not optimizer.state
    state = get()
    if fresh:
        optimizer.state.clear()
        state["state"] = {}
    return state


def _in_slices(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Rank 0's state under the slices' names. All ranks raise where it does not fit: the others would wait for its tensors."""
    own, problem = state, [None]
    if dist.get_rank() == 0:
        try:
            own = split_state_dict(state, model)
        except RuntimeError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise RuntimeError(problem[0])
    return own
