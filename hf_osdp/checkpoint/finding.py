"""Finds checkpoints again: the last complete one; what is damaged is named."""

from __future__ import annotations

import logging
from contextlib import suppress
from glob import escape
from pathlib import Path

import torch.distributed as dist

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import rank, world_size
from ..distributed.process_group import waiting_group
from ..errors import CheckpointError
from .folders import numbered_checkpoints, remove_left, restore_replaced
from .layouts import find_model
from .manifest import MANIFEST_NAME, FileRecord, Manifest, damage
from .starts import is_restart, of_earlier_training

_log = logging.getLogger(__name__)


def last_checkpoint(folder: str | Path, *, marker: str | None = None) -> Path | None:
    """The newest complete checkpoint among `checkpoint-N` (or `checkpoint_N`) in a folder. Collective; for the training itself.

    One that is damaged is named in the log and passed over. One without a manifest, which another program wrote, must have weights. After
    a restart, those that `begin_anew` found there are an earlier training's, and not taken.

    Args:
        folder: the training's output.
        marker: a file that every usable checkpoint has.

    Returns:
        Its path, the same on every rank; None where there is none.
    """
    again = is_restart(folder)
    for path, problem in on_rank_zero(lambda: _candidates(Path(folder), marker, again)):
        problem = problem or found_damage(path)
        if problem is None:
            return path
        if rank() == 0:
            _log.warning("%s is damaged and passed over: %s.", path, problem)
    return None


def recorded_batch(folder: str | Path) -> int | None:
    """Samples of an optimizer step in the training that a restart goes on with; None where this is no restart, or nothing is saved.
    Collective.

    Args:
        folder: the training's output.
    """
    again = is_restart(folder)

    def newest() -> int | None:
        older = of_earlier_training(Path(folder))
        for path in numbered_checkpoints(Path(folder)):
            with suppress(CheckpointError):
                if path not in older and (manifest := Manifest.load(path)) is not None:
                    return manifest.global_batch_size
        return None

    return on_rank_zero(newest) if again else None


def check_checkpoint(folder: str | Path) -> None:
    """Refuse a damaged checkpoint, before anything is loaded. Collective. One without a manifest is another program's: not checked.

    Raises:
        CheckpointError: it is not there, or not as it was written; on every rank.
    """
    folder = Path(folder)

    def is_there() -> bool:
        if not folder.exists():  # it was being replaced when that start was interrupted
            restore_replaced(folder.parent, escape(folder.name))
        return folder.is_dir()

    if not on_rank_zero(is_there):
        raise CheckpointError(f"There is no checkpoint {folder}; give the path of one.")
    if problem := found_damage(folder):
        raise CheckpointError(f"Checkpoint {folder} is damaged: {problem}; take one before it.")


def found_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, read by all ranks together, each its share. Collective."""

    def listed() -> list[tuple[str, FileRecord]] | str:
        try:
            manifest = Manifest.load(folder)
        except CheckpointError as error:
            return str(error).rstrip(".")
        return sorted(manifest.files.items()) if manifest else []

    files = on_rank_zero(listed)
    if isinstance(files, str):
        return files
    if world_size() == 1:
        return damage(folder, files)
    problems: list[str | None] = [None] * world_size()
    dist.all_gather_object(problems, damage(folder, files[rank() :: world_size()]), group=waiting_group())
    return next(filter(None, problems), None)


def _candidates(folder: Path, marker: str | None, again: bool) -> list[tuple[Path, str | None]]:
    """Checkpoints, the newest first, each with what is missing in it."""
    restore_replaced(folder)
    older: set[Path] = set()
    if again:
        older = of_earlier_training(folder)
        remove_left(folder)
    return [(path, _lack(path, marker)) for path in numbered_checkpoints(folder) if path not in older]


def _lack(path: Path, marker: str | None) -> str | None:
    """What a checkpoint that may be another program's needs and does not have."""
    if marker is not None and not (path / marker).is_file():
        return f"{marker} is missing"
    if (path / MANIFEST_NAME).is_file():
        return None
    try:
        find_model(path)
    except CheckpointError as error:
        return str(error).rstrip(".")
    return None
