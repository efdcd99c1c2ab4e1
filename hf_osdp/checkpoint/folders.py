"""Folders of checkpoints: a new one is complete or invisible, the last complete one is found again.

.partial/checkpoint-30            all ranks write into it
checkpoint-30                     the same folder, moved when all of it is on the disk and its manifest is written
.partial/checkpoint-30.replaced   what had this name before, until the new one is in its place
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from ..errors import CheckpointError
from ..planner.plan import Plan
from ..reading import read_json
from ..runtime.agree import on_rank_zero
from ..runtime.mesh import rank, world_size
from ..runtime.restarts import restart_count
from ..runtime.roll_call import own_versions
from .layouts import find_model, is_state
from .manifest import MANIFEST_NAME, FileRecord, Manifest, damage

_log = logging.getLogger(__name__)

_PARTIAL, _REPLACED, _OLDER = ".partial", ".replaced", "older.json"
_NUMBERED = re.compile(r"checkpoint[-_](\d+)")
"""The Trainer's folders, and those that Accelerate names."""
_begun: set[Path] = set()
"""Staging folders that this process made: what may still be written in the background."""


def staging_folder(folder: Path) -> Path:
    """Where a checkpoint is written until it is complete; the last part of its name stays."""
    return folder.parent / _PARTIAL / folder.name


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
    own = {MANIFEST_NAME, *(name.partition("/")[0] for name in (old.files if old else ()))}
    for path in replaced.iterdir():
        if path.name not in own and not is_state(path.name) and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(replaced)


def restore_replaced(parent: Path) -> None:
    """Finish replacements that were interrupted: the old folder comes back where the new one is not there yet."""
    for replaced in (parent / _PARTIAL).glob(f"*{_REPLACED}"):
        folder = parent / replaced.name.removesuffix(_REPLACED)
        if folder.exists():
            _take_over(replaced, folder)
        else:
            replaced.rename(folder)


def remove_checkpoint(folder: Path) -> None:
    """Take a checkpoint away; interrupted amid that, it is invisible."""
    hidden = staging_folder(folder)
    hidden.parent.mkdir(exist_ok=True)
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)
    with suppress(OSError):
        hidden.parent.rmdir()


# ----------------------------------------------------------------------------------------------------------------- finding


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
    for path, problem in on_rank_zero(lambda: _candidates(Path(folder), marker)):
        problem = problem or found_damage(path)
        if problem is None:
            return path
        if rank() == 0:
            _log.warning("%s is damaged and passed over: %s.", path, problem)
    return None


def begin_anew(folder: str | Path) -> None:
    """Note what checkpoints an earlier training left in a folder: a restart of this one will not go on from them. Call it at a start
    that is not told to go on from the last; in a restart it does nothing. Collective."""
    parent = Path(folder)

    def note() -> None:
        if restart_count() == 0 and (older := {path.name: _mark(path) for path in numbered_checkpoints(parent)}):
            (parent / _PARTIAL).mkdir(exist_ok=True)
            unfinished = parent / _PARTIAL / f"{_OLDER}.unfinished"
            unfinished.write_text(json.dumps(older), encoding="utf-8")
            unfinished.replace(parent / _PARTIAL / _OLDER)

    on_rank_zero(note)


def go_on(folder: str | Path) -> None:
    """The reverse, where a training is told to go on from the last checkpoint: what is there is its own. Collective."""
    on_rank_zero(lambda: (Path(folder) / _PARTIAL / _OLDER).unlink(missing_ok=True))


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
    problems: list[str | None] = [None] * world_size()
    dist.all_gather_object(problems, damage(folder, files[rank() :: world_size()]))
    return next(filter(None, problems), None)


def _candidates(folder: Path, marker: str | None) -> list[tuple[Path, str | None]]:
    """Checkpoints, the newest first, each with what is missing in it."""
    restore_replaced(folder)
    older: dict[str, str] = {}
    if restart_count():
        older = _older(folder)
        for left in (folder / _PARTIAL).glob("checkpoint*"):  # by the start that was interrupted
            if left.resolve() not in _begun:
                shutil.rmtree(left, ignore_errors=True)
    found = []
    for path in numbered_checkpoints(folder):
        if older.get(path.name) == _mark(path):
            continue
        problem = f"{marker} is missing" if marker is not None and not (path / marker).is_file() else None
        if problem is None and not (path / MANIFEST_NAME).is_file():
            try:
                find_model(path)
            except CheckpointError as error:
                problem = str(error).rstrip(".")
        found.append((path, problem))
    return found


def _older(folder: Path) -> dict[str, str]:
    """What `begin_anew` noted.

    Raises:
        CheckpointError: its file is damaged.
    """

    def error(line: str) -> CheckpointError:
        return CheckpointError(f"{line} Remove it to go on from the last checkpoint, whichever training wrote it.")

    path = folder / _PARTIAL / _OLDER
    noted = read_json(path, "note of older checkpoints", error) if path.is_file() else {}
    return noted if isinstance(noted, dict) else {}


def _mark(path: Path) -> str:
    """Tells a checkpoint from one that is written under its name later."""
    manifest = path / MANIFEST_NAME
    status = (manifest if manifest.is_file() else path).stat()
    return f"{status.st_ino}-{status.st_mtime_ns}"


def numbered_checkpoints(folder: Path) -> list[Path]:
    """Folders named `checkpoint-N` or `checkpoint_N`, the newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if path.is_dir() and (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]
