"""Folders of checkpoints: a new one is complete or invisible, and one run at a time writes into an output folder.

osdp_checkpoint.json              manifest of a complete checkpoint; written last, and read first
.partial/4f0c9a1e/checkpoint-30   staging folder, into which all ranks write
checkpoint-30                     the same folder, moved when it is completely on the disk and its manifest is written
.partial/checkpoint-30.replaced   the old folder of this name, until the new one is in its place
.partial/checkpoint-30.removed    a checkpoint that is being removed
.partial/lock                     locked by the run that writes checkpoint-N; NAME.lock by the run that writes NAME
.partial/training.json            the training that runs in the folder, see resume.py
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import CheckpointError
from ..planner.files import validated
from ..reading import read_json
from ..versions import package_versions
from .layouts import is_state
from .safe import check_inside

MANIFEST_NAME = "osdp_checkpoint.json"
VERSION = 1
_CHUNK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 64 << 20
"""Larger manifests are not read; a manifest of a million files is smaller."""
_MOST_RANKS, _MOST_SAMPLES = 2**20, 2**32
"""A manifest with more ranks, or more samples of a step, was not written by a training."""
_log = logging.getLogger(__name__)
PARTIAL = ".partial"
_LOCK, _REPLACED, _REMOVED = "lock", ".replaced", ".removed"
_NUMBERED = re.compile(r"checkpoint[-_](\d+)")
"""Names of checkpoints by the Trainer and by Accelerate."""
_LOCK_WAIT_S = 60.0
"""How long to wait for another run to end: a restart may begin while file systems still hold the lock of a machine
that failed.
"""
_locks: dict[Path, FileLock] = {}
"""Locks of this process, or of the process from which it was forked; not acquired if the file system has no locks."""
trainings: dict[Path, str] = {}
"""Ids of the trainings that this process runs, by their folders."""
_staged: set[Path] = set()
"""Folders in which this process writes checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size of a file in bytes, and its `zlib.crc32`, which detects damage but not forgery."""

    size: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        size = crc = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return cls(size=size, crc32=crc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    files: Mapping[str, FileRecord]
    """Files by their path in the folder, with `/`."""
    world_size: int
    """Number of ranks that wrote the checkpoint."""
    plan: str | None = None
    """Fingerprint of the plan that ran."""
    global_batch_size: int | None = None
    """Samples of an optimizer step of that plan."""
    versions: Mapping[str, str] | None = None
    """Versions of the packages that wrote the checkpoint."""
    training: str | None = None
    """Id of the training that wrote the checkpoint, see `resume.py`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that must not change for the same training to continue: the model's configuration, dtypes and
    adapters, seed, dataset, precision, optimizer, schedule, communication.
    """

    def __post_init__(self) -> None:
        for name, most in (("world_size", _MOST_RANKS), ("global_batch_size", _MOST_SAMPLES)):
            if (value := getattr(self, name)) is not None and not 1 <= value <= most:
                raise CheckpointError(f"{name}: {value} is not between 1 and {most}")

    def to_json(self) -> str:
        return json.dumps({"format": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """Return a folder's manifest or None.

        Raise CheckpointError if it is damaged or names a file outside of the folder.
        """
        path = folder / MANIFEST_NAME
        if not path.is_file():
            return None
        content = read_json(path, "manifest", CheckpointError, limit_bytes=_MAX_MANIFEST_BYTES)
        if isinstance(content, dict) and (found := content.pop("format", VERSION)) != VERSION:
            raise CheckpointError(
                f"{path} has format {found!r}, but this version of hf_osdp reads {VERSION}; update hf_osdp, or use"
                " another checkpoint."
            )
        manifest = validated(
            cls, content, lambda problem: CheckpointError(f"{path} cannot be read ({problem}); it is damaged.")
        )
        for name in manifest.files:
            check_inside(name)
        return manifest


def damage(folder: Path, files: Iterable[tuple[str, FileRecord]]) -> str | None:
    """Return what is wrong with files of a checkpoint; None if all files are as they were written."""
    for name, record in files:
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != record.size:
                return f"{name} has {size} of {record.size} bytes"
            if FileRecord.of(path).crc32 != record.crc32:
                return f"{name} has a different checksum than when it was written"
        except OSError as error:  # a bad sector, or no permission
            return f"{name} cannot be read ({error})"
    return None


def numbered_checkpoints(folder: Path) -> list[Path]:
    """Return folders named `checkpoint-N` or `checkpoint_N`, the newest first."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if path.is_dir() and (match := _NUMBERED.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def lock_checkpoints(parent: Path, name: str | None = None) -> None:
    """Make the folder, and keep other runs from writing the checkpoint of this name, or `checkpoint-N`, until
    `unlock_checkpoints` or the process ends.

    Finish or remove what an interrupted run left. Raise CheckpointError if another run writes them and does not end
    within a minute, or a file has a checkpoint's name.
    """
    named = [parent / name] if name else [path for path in parent.glob("*") if _NUMBERED.fullmatch(path.name)]
    if file := next(filter(Path.is_file, named), None):
        raise CheckpointError(f"{file} is a file, where a checkpoint may come; rename it, or give another folder.")
    path = _lock_path(parent, name)
    if path in _locks:
        return
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _log.warning(
                "Another run writes checkpoints into %s; waiting up to %g s for it to end.", parent, _LOCK_WAIT_S
            )
            _wait_for(lock, path)
    except Timeout:
        raise CheckpointError(f"Another run writes checkpoints into {parent}; give this run another folder.") from None
    except OSError as error:
        if os.path.exists(path):  # else the first checkpoint reports a folder that cannot be written
            _log.warning(
                "%s cannot be locked (%s): let no other run write checkpoints there, and remove by hand what"
                " interrupted runs leave in %s.",
                parent, error.strerror, path.parent,
            )  # fmt: skip
    _locks[path] = lock
    pattern = "checkpoint[-_]*" if name is None else glob.escape(name)
    restore_replaced(parent, pattern)
    staged = {inside.parent for inside in path.parent.glob(f"*/{pattern}")} - _staged
    for left in (*staged, *path.parent.glob(pattern), *path.parent.glob(f"{pattern}{_REMOVED}")):
        if lock.is_locked:  # else another run may be writing it
            shutil.rmtree(left, ignore_errors=True)


def _wait_for(lock: FileLock, path: Path) -> None:
    while not lock.is_locked:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the run that held it removes the empty folder when it ends
            lock.acquire(timeout=_LOCK_WAIT_S)


def unlock_checkpoints(parent: Path, name: str | None = None) -> None:
    """Release the lock of `lock_checkpoints`, so that other runs can write these checkpoints."""
    path = _lock_path(parent, name)
    lock = _locks.pop(path, None)
    trainings.pop(absolute(parent), None)
    if lock is not None and lock.is_locked:  # a forked process does not have it
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # fails if other files are in it
        lock.release()


def lock_name(folder: Path) -> str | None:
    """Return the name under which a checkpoint is locked; None for `checkpoint-N`."""
    return None if _NUMBERED.fullmatch(folder.name) else folder.name


def _lock_path(parent: Path, name: str | None) -> Path:
    return absolute(parent) / PARTIAL / (_LOCK if name is None else f"{name}.{_LOCK}")


def absolute(folder: Path) -> Path:
    """Return a folder's path without links; raise CheckpointError if the working directory was deleted."""
    try:
        return folder.resolve()
    except OSError as error:
        raise _unwritable(folder, error) from None


def prepare_staging(folder: Path) -> Path:
    """Make an empty staging folder, of the same name as the checkpoint's, in which a checkpoint is written until it
    is complete.
    """
    with suppress(FileNotFoundError):  # the working directory was deleted
        if Path.cwd().is_relative_to(folder):
            raise ValueError(
                f"A checkpoint cannot replace {folder}, this program's working directory; give a folder inside it."
            )
    lock_checkpoints(folder.parent, lock_name(folder))
    staging = folder.parent / PARTIAL / uuid.uuid4().hex[:8] / folder.name
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    _staged.add(staging.parent)
    return staging


def discard_staging(staging: Path) -> None:
    _staged.discard(staging.parent)
    shutil.rmtree(staging.parent, ignore_errors=True)


def complete(folder: Path, staging: Path, manifest: Manifest, parts: Iterable[Mapping[str, FileRecord]]) -> None:
    """Write the manifest of a staging folder that has all files, and publish the checkpoint.

    Raise CheckpointError if that fails.
    """
    files = {name: record for part in parts for name, record in part.items()}
    try:
        for path in staging.rglob("*"):
            name = str(path.relative_to(staging).as_posix())
            if path.is_file() and name not in files:
                flush(path)
                files[name] = FileRecord.of(path)
        (staging / MANIFEST_NAME).write_text(
            replace(manifest, files=files, versions=package_versions()).to_json(), encoding="utf-8"
        )
        for path in (staging / MANIFEST_NAME, *(path for path in staging.rglob("*") if path.is_dir()), staging):
            flush(path)
        _publish(staging, folder)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"Checkpoint {folder} cannot be written ({error}); give a folder that is writable.")


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(staging: Path, folder: Path) -> None:
    """Rename the staging folder to the checkpoint's name, and keep a user's files of the old folder of that name."""
    replaced = folder.parent / PARTIAL / f"{folder.name}{_REPLACED}"
    if folder.exists():
        folder.rename(replaced)
    staging.rename(folder)
    flush(folder.parent)
    _keep_user_files(replaced, folder)
    _staged.discard(staging.parent)
    with suppress(OSError):
        staging.parent.rmdir()


def _keep_user_files(replaced: Path, folder: Path) -> None:
    """Move files that are not part of the old checkpoint into the new folder: logs and models that a user keeps
    there.
    """
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
    """Finish interrupted replacements: restore the old folder if the new one is not in its place."""
    for replaced in (parent / PARTIAL).glob(f"{pattern}{_REPLACED}"):
        folder = parent / replaced.name.removesuffix(_REPLACED)
        if folder.exists():
            _keep_user_files(replaced, folder)
        else:
            replaced.rename(folder)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, of a link only the link; an interrupted removal leaves it invisible.

    Log a warning if it cannot be removed.
    """
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
