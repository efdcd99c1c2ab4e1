"""Blocks cut into operator units: attention, MLP, projections that are gathered one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .split.modules import is_conv1d

LEAST_SHARE = 0.02
"""Part of a block's parameters below which a child is no unit of its own: norms go to the root, which is gathered once a step."""


def operator_names(block_name: str, modules: dict[str, nn.Module], slices: Sequence[str]) -> tuple[str, ...]:
    """The units that a block is cut into, in the model's order; parameters of none of them are left to the root.

    A child of the block that has a share of its parameters is a unit. Lists are looked into, and so are children that hold
    operators in slices: there each slice and each other projection is a unit.

    Args:
        block_name: the block's name.
        modules: every module by name.
        slices: names of the modules that are slices.

    Returns:
        Names of modules, none inside another; the block's own where it has no such children.
    """
    least = LEAST_SHARE * _numel(modules[block_name])
    found: list[str] = []

    def visit(name: str) -> None:
        module = modules[name]
        if name in slices:
            found.append(name)
            return
        inside = any(other.startswith(f"{name}.") for other in slices)
        if name != block_name and not inside and not isinstance(module, (nn.ModuleList, nn.Sequential)):
            if _numel(module) >= least:
                found.append(name)
            return
        for child in module._modules:
            if f"{name}.{child}" in modules:
                visit(f"{name}.{child}")

    visit(block_name)
    return tuple(found) or (block_name,)


def large_operators(modules: dict[str, nn.Module], blocks: Sequence[str]) -> dict[str, int]:
    """Elements of each projection in the blocks, by name: those that `split_operators` takes."""
    return {
        name: module.weight.numel()
        for name, module in modules.items()
        if (type(module) is nn.Linear or is_conv1d(module)) and any(name.startswith(f"{block}.") for block in blocks)
    }


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
