"""Batch normalisation: its statistics are of what this rank sees, and it stays in float32 where the rest computes in less."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


def has_running_statistics(module: nn.Module) -> bool:
    """Whether running a module's forward twice would count a batch twice, so that it cannot be recomputed in backward."""
    return any(isinstance(part, _NormBase) and part.track_running_stats for part in module.modules())


def batch_norm_parameters(model: nn.Module) -> set[int]:
    """Identities of the parameters that batch norms own."""
    return {id(p) for part in model.modules() if isinstance(part, _BatchNorm) for p in part.parameters(recurse=False)}


def batch_norm_groups(modules: dict[str, nn.Module], blocks: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Names of batch norms that are gathered together: those of each block, and each other one by itself.

    In one block they run together or not at all, as FSDP2 asks of modules that share a unit.

    Args:
        modules: every module by name.
        blocks: names of the blocks, none inside another.
    """
    groups: dict[str, list[str]] = {}
    for name, module in modules.items():
        if isinstance(module, _BatchNorm) and module.affine:
            block = next((block for block in blocks if name == block or name.startswith(f"{block}.")), name)
            groups.setdefault(block, []).append(name)
    return tuple(map(tuple, groups.values()))
