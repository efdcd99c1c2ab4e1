"""Which files of a folder hold weights and optimizer states, as Accelerate, the Trainer and one process write them; reads them whole."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from ..errors import CheckpointError
from ..reading import read_json
from .manifest import check_inside, check_regular
from .safe import SafePlanner, SafeReader, load_file


class Layout(Enum):
    """How states lie in a checkpoint."""

    SHARDED = "sharded"
    """A folder of torch.distributed.checkpoint, as Accelerate's FSDP2 with `SHARDED_STATE_DICT` has it."""
    WHOLE = "whole"
    """One file of whole tensors by name, as Accelerate's FSDP2 with `FULL_STATE_DICT` writes it."""
    SINGLE = "single"
    """As one process writes it: safetensors; optimizer states by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where states lie."""

    layout: Layout
    path: Path


_STATE_FILE = re.compile(
    r"optimizer(_\d+)?\.bin|optimizer\.pt|scheduler(_\d+)?\.bin|scheduler\.pt|scaler\.pt|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin"
    r"|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|custom_checkpoint_\d+\.pkl|trainer_state\.json"
    r"|model((_\d+)|(-\d+-of-\d+))?\.safetensors|pytorch_model((_\d+)|(_fsdp(_\d+)?)|(-\d+-of-\d+))?\.bin"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)
_STATE_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""What Accelerate, the Trainer and this package write."""


def is_state(path: Path) -> bool:
    """Return whether a file or folder is a checkpoint's state by its name; the rest is configuration, tokenizer, or a user's."""
    return (_STATE_FOLDER if path.is_dir() else _STATE_FILE).fullmatch(path.name) is not None


def model_path(folder: Path, layout: Layout, index: int = 0) -> Path:
    """Return where the weights of the model of this number are written."""
    return folder / _model_names(index)[layout][0]


def optimizer_path(folder: Path, layout: Layout, index: int = 0) -> Path:
    """Return where the state of the optimizer of this number is written."""
    return folder / _optimizer_names(index)[layout][0]


def find_model(folder: Path, index: int = 0) -> Place:
    """Return where a checkpoint's weights are.

    Raises:
        CheckpointError: nowhere.
    """
    return _found(folder, _model_names(index), "weights")


def find_optimizer(folder: Path, index: int = 0) -> Place:
    """Return where a checkpoint's optimizer state is. A single file tells by its content whether it goes by name (`WHOLE`) or by position.

    Raises:
        CheckpointError: nowhere.
    """
    return _found(folder, _optimizer_names(index), "optimizer state")


def _model_names(index: int) -> dict[Layout, list[str]]:
    number = f"_{index}" if index else ""
    single = [f"model{number}.safetensors", f"pytorch_model{number}.bin"]
    if index == 0:
        single += ["model.safetensors.index.json", "adapter_model.safetensors"]
    return {Layout.SHARDED: [f"pytorch_model_fsdp_{index}"], Layout.WHOLE: [f"pytorch_model_fsdp{number}.bin"], Layout.SINGLE: single}


def _optimizer_names(index: int) -> dict[Layout, list[str]]:
    whole = [f"optimizer_{index}.bin"] if index else ["optimizer.bin", "optimizer.pt"]
    return {Layout.SHARDED: [f"optimizer_{index}"], Layout.WHOLE: whole}


def _found(folder: Path, names: Mapping[Layout, Sequence[str]], what: str) -> Place:
    for layout, own in names.items():
        for name in own:
            if (folder / name).exists():
                return Place(layout=layout, path=folder / name)
    listed = ", ".join(f"{name}/" if layout is Layout.SHARDED else name for layout, own in names.items() for name in own)
    raise CheckpointError(f"{folder} has no {what} ({listed}); give another.")


# --------------------------------------------------------------------------------------------------------------- whole tensors


def read_weights(place: Place) -> dict[str, torch.Tensor]:
    """Return a model's weights by Hugging Face names. All of them are in memory then.

    Raises:
        CheckpointError: they cannot be read.
    """
    if place.layout is Layout.SHARDED:
        return dict(_unsharded(place.path, "model"))
    match place.path.suffix:
        case ".safetensors":
            return _safetensors(place.path)
        case ".json":
            return _of_several_files(place.path)
    return dict(load_file(place.path))


def read_optimizer(place: Place) -> dict[str, Any]:
    """Return an optimizer's state, `{"state": {...}, "param_groups": [...]}` by names, or by positions where one process wrote it.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = _unsharded(place.path, "optimizer") if place.layout is Layout.SHARDED else load_file(place.path)
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError(f"{place.path} holds no optimizer's state; take another checkpoint.")
    return dict(state)


def is_positional(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state goes by the parameters' positions."""
    return any(isinstance(key, int) for group in state["param_groups"] for key in group["params"])


def named_state(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a state that goes by positions with names.

    Raises:
        CheckpointError: it is of another number of groups or parameters.
    """
    saved, own = [len(group["params"]) for group in state["param_groups"]], [len(names) for names in groups]
    if saved != own:
        raise CheckpointError(
            f"The checkpoint's optimizer has parameter groups of {saved} parameters, this one of {own};"
            " make the optimizer with the groups that it was saved with."
        )
    pairs = list(zip(state["param_groups"], groups, strict=True))
    names = {position: name for group, own_names in pairs for position, name in zip(group["params"], own_names, strict=True)}
    return {
        "state": {names[position]: values for position, values in state["state"].items()},
        "param_groups": [{**group, "params": list(own_names)} for group, own_names in pairs],
    }


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    check_regular(path)
    try:
        return load_safetensors(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); take another checkpoint.") from None


def _of_several_files(index: Path) -> dict[str, torch.Tensor]:
    """Return weights in several files, as transformers writes large ones."""
    content = read_json(index, "index of weights", CheckpointError)
    try:
        names = sorted(set(content["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({type(error).__name__}: {error}); take another checkpoint.") from None
    return {name: value for file in names for name, value in _safetensors(index.parent / check_inside(file)).items()}


def _unsharded(path: Path, key: str) -> Any:  # noqa: ANN401  # what the checkpoint has
    """Load shards as full tensors."""
    reader = SafeReader(path)
    index = reader.read_metadata()
    try:
        flat = {
            name: torch.empty(of.size, dtype=of.properties.dtype) if isinstance(of, TensorStorageMetadata) else None
            for name, of in index.state_dict_metadata.items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process it is
            planner = SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load_shards(flat, storage_reader=reader, planner=planner, no_dist=True)
        return unflatten_state_dict(flat, index.planner_data)[key]
    except (CheckpointException, RuntimeError, KeyError, ValueError, OSError, EOFError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({cause_of(error)}); take another checkpoint.") from None


def cause_of(error: BaseException) -> str:
    """Return an error in one line; torch's own exception holds those of all ranks."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {cause_of(inner)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
