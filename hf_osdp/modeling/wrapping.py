"""Replace forwards of a model's modules; cast their inputs as FSDP2 does; recompute their activations, and what forbids that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..planner.description import Recomputation
from .compiled import CompiledForward
from .selective import selective_contexts

_Value = TypeVar("_Value")


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run `forward` inside the context; after it the module is as it was."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own


def cast_floating(value: _Value, dtype: torch.dtype | None) -> _Value:
    """Cast floating-point tensors to the compute dtype, as FSDP2 casts each unit's inputs; None leaves them."""
    if dtype is None:
        return value
    cast: _Value = tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
    return cast


def under_autocast(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Wrap a forward on CPU tensors as Accelerate runs it in one process: under autocast, its outputs in float32."""

    def run(*args: Any, **kwargs: Any) -> object:
        with torch.autocast("cpu", dtype=dtype):
            output = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype is dtype else tensor, output)

    return run


class _Recomputed:
    """A forward that saves its input, and the outputs of chosen operators, and runs again in backward."""

    def __init__(self, forward: Callable[..., Any], recomputation: Recomputation) -> None:
        update_wrapper(self, forward)
        self._forward, self.recomputation = forward, recomputation

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # Tensors among positional arguments are saved as autograd saves them, which hooks see; keywords would be held as they are.
        saved = self.recomputation.saved_calls
        contexts = functools.partial(selective_contexts, saved) if saved else noop_context_fn
        return checkpoint(self._run, len(args), tuple(kwargs), *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)

    def _run(self, positional: int, names: tuple[str, ...], *values: Any) -> object:
        return self._forward(*values[:positional], **dict(zip(names, values[positional:], strict=True)))


def recompute(module: nn.Module, recomputation: Recomputation | None = None) -> None:
    """Have a module's activations recomputed in backward, in place, all of them for None. Names of parameters and modules stay as they are.

    FSDP2's hooks lie outside, so that a unit's parameters are gathered once for the recomputation and the backward after it.
    """
    if not is_recomputed(module):
        module.forward = _Recomputed(module.forward, recomputation or Recomputation())


def recomputation_of(module: nn.Module) -> Recomputation | None:
    """Return how `recompute` or `compile_forward` was called on the module, perhaps with `offload` after it; None where it was not."""
    forward = module.__dict__.get("forward")
    kinds = (_Recomputed, CompiledForward)
    found = next((one for one in (forward, getattr(forward, "inner", None)) if isinstance(one, kinds)), None)
    return None if found is None else found.recomputation


def is_recomputed(module: nn.Module) -> bool:
    """Whether `recompute` was called on the module."""
    return recomputation_of(module) is not None


def has_running_statistics(module: nn.Module, *, itself: bool = False) -> bool:
    """Whether running a module's forward twice counts a batch twice, so that it cannot be recomputed; `itself` leaves out those inside."""
    parts = [module] if itself else module.modules()
    return any(isinstance(part, _NormBase) and part.track_running_stats for part in parts)


def batch_norm_parameters(model: nn.Module) -> set[int]:
    """Return the identities of the parameters that batch norms own."""
    return {id(p) for part in model.modules() if isinstance(part, _BatchNorm) for p in part.parameters(recurse=False)}
