"""Modules that keep their parameters in parts, and names of modules and parts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module"


class InParts(nn.Module):
    """A module that keeps its parameters in other modules, which become units of their own."""

    several_calls = False
    """Whether more than one module calls the parts."""

    def part_modules(self) -> Iterable[nn.Module]:
        """Return the modules that have the parts."""
        raise NotImplementedError


def canonical_name(name: str) -> str:
    """Return the name of a module or parameter without the parts that torch's `checkpoint_wrapper` inserts."""
    return ".".join(part for part in name.split(".") if part != CHECKPOINT_WRAPPER)


def part_names(model: nn.Module) -> dict[str, bool]:
    """Return the names of the modules that are parts, each once, in the model's order, and whether several calls use
    them: a tied head's parts have its embedding's names.
    """
    cut = [module for module in model.modules() if isinstance(module, InParts)]
    parts, shared = (
        {id(part) for module in modules for part in module.part_modules()}
        for modules in (cut, [module for module in cut if module.several_calls])
    )
    return {canonical_name(name): id(one) in shared for name, one in model.named_modules() if id(one) in parts}
