"""Compile a module's forward in place, with a part of the memory that it would save activations in."""

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
from torch.utils._python_dispatch import _disable_current_modes, _get_dispatch_stack_at

from ..planner.description import Recomputation

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
        with _disable_current_modes() if ours else nullcontext():  # under a mode of others torch compiles nothing, and that sees all
            return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # a copy of the model compiles its own


def compile_forward(module: nn.Module, recomputation: Recomputation | None = None) -> None:
    """Compile a module's forward in place; names of parameters and modules stay as they are.

    Args:
        module: a block, before it is sharded.
        recomputation: how little is saved for backward; None saves what torch's partitioner takes to be quickest.
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
    """Whether `compile_forward` was called on the module."""
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
