"""Replace forwards of a model's modules: compile them in place, cast inputs like FSDP2, recompute activations."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any

import torch
from torch import fx, nn
from torch._C import _len_torch_dispatch_stack
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._python_dispatch import _disable_current_modes, _get_dispatch_stack_at
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..planner.description import Recomputation
from .replaced import setting
from .selective import selective_contexts

_MOST_VARIANTS = 64
"""Compiled variants of one class of blocks: each budget, training or evaluation, static or varying lengths. Dynamo's
own limit is 8, beyond which blocks run without compilation."""
Compiler = Callable[[Callable[..., Any], Recomputation | None], Callable[..., Any]]
"""Function from a forward and its recomputation to the compiled forward."""
_COMPILER: ContextVar[Compiler | None] = ContextVar("_COMPILER", default=None)
_log = logging.getLogger(__name__)


class CompiledForward:
    """Forward that torch compiles with Inductor on its first call; hooks of its module, such as FSDP2's, are not
    compiled.
    """

    def __init__(self, forward: Callable[..., Any], recomputation: Recomputation | None) -> None:
        update_wrapper(self, forward)
        self._forward, self.recomputation = forward, recomputation
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if self._compiled is None:
            limits = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, _MOST_VARIANTS)
            self._compiled = torch.compile(self._forward, backend=_inductor(budget_of(self.recomputation)))
        modes = [_get_dispatch_stack_at(place) for place in range(_len_torch_dispatch_stack())]
        ours = bool(modes) and all(getattr(mode, "leaves_compiled_code", False) for mode in modes)
        with (
            _disable_current_modes() if ours else nullcontext()
        ):  # torch does not compile under a foreign mode, which sees all operators
            return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # a copy of the model compiles its own


def compile_forward(module: nn.Module, recomputation: Recomputation | None = None) -> None:
    """Compile a block's forward in place, before it is sharded; names of parameters and modules are unchanged.

    `recomputation` limits what is saved for backward; None saves what torch's partitioner considers fastest.
    """
    compiler = _COMPILER.get()
    module.forward = (
        CompiledForward(module.forward, recomputation) if compiler is None else compiler(module.forward, recomputation)
    )


def without_wrappers(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return a model without the wrappers of `torch.compile(module)`, around itself or its modules, and whether there
    were any.

    Names of parameters below a wrapper begin with `_orig_mod.`, also in saved files, which `from_pretrained` would not
    find.

    Raises:
        ValueError: a wrapper has another backend than Inductor.
    """
    dynamo = sys.modules.get("torch._dynamo")  # without it nothing is wrapped
    wrappers = {m for m in model.modules() if isinstance(m, dynamo.OptimizedModule)} if dynamo is not None else set()
    if any(wrapper.get_compiler_config() is None for wrapper in wrappers):
        raise ValueError(
            "torch.compile(model) with a backend other than inductor cannot be planned; use inductor, or leave it out."
        )
    for module in list(model.modules()) if wrappers else ():
        for name, child in module._modules.items():
            if child in wrappers:
                module._modules[name] = child._orig_mod  # type: ignore[union-attr, assignment]
    unwrapped: nn.Module = model._orig_mod if model in wrappers else model  # type: ignore[assignment]
    if wrappers:
        _log.warning(
            "torch.compile(model) was taken off, and the plan compiles the blocks with Inductor's defaults; its mode,"
            " fullgraph, dynamic"
            " and options are not used. Leave torch.compile out and set OSDPConfig(compile=True) instead."
        )
    return unwrapped, bool(wrappers)


def compiled_by(compiler: Compiler) -> AbstractContextManager[None]:
    """Make `compile_forward` use another compiler inside the context, for example in a simulation."""
    return setting(_COMPILER, compiler)


def is_compiled(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), CompiledForward)


def budget_of(recomputation: Recomputation | None) -> float:
    """Return torch's `activation_memory_budget` for the recomputation of a compiled block."""
    return 1.0 if recomputation is None else recomputation.budget or 0.0


@functools.cache
def _inductor(budget: float) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    """Return dynamo's backend for a budget: one object per budget, because dynamo distinguishes compiled code by
    backend, not by budget.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> object:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(module, inputs)

    return backend


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:  # noqa: ANN401
    """Cast floating-point tensors to the compute dtype, as FSDP2 casts each unit's inputs; None changes nothing."""
    return (
        tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
        if dtype
        else value
    )


def under_autocast(forward: Callable[..., Any], dtype: torch.dtype, device_type: str = "cpu") -> Callable[..., Any]:
    """Wrap a forward as Accelerate does in one process: under autocast, with outputs in float32."""

    def run(*args: Any, **kwargs: Any) -> object:
        with torch.autocast(device_type, dtype=dtype):
            output = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype is dtype else tensor, output)

    return run


class _Recomputed:
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
    if recomputation_of(module) is None:
        module.forward = _Recomputed(module.forward, recomputation or Recomputation())


def recomputation_of(module: nn.Module) -> Recomputation | None:
    """Return the recomputation that `recompute` or `compile_forward` set on the module, also under `offload`; None
    if there is none.
    """
    forward = module.__dict__.get("forward")
    kinds = (_Recomputed, CompiledForward)
    found = next((one for one in (forward, getattr(forward, "inner", None)) if isinstance(one, kinds)), None)
    return None if found is None else found.recomputation


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
