"""Reads what checkpoints hold without running anything that a file says."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path, PosixPath, PurePosixPath, WindowsPath
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from ..errors import CheckpointError
from .manifest import check_inside

_INDEX = ".metadata"
"""What torch.distributed.checkpoint calls its index."""
_MOST_INDEX_BYTES = 1 << 30
"""A few hundred bytes for each shard; a 70B model on a thousand ranks has 0.2 GB."""


def load_file(path: Path, *, numpy: bool = False) -> Any:
    """`torch.load` of tensors and plain values, onto the CPU.

    Args:
        path: the file.
        numpy: numpy's arrays may be in it, as random states have them.

    Raises:
        CheckpointError: it cannot be read, or holds anything else.
    """
    try:
        with torch.serialization.safe_globals(_numpy_types() if numpy else []):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; take another checkpoint.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        problem = f"{path} cannot be read as tensors and plain values ({_reason(error)}); take another checkpoint."
        raise CheckpointError(problem) from None


def _reason(error: Exception) -> str:
    """Torch's first line advises to read the file without care; what it found stands further down."""
    found = re.search(r"Unsupported \w+: [^\n]*?(?= was not| Please|\n|$)", str(error))
    return found.group(0) if found else str(error).split("\n")[0]


def _numpy_types() -> list[Any]:
    """What the state of numpy's generator is pickled as."""
    core = np._core if hasattr(np, "_core") else np.core
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), core.multiarray.scalar]


class SafeReader(FileSystemReader):
    """torch.distributed.checkpoint's reader; its index, which is a pickle, may hold its own dataclasses and nothing else.

    Args:
        path: the folder of the shards.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            CheckpointError: it is missing, damaged, or names files outside of the folder.
        """
        path = Path(self.path) / _INDEX
        index = _read_index(path)
        for info in (index.storage_data or {}).values():
            check_inside(getattr(info, "relative_path", None))
        index.storage_meta = index.storage_meta or metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class SafePlanner(DefaultLoadPlanner):
    """torch.distributed.checkpoint's planner; what is no tensor is read as plain values only."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Read one value. Its base, which would run what it reads, gets one that was read and written again."""
        safe = BytesIO()
        torch.save(torch.load(value, map_location="cpu", weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


def _read_index(path: Path) -> Metadata:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; take another checkpoint.")
    if path.stat().st_size > _MOST_INDEX_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than the {_MOST_INDEX_BYTES} of any index; it is damaged.")
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}); take another checkpoint.") from None
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{path} holds a {type(index).__name__}, no index; take another checkpoint.")
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Knows what an index is made of."""

    def __init__(self, file: BinaryIO):
        super().__init__(file)
        self._known = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _index_types()}
        # Paths are pickled by their classes' old or new home, and written on either system.
        self._known |= {f"{home}.{name}": PurePosixPath for home in ("pathlib", "pathlib._local") for name in _PATHS}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.layout)):
            return found
        if f"{module}.{name}" not in self._known:
            raise CheckpointError(f"The checkpoint's index asks for {module}.{name}, which no index holds; do not use it.")
        return self._known[f"{module}.{name}"]


_PATHS = (PosixPath.__name__, WindowsPath.__name__, PurePosixPath.__name__)


def _index_types() -> Iterable[Any]:
    named = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex")
    yield from (getattr(metadata, name) for name in named)
    yield from (metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size, torch.serialization._get_layout)
