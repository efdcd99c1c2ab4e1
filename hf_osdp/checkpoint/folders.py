"""Folders of checkpoints: a new one is complete or invisible, and one run at a time writes into an output folder.

osdp_checkpoint.json              what a complete checkpoint holds; written last, and read first
.partial/4f0c9a1e/checkpoint-30   all ranks write into it
checkpoint-30                     the same folder, moved when all of it is on the disk and its manifest is written
.partial/checkpoint-30.replaced   what had this name before, until the new one is in its place
.partial/checkpoint-30.removed    one that is being removed
.partial/lock                     locked by the run that writes checkpoint-N; NAME.lock by that which writes NAME
.partial/training.json            which training runs there, see resume.py
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

from filelock import BaseFileLock, FileLock, Timeout

from ..distributed.process_group import own_versions
from ..errors import CheckpointError
from ..planner.files import validated
from ..reading import read_json
from .layouts import is_state
from .safe import check_inside

MANIFEST_NAME = "osdp_checkpoint.json"
VERSION = 1
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
"""The largest manifest that is read; one of a million files is smaller."""
_log = logging.getLogger(__name__)
PARTIAL = ".partial"
_LOCK, _REPLACED, _REMOVED = "lock", ".replaced", ".removed"
_NUMBERED = re.compile(r"checkpoint[-_](\d+)")
"""The Trainer's folders, and those that Accelerate names."""
_LOCK_WAIT_S = 60.0
"""How long to wait for another run to end: a restart may begin while file systems still hold the lock of a machine that failed."""
_locks: dict[Path, BaseFileLock] = {}
"""Of this process, or of that which it was forked from."""
_staged: set[Path] = set()
"""Folders in which this process writes checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file as it was written: bytes, and `zlib.crc32`, which finds damage, not forgery."""

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
    """By path inside the folder, with `/`."""
    world_size: int
    """Ranks that wrote it."""
    plan: str | None = None
    """Fingerprint of the plan that ran."""
    global_batch_size: int | None = None
    """Samples of an optimizer step of that plan."""
    versions: Mapping[str, str] | None = None
    """Of the packages that wrote it."""
    training: str | None = None
    """Which training wrote it, see `resume.py`; None for the first in its folder."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What continues the same training only if it stays: seed, dataset, precision, optimizer, what the plan sends."""

    def to_json(self) -> str:
        return json.dumps({"format": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """Return a folder's manifest, None where it has none. Raise CheckpointError where it is damaged or names a file outside of it."""
        path = folder / MANIFEST_NAME
        if not path.is_file():
            return None
        content = read_json(path, "manifest", CheckpointError, limit_bytes=_MOST_BYTES)
        if isinstance(content, dict) and (found := content.pop("format", VERSION)) != VERSION:
            raise CheckpointError(
                f"{path} has format {found!r}, this version of hf_osdp reads {VERSION}; update hf_osdp, or take another one."
            )
        manifest = validated(cls, content, lambda problem: CheckpointError(f"{path} cannot be read ({problem}); it is damaged."))
        for name in manifest.files:
            check_inside(name)
        return manifest


def damage(folder: Path, files: Iterable[tuple[str, FileRecord]]) -> str | None:
    """Return what is wrong with files of a checkpoint; None where all is as it was written."""
    for name, record in files:
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != record.size:
                return f"{name} has {size} of {record.size} bytes"
            if FileRecord.of(path).crc32 != record.crc32:
                return f"{name} has another checksum than when it was written"
        except OSError as error:  # a bad sector, or no permission
            return f"{name} cannot be read ({error})"
    return None


def numbered_checkpoints(folder: Path) -> list[Path]:
    """Return folders named `checkpoint-N` or `checkpoint_N`, the newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if path.is_dir() and (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def lock_checkpoints(parent: Path, name: str | None = None) -> None:
    """Keep other runs from writing the checkpoint of this name, or `checkpoint-N`, into a folder until `unlock_checkpoints` or the end.

    What an interrupted run left of them is finished or removed. CheckpointError: another run writes them, and does not end within a minute.
    """
    path = _lock_path(parent, name)
    if path in _locks:
        return
    if not _try_lock(path):
        _log.warning("Another run writes checkpoints into %s; waiting up to %g s for its end.", parent, _LOCK_WAIT_S)
        if not _try_lock(path, _LOCK_WAIT_S):
            raise CheckpointError(f"Another run writes checkpoints into {parent}; give this run a folder of its own.")
    pattern = "checkpoint[-_]*" if name is None else glob.escape(name)
    restore_replaced(parent, pattern)
    staged = {inside.parent for inside in path.parent.glob(f"*/{pattern}")} - _staged
    for left in (*staged, *path.parent.glob(pattern), *path.parent.glob(f"{pattern}{_REMOVED}")):
        shutil.rmtree(left, ignore_errors=True)


def unlock_checkpoints(parent: Path, name: str | None = None) -> None:
    """Let other runs write checkpoints again that `lock_checkpoints` has locked."""
    path = _lock_path(parent, name)
    lock = _locks.pop(path, None)
    if lock is not None and lock.is_locked:  # not in a process that was forked from the one with the lock
        with suppress(OSError):
            path.unlink()
            lock.release()
            path.parent.rmdir()  # not where something else is in it


def is_locked_elsewhere(parent: Path) -> bool:
    """Return whether another run writes `checkpoint-N` into an output folder."""
    path = _lock_path(parent, None)
    if path in _locks or not path.exists():
        return False
    if not _try_lock(path):
        return True
    unlock_checkpoints(parent)
    return False


def lock_name(folder: Path) -> str | None:
    """Return the name under which a checkpoint is locked; None for `checkpoint-N`."""
    return None if _NUMBERED.fullmatch(folder.name) else folder.name


def _lock_path(parent: Path, name: str | None) -> Path:
    return parent.resolve() / PARTIAL / (_LOCK if name is None else f"{name}.{_LOCK}")


def _try_lock(path: Path, seconds: float = 0.0) -> bool:
    """Lock a file; return False where another run has it, so many seconds later too. Where none can be locked, nothing is locked."""
    lock = FileLock(path, thread_local=False)  # another thread may release it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=seconds)
    except Timeout:
        return False
    except OSError:
        _log.debug("Nothing is locked", exc_info=True)  # the first checkpoint tells of a folder that cannot be written
    _locks[path] = lock
    return True


def prepare_staging(folder: Path) -> Path:
    """Make an empty folder in which a checkpoint is written until it is complete; the last part of its name stays."""
    if Path.cwd().is_relative_to(folder):
        raise ValueError(f"A checkpoint cannot take the place of {folder}, in which this program runs; give a folder inside it.")
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
    """Write the manifest of a staging folder whose files are all there, and let the checkpoint appear. CheckpointError: it cannot be."""
    files = {name: record for part in parts for name, record in part.items()}
    try:
        for path in staging.rglob("*"):
            name = str(path.relative_to(staging).as_posix())
            if path.is_file() and name not in files:
                flush(path)
                files[name] = FileRecord.of(path)
        (staging / MANIFEST_NAME).write_text(replace(manifest, files=files, versions=own_versions()).to_json(), encoding="utf-8")
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
    """Give the staging folder its name. What had the name keeps the files that were no checkpoint's."""
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
            _keep_user_files(replaced, folder)
        else:
            replaced.rename(folder)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; interrupted amid that, it is invisible. Of a link only the link goes. What cannot be removed is warned of."""
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
