"""Folders of checkpoints: a new one is complete or invisible.

.partial/checkpoint-30            all ranks write into it
checkpoint-30                     the same folder, moved when all of it is on the disk and its manifest is written
.partial/checkpoint-30.replaced   what had this name before, until the new one is in its place
.partial/checkpoint-30.removed    one that is being removed
.partial/older.json               what an earlier training left, see starts.py
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ..distributed.process_group import own_versions
from ..errors import CheckpointError
from ..planner.plan import Plan
from .layouts import is_state
from .manifest import MANIFEST_NAME, FileRecord, Manifest

_log = logging.getLogger(__name__)

PARTIAL = ".partial"
_REPLACED, _REMOVED = ".replaced", ".removed"
_NUMBERED = re.compile(r"checkpoint[-_](\d+)")
"""The Trainer's folders, and those that Accelerate names."""
_begun: set[Path] = set()
"""Staging folders that this process made: what may still be written in the background."""


def staging_folder(folder: Path) -> Path:
    """Where a checkpoint is written until it is complete; the last part of its name stays."""
    return folder.parent / PARTIAL / folder.name


def prepare_staging(folder: Path) -> Path:
    """An empty staging folder; what an interrupted start left of this name goes.

    Raises:
        CheckpointError: it cannot be made.
        ValueError: the folder is the current one, or holds it.
    """
    if Path.cwd().is_relative_to(folder):
        raise ValueError(f"A checkpoint cannot take the place of {folder}, in which this program runs; give a folder inside it.")
    try:
        staging = staging_folder(folder)
        staging.parent.mkdir(parents=True, exist_ok=True)
        restore_replaced(folder.parent)
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir()
        _begun.add(staging.resolve())
        return staging
    except OSError as error:
        raise CheckpointError(f"Checkpoint {folder} cannot be written ({error}); give a folder that is writable.") from None


def complete(folder: Path, parts: Iterable[Mapping[str, FileRecord]], *, ranks: int, plan: Plan | None) -> None:
    """Write the manifest of a staging folder whose files are all there, and let the checkpoint appear.

    Args:
        folder: the checkpoint's final name.
        parts: what ranks have summed already, by path inside the folder; the rest is summed here.
        ranks: how many wrote it.
        plan: the one that runs.

    Raises:
        CheckpointError: it cannot be written.
    """
    staging = staging_folder(folder)
    files = {name: record for part in parts for name, record in part.items()}
    try:
        for path in staging.rglob("*"):
            name = str(path.relative_to(staging).as_posix())
            if path.is_file() and name not in files:
                flush(path)
                files[name] = FileRecord.of(path)
        run = {} if plan is None else {"plan": plan.fingerprint, "global_batch_size": plan.global_batch_size}
        manifest = Manifest(files=files, world_size=ranks, versions=own_versions(), **run)
        (staging / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        for path in (staging / MANIFEST_NAME, *(path for path in staging.rglob("*") if path.is_dir()), staging):
            flush(path)
        _appear(staging, folder)
    except OSError as error:
        raise CheckpointError(f"Checkpoint {folder} cannot be written ({error}); give a folder that is writable.") from None


def flush(path: Path) -> None:
    """See a file's content, or a folder's names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _appear(staging: Path, folder: Path) -> None:
    """Give the staging folder its name. What had the name keeps the files that were no checkpoint's."""
    replaced = staging.with_name(f"{staging.name}{_REPLACED}")
    if folder.exists():
        folder.rename(replaced)
    staging.rename(folder)
    flush(folder.parent)
    _take_over(replaced, folder)
    with suppress(OSError):  # not empty, or another checkpoint has just begun
        staging.parent.rmdir()


def _take_over(replaced: Path, folder: Path) -> None:
    """Move what is no part of the old checkpoint into the new one's folder: logs and models that a user keeps there."""
    if not replaced.exists():
        return
    try:
        old = Manifest.load(replaced)
    except CheckpointError:
        old = None
    listed = {MANIFEST_NAME, *(name.partition("/")[0] for name in (old.files if old else ()))}
    for path in replaced.iterdir():
        own = path.name in listed or (old is None and is_state(path))
        if not own and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(parent: Path, pattern: str = "*") -> None:
    """Finish replacements that were interrupted: the old folder comes back where the new one is not there yet."""
    for replaced in (parent / PARTIAL).glob(f"{pattern}{_REPLACED}"):
        folder = parent / replaced.name.removesuffix(_REPLACED)
        if folder.exists():
            _take_over(replaced, folder)
        else:
            replaced.rename(folder)


def remove_checkpoint(folder: Path) -> None:
    """Take a checkpoint away; interrupted amid that, it is invisible. Of a link only the link goes. What cannot be removed is warned of."""
    hidden = folder.parent / PARTIAL / f"{folder.name}{_REMOVED}"
    try:
        if folder.is_symlink():
            folder.unlink()
            return
        hidden.parent.mkdir(exist_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        _log.warning("The old checkpoint %s cannot be removed (%s); remove it by hand.", folder, error)
    with suppress(OSError):
        hidden.parent.rmdir()


def remove_left(parent: Path) -> None:
    """Take away what an interrupted start left unfinished; what this process writes stays."""
    for left in (parent / PARTIAL).glob("checkpoint*"):
        if left.resolve() not in _begun:
            shutil.rmtree(left, ignore_errors=True)


def numbered_checkpoints(folder: Path) -> list[Path]:
    """Folders named `checkpoint-N` or `checkpoint_N`, the newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if path.is_dir() and (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]
