"""Replace forwards of a model's modules: compiled in place, with inputs cast as FSDP2 does, with activations recomputed, if that may be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from .selective import selective_contexts

_MOST_VARIANTS = 64
"""Of the code of one class of blocks: a budget, training or evaluation, static or varying lengths each make one. Dynamo's own limit is 8,
beyond which blocks would run as they are."""
Compiler = Callable[[Callable[..., Any], Recomputation | None], Callable[..., Any]]
"""From a forward and a way to recompute it to the compiled one."""
_COMPILER: ContextVar[Compiler | None] = ContextVar("_COMPILER", default=None)


class CompiledForward:
    """A forward that torch compiles when it is first called, with Inductor; hooks of its module, such as FSDP2's, stay outside."""

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
        with _disable_current_modes() if ours else nullcontext():  # torch compiles nothing under a foreign mode, which sees all operators
            return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # a copy of the model compiles its own


def compile_forward(module: nn.Module, recomputation: Recomputation | None = None) -> None:
    """Compile a block's forward in place, before it is sharded; names of parameters and modules stay as they are.

    `recomputation` says how little is saved for backward; None saves what torch's partitioner takes to be quickest.
    """
    compiler = _COMPILER.get()
    module.forward = CompiledForward(module.forward, recomputation) if compiler is None else compiler(module.forward, recomputation)


@contextmanager
def compiled_by(compiler: Compiler) -> Iterator[None]:
    """Have `compile_forward` use another compiler inside the context, as a simulation does."""
    token = _COMPILER.set(compiler)
    try:
        yield
    finally:
        _COMPILER.reset(token)


def is_compiled(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), CompiledForward)


def budget_of(recomputation: Recomputation | None) -> float:
    """Return torch's `activation_memory_budget` for a way to recompute a compiled block."""
    return 1.0 if recomputation is None else recomputation.budget or 0.0


@functools.cache
def _inductor(budget: float) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    """Return dynamo's backend for a budget: one object each, since dynamo tells compiled code apart by it, and not by the budget."""

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> object:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(module, inputs)

    return backend


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run `forward` inside the context; after it the module is as it was."""
    own = {key: value for key, value in vars(module).items() if key == "forward"}
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        vars(module).update(own)


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:  # noqa: ANN401
    """Cast floating-point tensors to the compute dtype, as FSDP2 casts each unit's inputs; None leaves them."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value) if dtype else value


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
    if recomputation_of(module) is None:
        module.forward = _Recomputed(module.forward, recomputation or Recomputation())


def recomputation_of(module: nn.Module) -> Recomputation | None:
    """Return how `recompute` or `compile_forward` was called on the module, perhaps with `offload` after it; None where it was not."""
    forward = module.__dict__.get("forward")
    kinds = (_Recomputed, CompiledForward)
    found = next((one for one in (forward, getattr(forward, "inner", None)) if isinstance(one, kinds)), None)
    return None if found is None else found.recomputation


def has_running_statistics(module: nn.Module, *, itself: bool = False) -> bool:
    """Whether running a module's forward twice counts a batch twice, so that it cannot be recomputed; `itself` leaves out those inside."""
    parts = [module] if itself else module.modules()
    return any(isinstance(part, _NormBase) and part.track_running_stats for part in parts)


def batch_norm_parameters(model: nn.Module) -> set[int]:
    return {id(p) for part in model.modules() if isinstance(part, _BatchNorm) for p in part.parameters(recurse=False)}
