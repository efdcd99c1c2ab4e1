"""Folders of checkpoints: a new one is complete or invisible, the last complete one is found again.

.checkpoint-30.partial    all ranks write into it
checkpoint-30             the same folder, renamed when all of it is on the disk and its manifest is written
.checkpoint-30.replaced   what had this name before, until the new one is in its place
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from ..errors import CheckpointError
from ..runtime.agree import on_rank_zero
from ..runtime.mesh import world_size
from ..runtime.roll_call import own_versions
from .manifest import MANIFEST_NAME, FileRecord, Manifest, damage

_log = logging.getLogger(__name__)

_PARTIAL = ".partial"
_NUMBERED = re.compile(r"checkpoint[-_](\d+)")
"""The Trainer's folders, and those that Accelerate names."""


def staging_folder(folder: Path) -> Path:
    """Where a checkpoint is written until it is complete; the last part of its name stays."""
    return folder.parent / _PARTIAL / folder.name


def prepare_staging(folder: Path) -> Path:
    """An empty staging folder; what an interrupted start left beside it goes.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        staging = staging_folder(folder)
        staging.parent.mkdir(parents=True, exist_ok=True)
        restore_replaced(folder.parent)
        for left in staging.parent.iterdir():
            if left.name == folder.name or (_NUMBERED.fullmatch(left.name) and _NUMBERED.fullmatch(folder.name)):
                shutil.rmtree(left)
        staging.mkdir()
        return staging
    except OSError as error:
        raise CheckpointError(f"Checkpoint {folder} cannot be written ({error}); give a folder that is writable.") from None


def complete(folder: Path, parts: Iterable[Mapping[str, FileRecord]], *, ranks: int, plan: str | None) -> None:
    """Write the manifest of a staging folder whose files are all there, and let the checkpoint appear.

    Args:
        folder: the checkpoint's final name.
        parts: what ranks have summed already, by path inside the folder; the rest is summed here.
        ranks: how many wrote it.
        plan: fingerprint of the plan.

    Raises:
        CheckpointError: a file that a rank wrote is not to be seen here.
    """
    staging = staging_folder(folder)
    known = {name: record for part in parts for name, record in part.items()}
    there = sorted(str(path.relative_to(staging).as_posix()) for path in staging.rglob("*") if path.is_file())
    if unseen := sorted(set(known) - set(there)):
        raise CheckpointError(
            f"{len(unseen)} files of checkpoint {folder}, such as {unseen[0]}, were written on another machine and are not seen from"
            " rank 0's; give a folder that all machines share."
        )
    files = {}
    for name in there:
        if name not in known:
            flush(staging / name)
        files[name] = known.get(name) or FileRecord.of(staging / name)
    manifest = Manifest(files=files, world_size=ranks, plan=plan, versions=own_versions())
    (staging / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    for path in (staging / MANIFEST_NAME, *(path for path in staging.rglob("*") if path.is_dir()), staging):
        flush(path)
    _appear(staging, folder)


def flush(path: Path) -> None:
    """See a file's content, or a folder's names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def appear_elsewhere(folder: Path) -> None:
    """On a machine that does not share rank 0's disk: let what ranks there wrote, their random states, have its name, too."""
    if staging_folder(folder).exists():
        with suppress(OSError):  # another rank of this machine does it
            _appear(staging_folder(folder), folder)


def _appear(staging: Path, folder: Path) -> None:
    """Give the staging folder its name. What had the name keeps the files that were no checkpoint's."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    if folder.exists():
        folder.rename(replaced)
    staging.rename(folder)
    flush(folder.parent)
    if not any(staging.parent.iterdir()):
        staging.parent.rmdir()
    _take_over(replaced, folder)


def _take_over(replaced: Path, folder: Path) -> None:
    """Move what is no part of the old checkpoint into the new one's folder: logs and models that a user keeps there."""
    if not replaced.exists():
        return
    try:
        old = Manifest.load(replaced)
    except CheckpointError:
        old = None
    own = {MANIFEST_NAME, *(name.partition("/")[0] for name in (old.files if old else ()))}
    for path in replaced.iterdir():
        if path.name not in own and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(replaced)


def restore_replaced(parent: Path) -> None:
    """Finish replacements that were interrupted: the old folder comes back where the new one is not there yet."""
    for replaced in parent.glob(".*.replaced"):
        folder = parent / replaced.name.removeprefix(".").removesuffix(".replaced")
        if folder.exists():
            _take_over(replaced, folder)
        else:
            replaced.rename(folder)


# ----------------------------------------------------------------------------------------------------------------- finding


def last_checkpoint(folder: str | Path, *, marker: str | None = None) -> Path | None:
    """The newest complete checkpoint among `checkpoint-N` (or `checkpoint_N`) in a folder. Collective.

    One that is damaged is named in the log and passed over. Where another program wrote it, without a manifest, only its marker is
    looked for.

    Args:
        folder: the training's output.
        marker: a file that every usable checkpoint has.

    Returns:
        Its path, the same on every rank; None where there is none.
    """
    for path in on_rank_zero(lambda: _numbered(Path(folder))):
        if marker is not None and not (path / marker).is_file():
            problem: str | None = f"{marker} is missing"
        else:
            problem = found_damage(path)
        if problem is None:
            return path
        if not dist.is_initialized() or dist.get_rank() == 0:
            _log.warning("%s is damaged and passed over: %s.", path, problem)
    return None


def check_checkpoint(folder: str | Path) -> None:
    """Refuse a damaged checkpoint, before anything is loaded. Collective. One without a manifest is another program's: not checked.

    Raises:
        CheckpointError: it is not there, or not as it was written; on every rank.
    """
    if not on_rank_zero(Path(folder).is_dir):
        raise CheckpointError(f"There is no checkpoint {folder}; give the path of one.")
    if problem := found_damage(Path(folder)):
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
    sees: list[bool] = [False] * world_size()
    dist.all_gather_object(sees, (folder / MANIFEST_NAME).is_file())  # where machines share no disk, rank 0's has it
    readers = [rank for rank, seen in enumerate(sees) if seen]
    mine = files[readers.index(dist.get_rank()) :: len(readers)] if dist.get_rank() in readers else []
    problems: list[str | None] = [None] * world_size()
    dist.all_gather_object(problems, damage(folder, mine))
    return next(filter(None, problems), None)


def _numbered(folder: Path) -> list[Path]:
    """Checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    restore_replaced(folder)
    found = [(int(match[1]), path) for path in folder.iterdir() if path.is_dir() and (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]
