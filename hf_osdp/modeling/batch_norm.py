"""Batch normalisation: its statistics are of this rank's samples, and it stays in float32 where the rest computes in less."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


def has_running_statistics(module: nn.Module, *, itself: bool = False) -> bool:
    """Whether running a module's forward twice would count a batch twice, so that it cannot be recomputed in backward.

    Args:
        module: any module.
        itself: leave out the modules inside it.
    """
    parts = [module] if itself else module.modules()
    return any(isinstance(part, _NormBase) and part.track_running_stats for part in parts)


def batch_norm_parameters(model: nn.Module) -> set[int]:
    """Return the identities of the parameters that batch norms own."""
    return {id(p) for part in model.modules() if isinstance(part, _BatchNorm) for p in part.parameters(recurse=False)}


def batch_norm_groups(modules: dict[str, nn.Module], blocks: Iterable[str], tied: Container[str] = ()) -> tuple[tuple[str, ...], ...]:
    """Return the names of batch norms that are gathered together: those of each block, and each other one by itself.

    In one block they run together or not at all, as FSDP2 asks of modules that share a unit.

    Args:
        modules: every module by name.
        blocks: names of the blocks, none inside another.
        tied: names of modules that share parameters with others, which are in one unit already.
    """
    groups: dict[str, list[str]] = {}
    for name, module in modules.items():
        if isinstance(module, _BatchNorm) and module.affine and name not in tied:
            block = next((block for block in blocks if name == block or name.startswith(f"{block}.")), name)
            groups.setdefault(block, []).append(name)
    return tuple(map(tuple, groups.values()))
