"""Replace forwards of a model's modules: cast inputs like FSDP2, recompute activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..planner.description import Recomputation
from .selective import selective_contexts


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:  # noqa: ANN401
    """Cast floating-point tensors to the compute dtype, as FSDP2 casts each unit's inputs; None changes nothing."""
    return (
        tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
        if dtype
        else value
    )


def under_autocast(forward: Callable[..., Any], dtype: torch.dtype, device_type: str = "cpu") -> Callable[..., Any]:
    """Wrap a forward as Accelerate does in one process: under autocast, with outputs in float32. A method stays one,
    so that a copy of its module runs the copy.
    """
    own = getattr(forward, "__func__", forward)
    wrapped = convert_outputs_to_fp32(torch.autocast(device_type, dtype=dtype)(own))
    return wrapped if own is forward else MethodType(wrapped, forward.__self__)  # type: ignore[attr-defined]


class Recomputed:
    """Forward that saves its input and the outputs of chosen operators, and runs again in backward."""

    def __init__(self, forward: Callable[..., Any], recomputation: Recomputation) -> None:
        update_wrapper(self, forward)
        self._forward, self.recomputation = forward, recomputation

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # Autograd saves positional tensors through saved-tensor hooks; keyword arguments would be kept without hooks.
        saved = self.recomputation.saved_calls
        contexts = functools.partial(selective_contexts, saved) if saved else noop_context_fn
        return checkpoint(
            self._run, len(args), tuple(kwargs), *args, *kwargs.values(), use_reentrant=False, context_fn=contexts
        )

    def _run(self, positional: int, names: tuple[str, ...], *values: Any) -> object:
        return self._forward(*values[:positional], **dict(zip(names, values[positional:], strict=True)))


def recompute(module: nn.Module, recomputation: Recomputation | None = None) -> None:
    """Recompute a module's activations in backward, all of them for None; names of parameters and modules are
    unchanged.

    FSDP2's hooks run outside, so that a unit's parameters are gathered once for both the recomputation and the
    backward.
    """
    module.forward = Recomputed(module.forward, recomputation or Recomputation())


class SkippableMode(TorchDispatchMode):
    """Mode that code may skip whose operators torch would have to run one by one; `skipped` says whether any did."""

    skipped = False

    def __exit__(self, *exception: Any) -> None:
        """Leave this mode, and not one that was entered inside the context and stays, as that of a callback that
        counts FLOPs.
        """
        modes, above = _get_current_dispatch_mode_stack(), []
        while any(mode is self for mode in modes) and modes[-1] is not self:
            above.append(_pop_mode())
            modes.pop()
        super().__exit__(*exception)
        for mode in reversed(above):
            _push_mode(mode)


def in_any_mode() -> bool:
    """Whether operators run under some dispatch mode. Leaving it takes off the mode that was entered last."""
    return bool(_get_current_dispatch_mode_stack())


def has_running_statistics(module: nn.Module, *, itself: bool = False) -> bool:
    """Whether a module cannot be recomputed: a second forward would update running statistics twice; `itself` skips
    submodules.
    """
    parts = [module] if itself else module.modules()
    return any(isinstance(part, _NormBase) and part.track_running_stats for part in parts)


def frozen_norms_keep_dtype(model: nn.Module) -> None:
    """Let frozen batch norms, as DETR's backbones have, return their input's dtype: their buffers stay in float32, and
    the next convolution, whose weights are gathered in 16 bits, takes no other.
    """
    for module in model.modules():
        if "FrozenBatchNorm" in type(module).__name__ and _to_dtype_of_input not in module._forward_hooks.values():
            module.register_forward_hook(_to_dtype_of_input)


def _to_dtype_of_input(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return output.to(args[0].dtype)


def batch_norm_parameters(model: nn.Module) -> set[int]:
    return {id(p) for part in model.modules() if isinstance(part, _BatchNorm) for p in part.parameters(recurse=False)}
