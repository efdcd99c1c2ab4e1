"""Find and read the files of weights and optimizer states in every layout: of Accelerate, of the Trainer, and of
one process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors

from ..errors import CheckpointError
from ..modeling.split.names import renamed
from ..reading import read_json
from .safe import check_inside, load_file

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of a model's weights, and that which lists several, as transformers names them."""
SPLIT_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""Names of whole weights, in one file or in several."""
_STATE_FILE = re.compile(
    r"optimizer(_\d+)?\.bin|optimizer\.pt|scheduler(_\d+)?\.bin|scheduler\.pt|scaler\.pt|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin"
    r"|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|custom_checkpoint_\d+\.pkl|trainer_state\.json"
    r"|model((_\d+)|(-\d+-of-\d+))?\.safetensors|pytorch_model((_\d+)|(_fsdp(_\d+)?)|(-\d+-of-\d+))?\.bin"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
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


def files_of_index(index: Path) -> list[str]:
    """Return the files that an index of weights lists. Raise CheckpointError if it cannot be read, or names a file
    outside of its folder.
    """
    try:
        names = sorted(set(read_json(index, "index of weights", CheckpointError)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} cannot be read ({type(error).__name__}: {error}); use another checkpoint."
        ) from None
    return [check_inside(name) for name in names]


def _of_several_files(index: Path) -> dict[str, torch.Tensor]:
    """Return weights from several files, as transformers writes those of large models."""
    return {name: value for file in files_of_index(index) for name, value in _safetensors(index.parent / file).items()}
