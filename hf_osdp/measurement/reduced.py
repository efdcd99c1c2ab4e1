"""A model cut short: a few blocks of each kind with the embedding and the head, real, for timing."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..modeling.batch_norm import batch_norm_parameters
from ..modeling.units import modules_by_name
from ..planner.description import GatherSpan, UnitDescription
from ..tracing.equal_blocks import block_key


def shortened(model: nn.Module, units: tuple[UnitDescription, ...], copies: int) -> nn.Module:
    """A copy on the meta device in which lists of blocks end once `copies` of each kind are there.

    Args:
        model: real or on the meta device; it stays as it is.
        units: its units, as `find_units` gives them.
        copies: blocks of a kind to keep; they run one after the other, so that none finds its parameters in a cache.

    Returns:
        The copy. Buffers that were real keep their values; blocks that are not in a `nn.ModuleList` all stay.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    short = copy.deepcopy(model, memo)
    modules = modules_by_name(short)
    lists: dict[str, list[str]] = {}
    for unit in units:
        parent = unit.fqn.rpartition(".")[0]
        if unit.span is GatherSpan.USE and isinstance(modules.get(parent), nn.ModuleList):
            lists.setdefault(parent, []).append(unit.fqn)
    for parent, blocks in lists.items():
        if len(blocks) == len(modules[parent]):
            del modules[parent][_enough([block_key(modules[name]) for name in blocks], copies) :]
    return short


def materialise(model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> nn.Module:
    """Give a model on the meta device memory and random weights, in place; what is shared stays shared.

    Args:
        model: parameters on the meta device; transformers models set their buffers anew, others must have real ones.
        device: where it goes.
        compute_dtype: dtype of floating-point parameters, as FSDP2's mixed precision casts them, those of batch norms left out; None
            keeps theirs.

    Returns:
        The model in training mode.
    """
    memo: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors, make in ((module._parameters, _parameter), (module._buffers, _buffer)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = memo.setdefault(id(tensor), make(tensor, device)) if id(tensor) not in memo else memo[id(tensor)]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=0.02)
        if hasattr(model, "init_weights"):
            model.init_weights()
    if compute_dtype is not None:
        keeping = batch_norm_parameters(model)
        for parameter in model.parameters():
            if parameter.is_floating_point() and id(parameter) not in keeping:
                parameter.data = parameter.data.to(compute_dtype)
    return model.train()


def _parameter(tensor: torch.Tensor, device: torch.device) -> nn.Parameter:
    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(made, requires_grad=tensor.requires_grad)


def _buffer(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)


def _enough(keys: list[Any], copies: int) -> int:
    """How many of the first blocks hold `copies` of each kind, or all there are of it."""
    wanted = {key: min(copies, keys.count(key)) for key in keys}
    for number, key in enumerate(keys, start=1):
        wanted[key] -= 1
        if all(left <= 0 for left in wanted.values()):
            return number
    return len(keys)
