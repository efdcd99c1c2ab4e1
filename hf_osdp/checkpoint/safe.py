"""Read what checkpoints hold without running anything that a file says. Special files were refused by `resume.check_checkpoint`."""

from __future__ import annotations

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
"""What torch.distributed.checkpoint calls its index."""
_NUMPY_TYPES: list[Any] = [multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), multiarray.scalar]
"""What the state of numpy's generator is pickled as."""
_MOST_INDEX_BYTES = 1 << 30
"""A few hundred bytes for each shard; a 70B model on a thousand ranks has 0.2 GB."""


def load_file(path: Path, *, numpy: bool = False) -> Any:  # noqa: ANN401  # what the file has
    """Return what `torch.save` wrote of tensors and plain values, and with `numpy` of its arrays, on the CPU; refuse anything else."""
    try:
        with torch.serialization.safe_globals(_NUMPY_TYPES if numpy else []):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; take another checkpoint.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        # Torch's first line advises to read the file without care; what it found stands further down.
        found = re.search(r"Unsupported \w+: [^\n]*?(?= was not| Please|\n|$)", str(error))
        reason = found.group(0) if found else str(error).split("\n")[0]
        raise CheckpointError(f"{path} cannot be read as tensors and plain values ({reason}); take another checkpoint.") from None


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


class SafeReader(FileSystemReader):
    """torch.distributed.checkpoint's reader; its index, which is a pickle, may hold its own dataclasses and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index; refuse one that is missing, damaged, or names files outside of the folder."""
        path = Path(self.path) / _INDEX
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; take another checkpoint.")
        if (size := path.stat().st_size) > _MOST_INDEX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, more than the {_MOST_INDEX_BYTES} of any index; it is damaged.")
        try:
            with path.open("rb") as file:
                index = _checked_index(_IndexUnpickler(file).load())
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}); take another checkpoint.") from None
        for info in (index.storage_data or {}).values():
            check_inside(getattr(info, "relative_path", None))
        index.storage_meta = index.storage_meta or metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class SafePlanner(DefaultLoadPlanner):
    """torch.distributed.checkpoint's planner; what is no tensor is read as plain values only."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Read one value. The base class, which would run what it reads, gets one that was read and written again."""
        safe = BytesIO()
        torch.save(torch.load(value, map_location="cpu", weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


def _checked_index(index: object) -> Metadata:
    """Refuse what is no index, and values that torch hashes or compares later, and that are no plain ones."""
    if not isinstance(index, Metadata):
        raise TypeError(f"a {type(index).__name__} is no index")
    tensors = [stored for stored in index.state_dict_metadata.values() if isinstance(stored, TensorStorageMetadata)]
    chunks = [chunk for stored in tensors for chunk in stored.chunks]
    sizes = [*(stored.size for stored in tensors), *(size for chunk in chunks for size in (chunk.offsets, chunk.sizes))]
    if any(type(size) is not torch.Size for size in sizes):
        raise TypeError("a tensor's size is no size")
    if any(type(part) not in (str, int) for path in (index.planner_data or {}).values() for part in path):
        raise TypeError("a name is no text")
    return index


def _refusal(what: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint's index asks for {what}, which no index holds; do not use it.")


def _by_scalar(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `make`, which looks its argument up, for numbers and text only."""

    def made(value: object) -> object:
        if type(value) not in (str, int):
            raise TypeError(f"a {type(value).__name__} is no name")
        return make(value)

    return made


class _IndexUnpickler(pickle._Unpickler):
    """Know what an index is made of.

    The one in Python, 2.5 times as slow as C's (10 s for 50,000 tensors in shards), can be told which keys a dict may have: the hash of
    a tuple that holds another twice, and so on, takes twice as long with every level.
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
        raise _refusal("a set")  # or a dict of the oldest protocol

    dispatch[pickle.SETITEMS[0]], dispatch[pickle.SETITEM[0]] = _set_items, _set_item
    dispatch |= dict.fromkeys((pickle.ADDITEMS[0], pickle.FROZENSET[0], pickle.DICT[0]), _refuse)


_INDEX_TYPES: tuple[Any, ...] = (
    Metadata, MetadataIndex, TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.TensorProperties, metadata.StorageMeta, _StorageInfo, torch.Size,
)  # fmt: skip
_KNOWN: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _INDEX_TYPES}
_KNOWN |= {
    f"{kind.__module__}.{kind.__qualname__}": _by_scalar(kind) for kind in (metadata._MEM_FORMAT_ENCODING, torch.serialization._get_layout)
}
# Paths are pickled by their classes' old or new home, and written on either system.
_KNOWN |= {
    f"{home}.{kind.__name__}": PurePosixPath for home in ("pathlib", "pathlib._local") for kind in (PosixPath, WindowsPath, PurePosixPath)
}
