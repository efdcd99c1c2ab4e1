"""Make temporary copies of a model: on the meta device with few blocks, or on a device with random weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..modeling.units import modules_by_name
from ..modeling.wrapping import batch_norm_parameters
from ..planner.description import GatherSpan, UnitDescription
from ..tracing.equal_blocks import block_key
from ..tracing.fake_model import rebind

_SPREAD = 0.02
"""Bound of the uniform random weights: similar to the initialisation of transformers, and finite in float16."""


def empty_copy(model: nn.Module, device: torch.device, *, keeps_buffers: bool = False) -> nn.Module:
    """Return a copy on a device with uninitialised parameters and buffers, or with the model's buffers; shared ones
    stay shared.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device=device, requires_grad=False), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    if not keeps_buffers:
        memo |= {id(buffer): torch.empty_like(buffer, device=device) for buffer in model.buffers()}
    copied = copy.deepcopy(model, memo).train()
    rebind(copied, memo)
    return copied


@torch.no_grad()
def fill(model: nn.Module, source: nn.Module) -> None:
    """Fill a copy's weights from a separate generator; copy buffers, or zero those that are on the meta device in
    the source.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        generator = generators.setdefault(local.device, torch.Generator(local.device).manual_seed(0))
        if local.is_floating_point():
            local.uniform_(-_SPREAD, _SPREAD, generator=generator)
        else:
            local.zero_()
    for buffer, original in zip(model.buffers(), source.buffers(), strict=True):
        if original.is_meta:
            buffer.zero_()
        else:
            buffer.copy_(original)


def materialised(model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of a meta-device model on `device`, with random weights.

    Parameters get `compute_dtype` as in FSDP2's mixed precision, except those of batch norms; None keeps their dtypes.
    A transformers model without real buffers initialises them; other models must have real ones.
    """
    real = empty_copy(model, device)
    fill(real, model)
    if hasattr(real, "init_weights") and any(buffer.is_meta for buffer in model.buffers()):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(0)
            real.init_weights()  # type: ignore[operator]
    uncast = batch_norm_parameters(real)
    for parameter in real.parameters():
        if compute_dtype is not None and parameter.is_floating_point() and id(parameter) not in uncast:
            parameter.data = parameter.data.to(compute_dtype)
    return real


def shortened(model: nn.Module, units: tuple[UnitDescription, ...]) -> nn.Module:
    """Return a copy on the meta device whose lists of blocks end once they hold one of each kind.

    Real buffers keep their values; blocks outside a `nn.ModuleList` are all kept.
    """
    short = empty_copy(model, torch.device("meta"), keeps_buffers=True)
    modules = modules_by_name(short)
    lists: dict[str, list[str]] = {}
    for unit in units:
        parent = unit.fqn.rpartition(".")[0]
        if unit.span is GatherSpan.USE and isinstance(modules.get(parent), nn.ModuleList):
            lists.setdefault(parent, []).append(unit.fqn)
    for parent, blocks in lists.items():
        row = modules[parent]
        if isinstance(row, nn.ModuleList) and len(blocks) == len(row):
            keys = [block_key(modules[name]) for name in blocks]
            del row[max(map(keys.index, keys)) + 1 :]
    return short
