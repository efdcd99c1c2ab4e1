"""Read checkpoints without running code from their files.

`resume.check_checkpoint` has already refused special files.
"""

from __future__ import annotations

import math
import pickle
import re
import stat
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path, PosixPath, PurePosixPath, WindowsPath
from typing import Any, ClassVar

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
_MAX_INDEX_BYTES = 1 << 30
"""An index takes a few hundred bytes for each shard; for a 70B model on a thousand ranks 0.2 GB."""


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
        if (size := path.stat().st_size) > _MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes, but an index has at most {_MAX_INDEX_BYTES}; use another checkpoint."
            )
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
    """Refuse an object that is not an index, and values other than plain ones that torch would hash or compare
    later.
    """
    if not isinstance(index, Metadata):
        raise TypeError(f"a {type(index).__name__} is not an index")
    tensors = [stored for stored in index.state_dict_metadata.values() if isinstance(stored, TensorStorageMetadata)]
    chunks = [chunk for stored in tensors for chunk in stored.chunks]
    sizes = [
        *(stored.size for stored in tensors),
        *(size for chunk in chunks for size in (chunk.offsets, chunk.sizes)),
    ]
    if any(type(size) is not torch.Size for size in sizes):
        raise TypeError("a tensor's size is not a torch.Size")
    for name, stored in index.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and (problem := _tiling_problem(stored)):
            raise ValueError(f"{problem} of {str(name)[:80]}")
    if any(type(part) not in (str, int) for path in (index.planner_data or {}).values() for part in path):
        raise TypeError("a name is not a string")
    return index


def _tiling_problem(stored: TensorStorageMetadata) -> str | None:
    """Return what is wrong with a tensor's chunks unless each element is in exactly one; None if nothing is.

    Disjoint chunks inside the tensor cover it if they have as many elements. Chunks are compared with those that
    overlap along the dim with the most different offsets, which are few.
    """
    whole = stored.size
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks if math.prod(chunk.sizes)]
    for offsets, sizes in chunks:
        inside = len(offsets) == len(sizes) == len(whole) and all(
            0 <= at and 0 < size <= most - at for at, size, most in zip(offsets, sizes, whole, strict=True)
        )
        if not inside:
            return "a chunk lies outside"
    if sum(math.prod(sizes) for _, sizes in chunks) != math.prod(whole):
        return "chunks have too few or too many elements"
    if not whole:
        return None
    dim = max(range(len(whole)), key=lambda dim: len({offsets[dim] for offsets, _ in chunks}))
    reaching: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in sorted(chunks, key=lambda chunk: chunk[0][dim]):
        reaching = [(at, size) for at, size in reaching if at[dim] + size[dim] > offsets[dim]]
        for at, size in reaching:
            if all(max(a, b) < min(a + m, b + n) for a, b, m, n in zip(at, offsets, size, sizes, strict=True)):
                return "chunks overlap in elements"
        reaching.append((offsets, sizes))
    return None


def _refusal(what: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint's index contains {what}, which does not belong in an index; do not use it."
    )


def _by_scalar(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Restrict a look-up function to numbers and strings."""

    def checked(value: object) -> object:
        if type(value) not in (str, int):
            raise TypeError(f"a {type(value).__name__} is not a name")
        return make(value)

    return checked


class _IndexUnpickler(pickle._Unpickler):
    """Unpickle only the types of an index, and dicts with simple keys.

    The Python unpickler, 2.5 times as slow as C's (10 s for 50,000 tensors in shards), lets us check the keys of dicts
    before they are
    hashed: a tuple that contains another one twice, and so on, takes twice as long to hash with every level.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.layout)):
            return found
        if f"{module}.{name}" not in _KNOWN:
            raise _refusal(f"{module}.{name}")
        return _KNOWN[f"{module}.{name}"]

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._fill(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([(key, value)])

    def _fill(self, items: Iterable[tuple[object, object]]) -> None:
        for key, value in items:
            parts = (key.fqn, key.index) if type(key) is MetadataIndex else (key,)
            plain = all(type(part) in (str, int, type(None)) for part in parts)
            if not plain or (type(key) is MetadataIndex and type(key.offset) not in (torch.Size, type(None))):
                raise _refusal(f"a {type(key).__name__} as a key")
            self.stack[-1][key] = value

    def _refuse(self) -> None:
        raise _refusal("a set")  # or a dict of the oldest pickle protocol

    dispatch[pickle.SETITEMS[0]], dispatch[pickle.SETITEM[0]] = _set_items, _set_item
    dispatch |= dict.fromkeys((pickle.ADDITEMS[0], pickle.FROZENSET[0], pickle.DICT[0]), _refuse)


_INDEX_TYPES: tuple[Any, ...] = (
    Metadata, MetadataIndex, TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.TensorProperties, metadata.StorageMeta, _StorageInfo, torch.Size,
)  # fmt: skip
_KNOWN: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _INDEX_TYPES}
_KNOWN |= {
    f"{kind.__module__}.{kind.__qualname__}": _by_scalar(kind)
    for kind in (metadata._MEM_FORMAT_ENCODING, torch.serialization._get_layout)
}
# Pickled paths name their classes' old or new module, and may be Windows paths.
_KNOWN |= {
    f"{home}.{kind.__name__}": PurePosixPath
    for home in ("pathlib", "pathlib._local")
    for kind in (PosixPath, WindowsPath, PurePosixPath)
}
