"""Compile the forward of blocks in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_dispatch_stack_at

from ...modeling.split.apply import losses_of
from ...modeling.units import class_of, modules_by_name
from ...modeling.wrapping import RecomputingForward, SkippableMode
from ...planner.block_forms import BlockForms
from ...planner.description import GatherSpan, UnitDescription

_MOST_VARIANTS = 64
"""Compiled variants of one class of blocks: each budget, training or evaluation, static or varying lengths. Dynamo's
own limit is 8, beyond which blocks run without compilation."""
Compiler = Callable[[nn.Module, Callable[..., Any], float], Callable[..., Any]]
"""Function from a module, its forward and torch's `activation_memory_budget` to the compiled forward."""


def change_blocks(model: nn.Module, forms: BlockForms, units: Iterable[UnitDescription] | None = None) -> None:
    """Compile a model's blocks, before they are recomputed and sharded, and with them the loss of a chunk; names of
    parameters and modules are unchanged.

    Only blocks that are units are compiled, not modules of their class elsewhere; without `units`, all of the class.
    """
    modules = modules_by_name(model)
    names = modules if units is None else [u.module_names[0] for u in units if is_changed(forms, u)]
    blocks = [modules[n] for n in names if n in modules and forms.changes(class_of(modules[n]).__name__)]
    for module in (*blocks, *(losses_of(model) if blocks else ())):
        module.forward = CompiledForward(module)


def is_changed(forms: BlockForms, unit: UnitDescription) -> bool:
    """Return whether a unit is a block that runs in another form."""
    return unit.span is GatherSpan.USE and len(unit.module_names) == 1 and forms.changes(unit.class_name)


class CompiledForward(RecomputingForward):
    """Forward that is compiled on its first call; hooks of its module, such as FSDP2's, are not compiled.

    Without a recomputation, what torch's partitioner considers fastest is saved for backward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.forward)
        self._module, self._compile = module, COMPILER.get()
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if self._compiled is None:
            budget = 1.0 if self.recomputation is None else self.recomputation.budget or 0.0
            self._compiled = self._compile(self._module, self._forward, budget)
        modes = [_get_dispatch_stack_at(place) for place in range(_len_torch_dispatch_stack())]
        skips = bool(modes) and all(isinstance(mode, SkippableMode) for mode in modes)
        for mode in modes if skips else ():  # torch does not compile under another mode, which sees all operators
            mode.skipped = True
        with _disable_current_modes() if skips else nullcontext():
            return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # a copy of the model compiles its own


def _compiled(module: nn.Module, forward: Callable[..., Any], budget: float) -> Callable[..., Any]:
    for part in module.modules():
        if hasattr(part, "_fsdp_use_orig_params"):  # by FSDP2's marks dynamo knows that its weights change
            part._is_fsdp_managed_module = True  # type: ignore[assignment]
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _MOST_VARIANTS)
    return torch.compile(forward, backend=_inductor(budget))


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


COMPILER: ContextVar[Compiler] = ContextVar("COMPILER", default=_compiled)
"""The compiler of new `CompiledForward`s; a trace has its own."""
