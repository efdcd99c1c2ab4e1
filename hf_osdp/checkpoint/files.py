"""Find and read a checkpoint's files, of every layout (of Accelerate, of the Trainer, of one process), without running
code from them.

`resume.check_checkpoint` has already refused special files.
"""

from __future__ import annotations

import errno
import pickle
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import chain, product
from pathlib import Path, PosixPath, PurePosixPath, WindowsPath
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from numpy._core import multiarray
from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ..errors import CheckpointError
from ..modeling.split.names import renamed
from ..reading import read_json

_INDEX = ".metadata"
"""File name of torch.distributed.checkpoint's index."""
_NUMPY_TYPES: list[Any] = [multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), multiarray.scalar]
"""Types in the pickled state of numpy's generator."""
_MOST_DIMS = 16
"""No model's tensor has more; a chunk has 2**dims corners."""
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of a model's weights, and that which lists several, as transformers names them."""
_STATE_FILE = re.compile(
    r"optimizer(_\d+)?\.bin|optimizer\.pt|scheduler(_\d+)?\.bin|scheduler\.pt|scaler\.pt|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin"
    r"|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|custom_checkpoint_\d+\.pkl|trainer_state\.json"
    r"|model((_\d+)|(-\d+-of-\d+))?\.safetensors|pytorch_model((_\d+)|(_fsdp(_\d+)?)|(-\d+-of-\d+))?\.bin"
    r"|adapter_model\.safetensors|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)
_STATE_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""Files and folders of state that Accelerate, the Trainer and this package write."""


def is_state(path: Path) -> bool:
    """Return whether a file or folder is state by its name; others are configuration, tokenizer, or a user's files."""
    return (_STATE_FOLDER if path.is_dir() else _STATE_FILE).fullmatch(path.name) is not None


def model_path(folder: Path, index: int = 0, *, sharded: bool) -> Path:
    return folder / _model_names(index)[0 if sharded else 1]


def optimizer_path(folder: Path, index: int = 0, *, sharded: bool) -> Path:
    return folder / _optimizer_names(index)[0 if sharded else 1]


def find_model(folder: Path, index: int = 0) -> Path:
    """Return the path of a checkpoint's weights: a folder of shards, or a file.

    Raise CheckpointError if there are none.
    """
    return _found(folder, _model_names(index), "weights")


def find_optimizer(folder: Path, index: int = 0) -> Path:
    """Return the path of a checkpoint's optimizer states, as `find_model` does."""
    return _found(folder, _optimizer_names(index), "optimizer state")


def is_sharded(path: Path) -> bool:
    """Return whether weights or optimizer states are in shards, from the name only, so that all ranks agree."""
    return not path.suffix


def is_of_one_process(weights: Path) -> bool:
    """Return whether weights are in a layout that one process writes."""
    return not weights.name.startswith("pytorch_model_fsdp")


def _model_names(index: int) -> list[str]:
    """Return names in search order: of shards, of whole tensors, of the layouts of one process."""
    number = f"_{index}" if index else ""
    names = [
        f"pytorch_model_fsdp_{index}",
        f"pytorch_model_fsdp{number}.bin",
        f"model{number}.safetensors",
        f"pytorch_model{number}.bin",
    ]
    return names if index else [*names, WEIGHTS_INDEX, "adapter_model.safetensors"]


def _optimizer_names(index: int) -> list[str]:
    return (
        [f"optimizer_{index}", f"optimizer_{index}.bin"] if index else ["optimizer_0", "optimizer.bin", "optimizer.pt"]
    )


def _found(folder: Path, names: Sequence[str], what: str) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(f"{folder} has no {what} ({names[0]}/, {', '.join(names[1:])}); give another.")


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return a model's whole weights by Hugging Face names, from files that are not in shards. Raise CheckpointError
    if they cannot be read.
    """
    match path.suffix:
        case ".safetensors":
            return _safetensors(path)
        case ".json":
            return _of_several_files(path)
    return dict(load_file(path))


def read_optimizer(path: Path) -> dict[str, Any]:
    """Return an optimizer's whole state, `{"state": {...}, "param_groups": [...]}`, by names, or by positions if one
    process wrote it.
    """
    state = load_file(path)
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError(f"{path} holds no optimizer state; use another checkpoint.")
    return dict(state)


def is_positional(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state is stored by the parameters' positions."""
    return any(isinstance(key, int) for group in state["param_groups"] for key in group["params"])


def named_state(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Replace positions in a state by names. Raise CheckpointError if it has other numbers of groups or parameters."""
    saved, own = [len(group["params"]) for group in state["param_groups"]], [len(names) for names in groups]
    if saved != own:
        raise CheckpointError(
            f"The checkpoint's optimizer has parameter groups of {saved} parameters, but this one of {own};"
            " make the optimizer with the groups of the checkpoint."
        )
    positions = (position for group in state["param_groups"] for position in group["params"])
    return renamed(state, dict(zip(positions, chain(*groups), strict=True)))


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_safetensors(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint.") from None


def _of_several_files(index: Path) -> dict[str, torch.Tensor]:
    """Return weights from the files that an index lists, as transformers writes those of large models. Raise
    CheckpointError if it cannot be read, or names a file outside of its folder.
    """
    try:
        names = sorted(set(read_json(index, "index of weights", CheckpointError)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} cannot be read ({type(error).__name__}: {error}); use another checkpoint."
        ) from None
    files = [_safetensors(index.parent / check_inside(name)) for name in names]
    return {name: value for file in files for name, value in file.items()}


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


def load_file(path: Path) -> Any:  # noqa: ANN401  # whatever the file contains
    """Load a file of `torch.save` onto the CPU; refuse anything but tensors, plain values and numpy arrays."""
    try:
        with torch.serialization.safe_globals(_NUMPY_TYPES):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"Checkpoint {path.parent} lacks {path.name}, which this run needs; take another."
        ) from None
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


class SafeReader(dcp.FileSystemReader):
    """torch.distributed.checkpoint's reader, whose index, a pickle, may contain only that package's dataclasses and
    plain values.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the index; refuse an index that is missing, damaged, or names files outside of the folder."""
        path = Path(self.path) / _INDEX
        try:
            with path.open("rb") as file:
                return _checked_index(_IndexUnpickler(file).load())
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle may raise any exception
            raise CheckpointError(
                f"{path} cannot be read ({type(error).__name__}: {error}); use another checkpoint."
            ) from None


class SafePlanner(dcp.DefaultLoadPlanner):
    """torch.distributed.checkpoint's planner, which reads only tensors and plain values."""

    def load_bytes(self, read_item: dcp.ReadItem, value: BytesIO) -> None:
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


def _checked_index(index: object) -> dcp.Metadata:
    """Refuse an object that is not an index, that names files outside of the folder, or whose chunks do not hold each
    element of a tensor exactly once.
    """
    if not isinstance(index, dcp.Metadata):
        raise TypeError(f"a {type(index).__name__} is not an index")
    if any(type(part) not in (str, int) for path in (index.planner_data or {}).values() for part in path):
        raise TypeError("a name is not a string")
    for name, stored in index.state_dict_metadata.items():
        if isinstance(stored, dcp.TensorStorageMetadata) and not _tile(stored):
            raise ValueError(f"chunks do not hold each element exactly once of {str(name)[:80]}")
    for info in index.storage_data.values():
        check_inside(getattr(info, "relative_path", None))
    return index


def _tile(stored: dcp.TensorStorageMetadata) -> bool:
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
    dcp.Metadata, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata,
    metadata.MetadataIndex, metadata.TensorProperties, metadata.StorageMeta, _StorageInfo, torch.Size,
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
