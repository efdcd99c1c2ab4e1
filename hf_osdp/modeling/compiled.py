"""Compile the forward of blocks in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import update_wrapper
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_dispatch_stack_at

from ..planner.block_forms import BlockForms
from ..planner.description import GatherSpan, UnitDescription
from .split.apply import losses_of
from .units import class_of, modules_by_name
from .wrapping import SkippableMode

_MOST_VARIANTS = 64
"""Compiled variants of one class of blocks: kinds of blocks, training or evaluation, static or varying lengths.
Dynamo's own limit is 8, beyond which blocks run without compilation."""


def compile_blocks(model: nn.Module, forms: BlockForms, units: Iterable[UnitDescription] | None = None) -> None:
    """Compile a model's blocks, before they are recomputed and sharded, and with them the loss of a chunk; names of
    parameters and modules are unchanged.

    Only blocks that are units are compiled, not modules of their class elsewhere; without `units`, all of the class.
    """
    modules = modules_by_name(model)
    in_use = (unit for unit in units or () if unit.span is GatherSpan.USE)
    names = modules if units is None else [name for unit in in_use for name in unit.module_names]
    blocks = [modules[n] for n in names if n in modules and forms.compiles(class_of(modules[n]).__name__)]
    for module in (*blocks, *(losses_of(model) if blocks else ())):
        module.forward = CompiledForward(module)


class CompiledForward:
    """Forward that is compiled on its first call; hooks of its module, such as FSDP2's, are not compiled."""

    def __init__(self, module: nn.Module) -> None:
        update_wrapper(self, module.forward)
        self._module, self._forward = module, module.forward
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if self._compiled is None:
            self._compiled = _compiled(self._module, self._forward)
        modes = [_get_dispatch_stack_at(place) for place in range(_len_torch_dispatch_stack())]
        skips = bool(modes) and all(isinstance(mode, SkippableMode) for mode in modes)
        for mode in modes if skips else ():  # torch does not compile under another mode, which sees all operators
            mode.skipped = True
        with _disable_current_modes() if skips else nullcontext():
            return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # a copy of the model compiles its own


def _compiled(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    for part in module.modules():
        if hasattr(part, "_fsdp_use_orig_params"):  # by FSDP2's marks dynamo knows that its weights change
            part._is_fsdp_managed_module = True  # type: ignore[assignment]
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _MOST_VARIANTS)
    return torch.compile(forward)
