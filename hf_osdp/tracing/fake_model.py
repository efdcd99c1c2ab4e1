"""Copy a model with fake tensors: same structure, no memory, parameters in the dtype that FSDP2 gathers; watch
reads of its parameters.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..modeling.build import disable_cache
from ..modeling.quantized import packed_copy
from ..modeling.units import unwrapped
from ..modeling.watched_parameters import WatchedParameters
from ..modeling.wrapping import batch_norm_parameters, frozen_norms_keep_dtype
from ..planner.description import GatherSpan, UnitDescription
from .tensors import fake_like, tensors_in

_LIBRARIES = (
    "accelerate",
    "datasets",
    "hf_osdp",
    "peft",
    "sentence_transformers",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
)


def fake_copy(
    model: nn.Module, mode: FakeTensorMode, compute_dtype: torch.dtype | None = None, *, untie: bool = False
) -> nn.Module:
    """Copy a module, in training mode, with fake parameters and buffers; it may be real or on the meta device, and is
    not changed.

    Floating-point parameters get `compute_dtype`, except those of batch norms; None keeps their dtypes. With `untie`,
    a shared parameter becomes one parameter for each of its names, so that each use has its own gradient.
    """
    model, memo = packed_copy(model), dict[int, Any]()
    uncast = batch_norm_parameters(model)
    for parameter in model.parameters():
        fake = fake_like(parameter, mode, None if id(parameter) in uncast else compute_dtype)
        fake.requires_grad_(parameter.requires_grad)
        fake._is_param = True  # as `nn.Parameter` does for a tensor subclass, but without `detach`
        memo[id(parameter)] = fake
    for buffer in model.buffers():
        memo[id(buffer)] = fake_like(buffer, mode)
    fakes = copy.deepcopy(model, memo).train()
    disable_cache(fakes)
    if compute_dtype is not None:
        frozen_norms_keep_dtype(fakes)
    rebind(fakes, memo)
    if untie:
        _untie(fakes)
    return fakes


def _untie(model: nn.Module) -> None:
    seen: set[int] = set()
    for module in model.modules():
        for name, tied in module._parameters.items():
            if tied is not None and id(tied) in seen:
                module._parameters[name] = tied = nn.Parameter(tied.detach(), requires_grad=tied.requires_grad)
            seen.add(id(tied))


def rebind(model: nn.Module, memo: dict[int, Any]) -> None:
    """Make the hooks and replaced forwards of a copied model use copies; `memo` is that of `copy.deepcopy`."""
    for module in model.modules():
        hooked: tuple[dict[Any, Any], ...] = (module.__dict__, module._forward_pre_hooks, module._forward_hooks)
        for functions in hooked:
            for name, value in functions.items():
                if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                    functions[name] = rebound(value, memo)


def rebound(value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401
    """Return a copy of a function, such as a forward replaced on an instance, that uses copies; `copy.deepcopy`
    shares its closure.
    """
    if isinstance(value, (nn.Module, torch.Tensor)):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType):
        return types.MethodType(rebound(value.__func__, memo), rebound(value.__self__, memo))
    if isinstance(value, functools.partial):
        keywords = {name: rebound(argument, memo) for name, argument in value.keywords.items()}
        return functools.partial(
            rebound(value.func, memo), *(rebound(argument, memo) for argument in value.args), **keywords
        )
    if not isinstance(value, types.FunctionType):
        return _own_state(value, memo)
    if not value.__closure__:
        return value
    if id(value) not in memo:
        cells = tuple(types.CellType() for _ in value.__closure__)
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        memo[id(value)] = made  # before its closure, which may refer to the function itself
        for new, old in zip(cells, value.__closure__, strict=True):
            if old != types.CellType():  # a cell may still be empty
                new.cell_contents = rebound(old.cell_contents, memo)
    return memo[id(value)]


def _own_state(value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401
    """Return a copy of a container or of a user's object, which a hook or a loss may change; objects of libraries
    are not copied.
    """
    if _is_of_library(value) and not isinstance(value, (dict, list, set, deque)):
        return memo.get(id(value), value)
    parts = getattr(value, "__dict__", {}).values()
    memo |= {id(part): part for part in parts if id(part) not in memo and _is_of_library(part)}
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # for example, it holds a file
        return value


def _is_of_library(value: object) -> bool:
    """Return whether a value's class or one of its base classes, such as `Dataset` or `Trainer`, is from a library."""
    return any(cls.__module__.partition(".")[0] in _LIBRARIES for cls in type(value).__mro__)


def stored_tensors_releaser(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores attributes that hold tensors: RecurrentGemma's modules store their last state
    as attributes.
    """
    before = [(values, dict(values)) for inner in module.modules() for values in (inner.__dict__, inner._buffers)]

    def release() -> None:
        for values, earlier in before:
            for name, value in list(values.items()):
                if value is not earlier.get(name) and any(True for _ in tensors_in(value)):
                    if name in earlier:
                        values[name] = earlier[name]
                    else:
                        del values[name]

    return release


class OutsideReads:
    """Find, as a context, the units freed after use whose parameters are read as attributes while none of their
    modules runs.

    At run time such a read, for example of the head's weight by a loss, gathers the unit until the end of backward.
    """

    def __init__(self, modules: dict[str, nn.Module], units: Sequence[UnitDescription]) -> None:
        self.found: set[int] = set()
        self._running: list[int] = []
        self._owners: dict[nn.Module, int] = {
            unwrapped(modules[spec.name.rpartition(".")[0]]): index
            for index, unit in enumerate(units)
            if unit.span is GatherSpan.USE
            for spec in unit.parameters
        }

    def __enter__(self) -> OutsideReads:
        for module, unit in self._owners.items():
            module.__dict__["_parameters"] = WatchedParameters(module, unit, self._read)
        return self

    def __exit__(self, *exception: object) -> None:
        for module in self._owners:
            module.__dict__["_parameters"] = dict(module._parameters)

    def wrap_forward(self, unit: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of one of a unit's modules, so that the unit counts as running during it."""

        def wrapped(*args: Any, **kwargs: Any) -> object:
            self._running.append(unit)
            try:
                return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return wrapped

    def _read(self, unit: int) -> None:
        in_backward = torch._C._current_graph_task_id() != -1  # in backward only recomputed forwards run
        if unit not in self._running and not in_backward:
            self.found.add(unit)
