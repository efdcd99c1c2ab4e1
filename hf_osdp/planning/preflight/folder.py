"""Checks of the output folder: whether it is writable, and how many checkpoints it has room for."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...planner.description import UnitDescription
from ...planner.job import OptimizerSpec
from ...quantities import format_bytes
from .findings import Check, Finding, error, warning


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder that a run writes to, and the size of what it writes."""

    path: str | Path
    saves: bool = True
    """Whether checkpoints are written while it trains."""
    limit: int | None = None
    """How many are kept (`save_total_limit`); None keeps all."""
    states: bool = True
    """Whether they hold the optimizer's states."""
    adapters: bool = False
    """Whether they hold trained parameters alone, as those of peft do."""


def checkpoint_bytes(units: Sequence[UnitDescription], optimizer: OptimizerSpec | None, *, adapters: bool = False) -> int:
    """Return the bytes of one checkpoint, whatever the plan: each parameter once, and the states of those that are trained.

    `Σ_p n_p b_p [p is saved] + s Σ_p n_p b_p [p is trained]` with n elements of b bytes and s states; schedulers, random states and
    the Trainer's notes are kilobytes.

    Args:
        units: of the model as it will be trained.
        optimizer: what it holds for each parameter; None for weights alone.
        adapters: trained parameters alone are saved.
    """
    parameters = [parameter for unit in units for parameter in unit.parameters]
    trained = sum(p.numel * p.dtype.itemsize for p in parameters if p.requires_grad)
    weights = trained if adapters else sum(p.numel * p.dtype.itemsize for p in parameters)
    return weights + (0 if optimizer is None else optimizer.states * trained)


def not_writable(folder: RunFolder) -> Finding | None:
    """Find that no file can be made in the folder, or in its nearest existing parent. Nothing is left behind."""
    where = _nearest(Path(folder.path))
    reason = "is a file" if not where.is_dir() else None
    if reason is None:
        try:
            with tempfile.TemporaryFile(dir=where) as handle:
                handle.write(b"\0")
        except OSError as problem:
            reason = f"cannot be written ({problem.strerror})"
    if reason is None:
        return None
    shown = folder.path if where == Path(folder.path).absolute() else f"{folder.path}: {where}"
    return error(Check.FOLDER, f"Output folder {shown} {reason}; give a folder that can be written.")


def too_small(folder: RunFolder, units: Sequence[UnitDescription], optimizer: OptimizerSpec) -> Finding | None:
    """Find that checkpoints do not fit on the disk: while one is written, one more than are kept. Quotas are not seen."""
    size = checkpoint_bytes(units, optimizer if folder.saves and folder.states else None, adapters=folder.adapters)
    free = shutil.disk_usage(_nearest(Path(folder.path))).free
    kept = 1 if folder.limit is None else folder.limit
    wanted = max(1, kept + 1 - _checkpoints(Path(folder.path))) if folder.saves else 1
    if wanted * size <= free:
        return None
    has = f"the disk of {folder.path} has {format_bytes(free)} free"
    if not folder.saves:
        return warning(Check.FOLDER, f"The model takes {format_bytes(size)}, but {has}; free some space before it is saved.")
    if free < size:
        return error(Check.FOLDER, f"A checkpoint takes {format_bytes(size)}, but {has}; free some space, or give another folder.")
    return warning(
        Check.FOLDER,
        f"A checkpoint takes {format_bytes(size)}, and {has}: room for {free // size} of the {wanted} that will lie there at once; free"
        " some space, give another folder, or keep fewer with save_total_limit.",
    )


def _nearest(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _checkpoints(path: Path) -> int:
    """Return how many checkpoints lie there already."""
    return sum(1 for _ in path.glob("checkpoint[-_]*")) if path.is_dir() else 0
