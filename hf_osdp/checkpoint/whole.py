"""Reads a checkpoint's states as whole tensors by Hugging Face names, from any layout, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import CheckpointError
from ..reading import read_json
from .layouts import Layout, Place
from .manifest import check_inside
from .safe import SafePlanner, SafeReader, load_file


def read_weights(place: Place) -> dict[str, torch.Tensor]:
    """A model's weights. All of them are in memory then.

    Args:
        place: where, as `find_model` found it.

    Raises:
        CheckpointError: they cannot be read.
    """
    if place.layout is Layout.SHARDED:
        return _unsharded(place.path, "model")
    if place.path.suffix == ".safetensors":
        return _safetensors(place.path)
    if place.path.suffix == ".json":
        return _several(place.path)
    return load_file(place.path)


def read_optimizer(place: Place) -> dict[str, Any]:
    """An optimizer's state, `{"state": {...}, "param_groups": [...]}` by names, or by positions where one process wrote it.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = _unsharded(place.path, "optimizer") if place.layout is Layout.SHARDED else load_file(place.path)
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError(f"{place.path} holds no optimizer's state; take another checkpoint.")
    return dict(state)


def is_positional(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state goes by the parameters' positions."""
    return any(isinstance(key, int) for group in state["param_groups"] for key in group["params"])


def named_state(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A state by positions, by names.

    Args:
        state: as `torch.optim.Optimizer.state_dict` gives it.
        groups: the parameters' names in the optimizer's order, group by group.

    Raises:
        CheckpointError: it is of another number of groups or parameters.
    """
    saved, wanted = [len(group["params"]) for group in state["param_groups"]], [len(names) for names in groups]
    if saved != wanted:
        raise CheckpointError(
            f"The checkpoint's optimizer has parameter groups of {saved} parameters, this one of {wanted};"
            " make the optimizer with the groups that it was saved with."
        )
    names = {
        position: name
        for group, group_names in zip(state["param_groups"], groups, strict=True)
        for position, name in zip(group["params"], group_names, strict=True)
    }
    return {
        "state": {names[position]: own for position, own in state["state"].items()},
        "param_groups": [{**group, "params": list(own)} for group, own in zip(state["param_groups"], groups, strict=True)],
    }


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_safetensors(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); take another checkpoint.") from None


def _several(index: Path) -> dict[str, torch.Tensor]:
    """Weights in several files, as transformers writes large ones."""
    said = read_json(index, "index of weights", CheckpointError)
    try:
        names = sorted(set(said["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({type(error).__name__}: {error}); take another checkpoint.") from None
    weights: dict[str, torch.Tensor] = {}
    for name in names:
        weights |= _safetensors(index.parent / check_inside(name))
    return weights


def _unsharded(path: Path, key: str) -> Any:
    """Shards, put together."""
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
            dcp.load(flat, storage_reader=reader, planner=planner, no_dist=True)
        return unflatten_state_dict(flat, index.planner_data)[key]
    except (CheckpointException, RuntimeError, KeyError, ValueError, OSError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read ({cause_of(error)}); take another checkpoint.") from None


def cause_of(error: BaseException) -> str:
    """Torch's own exception holds those of all ranks."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {type(inner).__name__}: {' '.join(str(inner).split())}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
