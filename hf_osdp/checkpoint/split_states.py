"""State dicts of split and sharded models, and of their optimizers, under Hugging Face names; checkpoints that keep these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as stock
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ..modeling.split.names import concatenated, is_split, merge_optimizer_state, merge_state_dict, split_state_dict
from ..modeling.split.positions import own_positions
from .split_tensors import SlicedTensor

_get_model, _set_model = stock.get_model_state_dict, stock.set_model_state_dict
_get_optimizer = stock.get_optimizer_state_dict


def get_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None, **others: Any) -> dict[str, Any]:
    """torch's function of this name; what is in slices comes under its Hugging Face name.

    Args:
        model: sharded; split or not.
        options: full state dicts have whole tensors, others a `SlicedTensor` where torch gives a DTensor.
        **others: as torch's.
    """
    state = _get_model(model, options=options, **others)
    return merge_state_dict(state, model, join=_join(options)) if is_split(model) else state


def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None) -> Any:
    """torch's function of this name, for what `get_model_state_dict` gives, in any number of slices or none."""
    state = split_state_dict(model_state_dict, model) if is_split(model) else model_state_dict
    return _set_model(model, state, options=options)


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Any, *, options: StateDictOptions | None = None, **others: Any
) -> dict[str, Any]:
    """torch's function of this name; the state of what is in slices comes under its Hugging Face name, with its shape.

    Raises:
        ValueError: a flat state dict is asked for.
    """
    if not is_split(model):
        return _get_optimizer(model, optimizers, options=options, **others)
    if options is not None and options.flatten_optimizer_state_dict:
        raise ValueError("flatten_optimizer_state_dict=True is not known for models with operators in slices; set it to False.")
    with own_positions(optimizers):
        state = _get_optimizer(model, optimizers, options=options, **others)
    return merge_optimizer_state(state, model, join=_join(options)) if state.get("state") else state


def _join(options: StateDictOptions | None) -> Any:
    return concatenated if options is not None and options.full_state_dict else _sliced


def _sliced(parts: Any, whole: Any) -> torch.Tensor:
    return SlicedTensor(parts, whole)
