"""Which files of a folder hold weights and optimizer states, as Accelerate, the Trainer and one process write them; reads them whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ..errors import CheckpointError
from ..reading import read_json
from .safe import SafePlanner, SafeReader, check_inside, load_file

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


def model_path(folder: Path, index: int = 0, *, sharded: bool) -> Path:
    return folder / _model_names(index)[0 if sharded else 1]


def optimizer_path(folder: Path, index: int = 0, *, sharded: bool) -> Path:
    return folder / _optimizer_names(index)[0 if sharded else 1]


def find_model(folder: Path, index: int = 0) -> Path:
    """Return where a checkpoint's weights are: a folder of shards, or a file. Raise CheckpointError where they are nowhere."""
    return _found(folder, _model_names(index), "weights")


def find_optimizer(folder: Path, index: int = 0) -> Path:
    """Return where a checkpoint's optimizer state is, as `find_model`."""
    return _found(folder, _optimizer_names(index), "optimizer state")


def is_sharded(path: Path) -> bool:
    """Return whether weights or optimizer states are in shards, by the name alone: the same on every rank."""
    return not path.suffix


def is_of_one_process(weights: Path) -> bool:
    """Return whether one process wrote weights, in one of its own layouts."""
    return not weights.name.startswith("pytorch_model_fsdp")


def _model_names(index: int) -> list[str]:
    """Return names in the order in which they are looked for: of shards, of whole tensors, of what one process writes."""
    number = f"_{index}" if index else ""
    names = [f"pytorch_model_fsdp_{index}", f"pytorch_model_fsdp{number}.bin", f"model{number}.safetensors", f"pytorch_model{number}.bin"]
    return names if index else [*names, "model.safetensors.index.json", "adapter_model.safetensors"]


def _optimizer_names(index: int) -> list[str]:
    return [f"optimizer_{index}", f"optimizer_{index}.bin"] if index else ["optimizer_0", "optimizer.bin", "optimizer.pt"]


def _found(folder: Path, names: Sequence[str], what: str) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(f"{folder} has no {what} ({names[0]}/, {', '.join(names[1:])}); give another.")


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return a model's weights, all in memory, by Hugging Face names. Raise CheckpointError where they cannot be read."""
    if is_sharded(path):
        return dict(_unsharded(path, "model"))
    match path.suffix:
        case ".safetensors":
            return _safetensors(path)
        case ".json":
            return _of_several_files(path)
    return dict(load_file(path))


def read_optimizer(path: Path) -> dict[str, Any]:
    """Return an optimizer's state, `{"state": {...}, "param_groups": [...]}` by names, or by positions where one process wrote it."""
    state = _unsharded(path, "optimizer") if is_sharded(path) else load_file(path)
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError(f"{path} holds no optimizer's state; take another checkpoint.")
    return dict(state)


def is_positional(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state goes by the parameters' positions."""
    return any(isinstance(key, int) for group in state["param_groups"] for key in group["params"])


def named_state(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a state that goes by positions with names. Raise CheckpointError where it is of other numbers of groups or parameters."""
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
    try:
        return load_safetensors(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); take another checkpoint.") from None


def _of_several_files(index: Path) -> dict[str, torch.Tensor]:
    """Return weights in several files, as transformers writes large ones."""
    try:
        names = sorted(set(read_json(index, "index of weights", CheckpointError)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({type(error).__name__}: {error}); take another checkpoint.") from None
    return {name: value for file in names for name, value in _safetensors(index.parent / check_inside(file)).items()}


class _WholePlanner(SafePlanner, _EmptyStateDictLoadPlanner):
    """Make the tensors that the index names, and read them whole."""


def _unsharded(path: Path, key: str) -> Any:  # noqa: ANN401  # what the checkpoint has
    state: dict[str, Any] = {}
    reader = SafeReader(path)
    reader.read_metadata()  # its errors are lines of ours; torch would log a traceback and try again
    try:
        _load_state_dict(state, storage_reader=reader, planner=_WholePlanner(), no_dist=True)
        return state[key]
    except (CheckpointException, RuntimeError, KeyError, ValueError, OSError, EOFError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({cause_of(error)}); take another checkpoint.") from None


def cause_of(error: BaseException) -> str:
    """Return an error in one line; torch's own exception holds those of all ranks."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {cause_of(inner)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
