"""Whether an optimizer that nobody knows goes element by element: it is tried on a matrix, and on its shards."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

_ROWS, _COLUMNS, _SHARDS = 96, 64, 3
"""More elements than where 8-bit optimizers begin to quantize (4096), fewer in a shard."""
_STEPS = 2
_RATE = 0.1
"""A schedule may begin at 0, where no optimizer shows what it does."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def difference_on_shards(optimizer: torch.optim.Optimizer) -> float:
    """Take two steps on a matrix for each group, whole and in three shards of rows. The optimizer itself stays as it is.

    An element-wise optimizer gives the same but for rounding. One that takes norms, factors or products of a whole parameter does not.

    Args:
        optimizer: with at least one parameter; its class, its options and those of its groups are tried.

    Returns:
        The largest difference between the two, as a part of the largest update; NaN where nothing was updated.

    Raises:
        Exception: what the optimizer raises on such parameters.
    """
    device = next(iter(optimizer.param_groups[0]["params"])).device
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(1, _ROWS + 1).unsqueeze(1)  # so that no two shards have one norm
    before = [torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in optimizer.param_groups]
    gradients = [[rows * torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in before] for _ in range(_STEPS)]
    whole = [torch.cat(shards) for shards in _stepped(optimizer, before, gradients, 1, device)]
    parts = [torch.cat(shards) for shards in _stepped(optimizer, before, gradients, _SHARDS, device)]
    update = max(float((after - start).abs().max()) for after, start in zip(whole, before, strict=True))
    apart = max(float((one - other).abs().max()) for one, other in zip(whole, parts, strict=True))
    return apart / update if update else float("nan")


def _stepped(
    optimizer: torch.optim.Optimizer,
    before: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    shards: int,
    device: torch.device,
) -> list[list[torch.Tensor]]:
    """Matrices after the steps, each in its shards."""
    parameters = [[torch.nn.Parameter(shard.to(device, copy=True)) for shard in matrix.chunk(shards)] for matrix in before]
    twin = _twin(optimizer, parameters)
    for of_step in gradients:
        for pieces, gradient in zip(parameters, of_step, strict=True):
            for piece, shard in zip(pieces, gradient.chunk(shards), strict=True):
                piece.grad = shard.to(device, copy=True)
        type(twin).step(twin)
    return [[piece.detach().cpu() for piece in pieces] for pieces in parameters]


def _twin(optimizer: torch.optim.Optimizer, parameters: Sequence[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """The same kind of optimizer with other parameters, no state and no hooks."""
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        twin.__dict__[name] = OrderedDict() if name in _HOOKS else copy.copy(value) if isinstance(value, (dict, list, set)) else value
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, **_rate(group), "params": pieces} for group, pieces in zip(optimizer.param_groups, parameters, strict=True)
    ]
    return twin


def _rate(group: dict[str, Any]) -> dict[str, Any]:
    """A learning rate that shows."""
    if "lr" not in group:
        return {}
    return {"lr": torch.full_like(group["lr"], _RATE) if isinstance(group["lr"], torch.Tensor) else _RATE}
