"""`osdp_checkpoint.json`: what a complete checkpoint holds. Written last, and read first."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError
from ..reading import read_json

MANIFEST_NAME = "osdp_checkpoint.json"
VERSION = 1
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
"""Of a manifest: a line for each file, and files for each rank; a million files stay below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file as it was written."""

    size: int
    """In bytes."""
    crc32: int
    """Of its content, as `zlib.crc32` has it: finds damage, not forgery."""

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
    """What stands in a checkpoint's folder.

    Raises:
        CheckpointError: at construction, where a file's name leaves the folder.
    """

    files: Mapping[str, FileRecord]
    """By path inside the folder, with `/`."""
    world_size: int
    """Ranks that wrote it."""
    plan: str | None = None
    """Fingerprint of the plan that ran; None without one."""
    global_batch_size: int | None = None
    """Samples of an optimizer step of that plan."""
    versions: Mapping[str, str] | None = None
    """Of the packages that wrote it."""

    def __post_init__(self) -> None:
        for name in self.files:
            check_inside(name)

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """A folder's manifest; None where it has none.

        Raises:
            CheckpointError: it cannot be read.
        """
        path = folder / MANIFEST_NAME
        if not path.is_file():
            return None
        said = read_json(path, "manifest", CheckpointError, limit_bytes=_MOST_BYTES)
        try:
            if said["format"] != VERSION:
                raise CheckpointError(
                    f"{path} has format {said['format']!r}, this version of hf_osdp reads {VERSION}; update hf_osdp, or take another one."
                )
            files = {name: FileRecord(size=int(file["size"]), crc32=int(file["crc32"])) for name, file in said["files"].items()}
            samples = said.get("global_batch_size")
            return cls(
                files=files, world_size=int(said["world_size"]), plan=said["plan"], versions=said["versions"],
                global_batch_size=None if samples is None else int(samples),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}); it is damaged.") from None


def damage(folder: Path, files: Iterable[tuple[str, FileRecord]]) -> str | None:
    """What is wrong with files of a checkpoint; None where all is as it was written.

    Args:
        folder: the checkpoint's.
        files: names and records from its manifest, all or a rank's share.
    """
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
    """A file's name that stays inside the folder it is said to be in.

    Raises:
        CheckpointError: it is no text, absolute, or climbs out.
    """
    if isinstance(name, str) and name and "\\" not in name and "\0" not in name:
        path = PurePosixPath(name)
        if not path.is_absolute() and ".." not in path.parts and ":" not in path.parts[0]:
            return name
    raise CheckpointError(f"The checkpoint names a file {name!r} outside of its folder; it was not written by training, do not use it.")
