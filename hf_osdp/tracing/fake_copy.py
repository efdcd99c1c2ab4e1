"""A fake copy of a module: same structure, no memory, parameters in the dtype that FSDP2 would gather them in."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..modeling.batch_norm import batch_norm_parameters

DEVICE = torch.device("cpu")
"""Where fake tensors claim to be; a CPU-only build aborts on fake CUDA tensors."""


def fake_twin(model: nn.Module, mode: FakeTensorMode, compute_dtype: torch.dtype | None) -> nn.Module:
    """Copy a module with fake parameters and buffers for a trace of one micro-batch.

    Args:
        model: real or on the meta device; it stays as it is.
        mode: the mode that the fake tensors belong to.
        compute_dtype: dtype of floating-point parameters, as FSDP2's mixed precision casts them; None keeps theirs.

    Returns:
        The copy in training mode. A parameter that has several names becomes one parameter for each: the gradients of
        the uses then appear where they arise, not at the last of them.
    """
    twin = fake_copy(model, mode, compute_dtype)
    _untie(twin)
    return twin


def fake_copy(model: nn.Module, mode: FakeTensorMode, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """Copy a module with fake parameters and buffers; what was shared stays shared.

    Args:
        model: real or on the meta device; it stays as it is.
        mode: the mode that the fake tensors belong to.
        compute_dtype: dtype of floating-point parameters, those of batch norms left out; None keeps theirs.

    Returns:
        The copy in training mode.
    """
    memo: dict[int, Any] = {}
    keeping = batch_norm_parameters(model)
    for parameter in model.parameters():
        fake = fake_like(parameter, mode, None if id(parameter) in keeping else compute_dtype)
        memo[id(parameter)] = _as_parameter(fake, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_like(buffer, mode, None)
    twin = copy.deepcopy(model, memo).train()
    for module in twin.modules():
        _rebind(module.__dict__, memo)
        _rebind(module._forward_pre_hooks, memo)
        _rebind(module._forward_hooks, memo)
    return twin


def _rebind(values: dict[Any, Any], memo: dict[int, Any]) -> None:
    """Let functions among the values, such as a forward that was replaced on the instance, use the copies of what they use."""
    for name, value in values.items():
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            values[name] = _rebound(value, memo)


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """A function that uses copies: `copy.deepcopy` keeps functions as they are, with the model in their closures."""
    if isinstance(value, (nn.Module, torch.Tensor)):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType):
        return types.MethodType(_rebound(value.__func__, memo), _rebound(value.__self__, memo))
    if isinstance(value, functools.partial):
        keywords = {name: _rebound(argument, memo) for name, argument in value.keywords.items()}
        return functools.partial(_rebound(value.func, memo), *(_rebound(argument, memo) for argument in value.args), **keywords)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    if id(value) not in memo:
        cells = tuple(types.CellType() for _ in value.__closure__)
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        memo[id(value)] = made  # before its closure, in which it may be itself
        for new, old in zip(cells, value.__closure__, strict=True):
            if old != types.CellType():  # a cell may be empty still
                new.cell_contents = _rebound(old.cell_contents, memo)
    return memo[id(value)]


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, floating_dtype: torch.dtype | None) -> torch.Tensor:
    """A fake tensor of the same shape and strides; floating-point ones get `floating_dtype` if given."""
    dtype = floating_dtype if floating_dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=DEVICE)


def _as_parameter(fake: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """What `nn.Parameter` makes of a tensor subclass, without its detour through `detach`."""
    fake.requires_grad_(requires_grad)
    fake._is_param = True
    return fake


def _untie(twin: nn.Module) -> None:
    seen: set[int] = set()
    for module in twin.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in seen:
                module._parameters[name] = parameter = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            seen.add(id(parameter))
