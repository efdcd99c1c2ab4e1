"""Read checkpoints without running code from their files.

`resume.check_checkpoint` has already refused special files.
"""

from __future__ import annotations

import errno
import pickle
import re
import stat
from collections import Counter
from io import BytesIO
from itertools import chain, product
from pathlib import Path, PosixPath, PurePosixPath, WindowsPath
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from ..errors import CheckpointError

_INDEX = ".metadata"
"""File name of torch.distributed.checkpoint's index."""
_NUMPY_TYPES: list[Any] = [multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), multiarray.scalar]
"""Types in the pickled state of numpy's generator."""
_MOST_DIMS = 16
"""No model's tensor has more; a chunk has 2**dims corners."""


def save_file(state: object, path: Path) -> None:
    """Write a file by `torch.save`, whose error on a full disk names neither the file nor the reason."""
    try:
        torch.save(state, path)
    except RuntimeError as error:
        raise (full_disk(path) if is_full_disk(error) else error) from None


def is_full_disk(error: Exception) -> bool:
    """Return whether an error of `torch.save`, or of safetensors, says that a file could not be written whole."""
    return any(part in str(error) for part in ("inline_container.cc", "PytorchStreamWriter", "os error"))


def full_disk(path: Path) -> OSError:
    return OSError(errno.ENOSPC, "the disk is full, or a quota is reached; free some space", str(path))


def load_file(path: Path, *, numpy: bool = False) -> Any:  # noqa: ANN401  # whatever the file contains
    """Load a file of `torch.save` onto the CPU; refuse anything but tensors, plain values and, with `numpy`, numpy
    arrays.
    """
    try:
        with torch.serialization.safe_globals(_NUMPY_TYPES if numpy else []):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; use another checkpoint.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as tensors and plain values ({_reason(error)}); use another checkpoint."
        ) from None


def _reason(error: Exception) -> str:
    """Return why torch does not load a file safely, without its advice to load it unsafely."""
    found = re.search(r"[Uu]nsupported [^\n]*?(?= was not|\.? Please|\.?\n|\.?$)", str(error))
    line = str(error).split("\n")[0]
    return found.group(0) if found else "another kind of file" if "weights_only" in line else line


def check_inside(name: object) -> str:
    """Return a file's name. Raise CheckpointError if the path leads outside of the checkpoint's folder."""
    if isinstance(name, str) and name and "\\" not in name and "\0" not in name:
        path = PurePosixPath(name)
        if not path.is_absolute() and ".." not in path.parts and ":" not in path.parts[0]:
            return name
    shown = (
        repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"
    )  # a hostile value's repr may never end
    raise CheckpointError(
        f"The checkpoint names a file {shown} outside of its folder; it was not written by training, do not use it."
    )


def special_file(path: Path) -> str | None:
    """Return why reading a path may block forever, as the end of a sentence; None for files, folders and missing
    paths.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is a pipe, a socket or a device"


class SafeReader(FileSystemReader):
    """torch.distributed.checkpoint's reader, whose index, a pickle, may contain only that package's dataclasses and
    plain values.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index; refuse an index that is missing, damaged, or names files outside of the folder."""
        path = Path(self.path) / _INDEX
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; use another checkpoint.")
        try:
            with path.open("rb") as file:
                index = _checked_index(_IndexUnpickler(file).load())
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle may raise any exception
            raise CheckpointError(
                f"{path} cannot be read ({type(error).__name__}: {error}); use another checkpoint."
            ) from None
        for info in (index.storage_data or {}).values():
            check_inside(getattr(info, "relative_path", None))
        index.storage_meta = index.storage_meta or metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class SafePlanner(DefaultLoadPlanner):
    """torch.distributed.checkpoint's planner, which reads only tensors and plain values."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Load one value safely and pass a new pickle of it to the base class, which would run code in the
        original.
        """
        safe = BytesIO()
        try:
            torch.save(torch.load(value, map_location="cpu", weights_only=True), safe)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise CheckpointError(f"{read_item.dest_index.fqn} is no plain value: {_reason(error)}") from None
        safe.seek(0)
        super().load_bytes(read_item, safe)


def _checked_index(index: object) -> Metadata:
    """Refuse an object that is not an index, or whose chunks do not hold each element of a tensor exactly once."""
    if not isinstance(index, Metadata):
        raise TypeError(f"a {type(index).__name__} is not an index")
    if any(type(part) not in (str, int) for path in (index.planner_data or {}).values() for part in path):
        raise TypeError("a name is not a string")
    for name, stored in index.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and not _tile(stored):
            raise ValueError(f"chunks do not hold each element exactly once of {str(name)[:80]}")
    return index


def _tile(stored: TensorStorageMetadata) -> bool:
    """Return whether each element of a tensor is in exactly one of its chunks.

    The mixed difference of a box's indicator function is +1 or -1 at its corners, by the parity of the corner, and
    differences determine functions of finite support: chunks tile the tensor if and only if the differences at their
    corners add up to those of the whole.
    """
    whole = stored.size
    chunks = [(chunk.offsets, chunk.sizes) for chunk in stored.chunks]
    if any(type(size) is not torch.Size for size in chain((whole,), *chunks)) or len(whole) > _MOST_DIMS:
        return False
    if any(not len(at) == len(sizes) == len(whole) or min(sizes, default=0) < 0 for at, sizes in chunks):
        return False
    differences: Counter[tuple[int, ...]] = Counter()
    for at, sizes, sign in [*((at, sizes, 1) for at, sizes in chunks), ((0,) * len(whole), whole, -1)]:
        for corner in product((0, 1), repeat=len(whole)):
            place = tuple(start + end * size for start, end, size in zip(at, corner, sizes, strict=True))
            differences[place] += sign * (-1) ** sum(corner)
    return not any(differences.values())


class _IndexUnpickler(pickle.Unpickler):
    """Unpickle only the types of an index, which run nothing."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.layout)):
            return found
        if f"{module}.{name}" not in _KNOWN:
            raise CheckpointError(
                f"The checkpoint's index contains {module}.{name}, which does not belong in an index; do not use it."
            )
        return _KNOWN[f"{module}.{name}"]


_INDEX_TYPES: tuple[Any, ...] = (
    Metadata, MetadataIndex, TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.TensorProperties, metadata.StorageMeta, _StorageInfo, torch.Size,
)  # fmt: skip
_KNOWN: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _INDEX_TYPES}
_KNOWN |= {  # these look their argument up in a dict
    "torch.serialization._get_layout": lambda name: torch.serialization._get_layout(str.__str__(name)),
    f"{metadata.__name__}._MEM_FORMAT_ENCODING": lambda value: metadata._MEM_FORMAT_ENCODING(int.__int__(value)),
}
# Pickled paths name their classes' old or new module, and may be Windows paths.
_KNOWN |= {
    f"{home}.{kind.__name__}": PurePosixPath
    for home in ("pathlib", "pathlib._local")
    for kind in (PosixPath, WindowsPath, PurePosixPath)
}
