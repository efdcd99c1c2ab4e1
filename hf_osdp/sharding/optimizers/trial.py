"""Trial of an optimizer on a matrix: whether it is element-wise, and what it keeps."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...tracing.memory_tracker import MemoryTracker

ROWS, COLUMNS, _SHARDS = 96, 64, 3
"""The matrix has more elements than the 4096 from which 8-bit optimizers quantize, a shard of it fewer."""
_STEPS = 2
_LEARNING_RATE = 0.1
"""Learning rate of the trial; a schedule may begin at 0, with which nothing is updated."""


def difference_on_shards(optimizer: torch.optim.Optimizer) -> float | None:
    """Take two steps on a matrix for each group, whole, in three shards of rows, and in three of columns, without
    changing the optimizer itself.

    Return the largest difference from the whole as a fraction of the largest update; None if repeated steps
    on the whole matrix, in the parameters' own dtype, give different results. An element-wise optimizer differs only
    by rounding; one that uses norms, factors or products of a whole parameter differs by more. Raise ValueError if
    nothing was updated, as by an optimizer that steps others inside.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(1, ROWS + 1).unsqueeze(1)  # so that all shards have different norms
    before = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in optimizer.param_groups]
    gradients = [[rows * torch.randn(ROWS, COLUMNS, generator=generator) for _ in before] for _ in range(_STEPS)]
    dtype = torch.float32 if hasattr(optimizer, "bf16_stochastic_round") else _first_parameter(optimizer).dtype
    once, again = (_after_steps(optimizer, before, gradients, 1, dtype=dtype) for _ in range(2))
    if not all(
        torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True) for one, other in zip(once, again, strict=True)
    ):
        return None
    whole = _after_steps(optimizer, before, gradients, 1)
    in_parts = [_after_steps(optimizer, before, gradients, _SHARDS, dim=dim) for dim in (0, 1)]
    update = max(float((after - start).abs().max()) for after, start in zip(whole, before, strict=True))
    difference = max(
        float((one - other).abs().max()) for parts in in_parts for one, other in zip(whole, parts, strict=True)
    )
    if not update:
        raise ValueError("it updates nothing")
    return difference / update


def _first_parameter(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return next(parameter for group in optimizer.param_groups for parameter in group["params"])


def _after_steps(
    optimizer: torch.optim.Optimizer,
    before: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    shards: int,
    *,
    dim: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    device = _first_parameter(optimizer).device
    device = torch.device("cpu") if device.type == "meta" else device
    parameters = [
        [torch.nn.Parameter(shard.to(device, dtype, copy=True)) for shard in matrix.chunk(shards, dim)]
        for matrix in before
    ]
    trial = _trial(optimizer, parameters)
    for step_gradients in gradients:
        for pieces, gradient in zip(parameters, step_gradients, strict=True):
            for piece, shard in zip(pieces, gradient.chunk(shards, dim), strict=True):
                piece.grad = shard.to(device, dtype, copy=True)
        type(trial).step(trial)
    if shards > 1 and not all(isinstance(key, torch.Tensor) for key in trial.state):
        return [torch.full_like(matrix, torch.inf) for matrix in before]  # states by names, not of shards
    return [torch.cat([piece.detach().cpu() for piece in pieces], dim) for pieces in parameters]


def _trial(optimizer: torch.optim.Optimizer, parameters: Sequence[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Copy an optimizer with other parameters and a visible learning rate, without state and hooks."""
    trial = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        trial.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    trial.state = defaultdict(dict)
    trial.param_groups = [
        {**group, "params": pieces} for group, pieces in zip(optimizer.param_groups, parameters, strict=True)
    ]
    for group in trial.param_groups:
        if "lr" in group:
            group["lr"] = (
                torch.full_like(group["lr"], _LEARNING_RATE)
                if isinstance(group["lr"], torch.Tensor)
                else _LEARNING_RATE
            )
    return trial


def after_step(optimizer: torch.optim.Optimizer, *shape: int) -> tuple[list[Any], float]:
    """Return the states of a matrix after two steps, in the group that keeps most, and a step's temporaries in
    multiples of the matrix.
    """
    matrices = [torch.nn.Parameter(torch.ones(shape)) for _ in optimizer.param_groups]
    trial, tracker = _trial(optimizer, [[matrix] for matrix in matrices]), MemoryTracker(block_bytes=1)
    with torch.compiler.set_stance("force_eager"):  # compiled code does not run under the tracker
        for counted in (nullcontext(), tracker):
            for matrix in matrices:
                matrix.grad = torch.ones_like(matrix)
            with counted:
                type(trial).step(trial)
    states = [
        [v for v in trial.state[m].values() if not isinstance(v, (int, float, str, type(None)))] for m in matrices
    ]
    kept = [[v for v in values if not isinstance(v, torch.Tensor) or v.numel() > 1] for values in states]
    return max(
        kept, key=lambda values: sum(getattr(value, "nbytes", 0) for value in values)
    ), tracker.peak_bytes / matrices[0].nbytes
