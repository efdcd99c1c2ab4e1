"""`osdp_checkpoint.json`: what a complete checkpoint holds. Written last, and read first."""

from __future__ import annotations

import json
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError
from ..planner.files import validated
from ..reading import read_json

MANIFEST_NAME = "osdp_checkpoint.json"
VERSION = 1
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
"""Of a manifest: a line for each file, and files for each rank; a million files stay below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file as it was written: bytes, and `zlib.crc32`, which finds damage, not forgery."""

    size: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read a file to its end."""
        size = crc = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return cls(size=size, crc32=crc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `osdp_checkpoint.json`."""

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
    """What continues the same training only if it stays: seed, dataset, precision, optimizer."""

    def to_json(self) -> str:
        """Return the file's text."""
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


def check_inside(name: object) -> str:
    """Return a file's name. Raise CheckpointError where it does not stay inside the folder it is said to be in."""
    if isinstance(name, str) and name and "\\" not in name and "\0" not in name:
        path = PurePosixPath(name)
        if not path.is_absolute() and ".." not in path.parts and ":" not in path.parts[0]:
            return name
    shown = repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"  # a hostile value's repr may take for ever
    raise CheckpointError(f"The checkpoint names a file {shown} outside of its folder; it was not written by training, do not use it.")


def special_file(path: Path) -> str | None:
    """Return why reading a path may block for ever, as the end of a sentence; None for files and folders, and for what is missing."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is a pipe, a socket or a device"


def check_regular(path: Path) -> None:
    """Raise CheckpointError for a pipe, a socket or a device, which may block for ever."""
    if problem := special_file(path):
        raise CheckpointError(f"{path} {problem}, no file; take another checkpoint.")
