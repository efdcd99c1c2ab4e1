"""Weights and optimizer states of a model, sharded or not, to and from a checkpoint. What is read may be of any plan and world."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.fsdp import FSDPModule

from ..distributed.consensus import on_rank_zero
from ..distributed.process_group import waiting_group
from ..errors import CheckpointError
from ..modeling.split.names import is_split, split_names, split_optimizer_state
from ..modeling.units import canonical_name
from ..sharding.optimizer_check import unwrapped
from ..sharding.state import (
    free_gathered,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    named_optimizer_state,
)
from ..sharding.whole_states import set_named_optimizer_state
from .layouts import Layout, find_model, find_optimizer, model_place, optimizer_place
from .safe import SafePlanner, SafeReader
from .split_states import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from .whole import cause_of, is_positional, named_state, read_optimizer, read_weights

_MODEL, _OPTIMIZER = "model", "optimizer"
"""Keys of the states in folders of shards, as Accelerate has them."""


# ------------------------------------------------------------------------------------------------------------------ saving


def save_model(
    folder: Path, model: nn.Module, *, sharded: bool, index: int = 0, trainable_only: bool = False, files: FileSystem | None = None
) -> None:
    """Write weights under their Hugging Face names. Collective.

    Args:
        folder: of the checkpoint; it exists.
        model: sharded by a plan.
        sharded: each rank writes its shards, and nothing is ever whole; else rank 0 writes whole tensors.
        index: of the model, where there are several.
        trainable_only: leave frozen parameters and buffers out, as for adapters.
        files: where shards go; None is the disk.

    Raises:
        CheckpointError: they cannot be written; on every rank.
    """
    free_gathered(model)
    wanted = _trainable(model) if trainable_only else None
    if sharded:
        state = {name: value for name, value in get_model_state_dict(model).items() if wanted is None or name in wanted}
        write_shards(model_place(folder, Layout.SHARDED, index).path, {_MODEL: state}, files)
        return
    state = full_state_dict(model)
    state = {name: value for name, value in state.items() if wanted is None or name in wanted}
    on_rank_zero(lambda: torch.save(state, model_place(folder, Layout.WHOLE, index).path))


def save_optimizer(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool, index: int = 0, files: FileSystem | None = None
) -> None:
    """Write an optimizer's state by its parameters' Hugging Face names. Collective. As `save_model`."""
    optimizer = unwrapped(optimizer)
    if sharded:
        state = named_optimizer_state(optimizer, lambda: get_optimizer_state_dict(model, optimizer))
        write_shards(optimizer_place(folder, Layout.SHARDED, index).path, {_OPTIMIZER: state}, files)
        return
    whole = full_optimizer_state_dict(model, optimizer)
    on_rank_zero(lambda: torch.save(whole, optimizer_place(folder, Layout.WHOLE, index).path))


def write_shards(path: Path, state: dict[str, Any], files: FileSystem | None) -> None:
    """Write a state by torch.distributed.checkpoint, each rank what it holds. Collective.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    writer = dcp.FileSystemWriter(path, sync_files=False)  # they are flushed with the rest of the checkpoint
    if files is not None:
        writer.fs = files
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # where there is one process
        _together(lambda: dcp.save(state, storage_writer=writer, process_group=waiting_group()), path, writes=True)


# ----------------------------------------------------------------------------------------------------------------- loading


def load_model(folder: Path, model: nn.Module, *, index: int = 0, trainable_only: bool = False) -> None:
    """Load weights, whatever wrote them. Collective.

    Args:
        folder: of the checkpoint.
        model: sharded or not.
        index: of the model, where there are several.
        trainable_only: the checkpoint may lack what is frozen.

    Raises:
        CheckpointError: they are missing, damaged, or of another model; on every rank.
    """
    free_gathered(model)
    place = on_rank_zero(lambda: find_model(folder, index))
    if place.layout is Layout.SHARDED and isinstance(model, FSDPModule):
        _load_sharded_model(place.path, model, strict=not trainable_only)
        return
    state = _read_on_rank_zero(lambda: _fitting(read_weights(place), model, strict=not trainable_only))
    _as_checkpoint_error(lambda: load_full_state_dict(model, state, strict=False), place.path)


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, index: int = 0) -> None:
    """Load an optimizer's state, whatever wrote it. Collective.

    Args:
        folder: of the checkpoint.
        model: sharded or not.
        optimizer: of this model's parameters, with the parameter groups that it was saved with.
        index: of the optimizer, where there are several.

    Raises:
        CheckpointError: it is missing, damaged, or of another model or other groups; on every rank.
    """
    optimizer = unwrapped(optimizer)
    place = on_rank_zero(lambda: find_optimizer(folder, index))
    if place.layout is Layout.SHARDED and isinstance(model, FSDPModule):
        _load_sharded_optimizer(place.path, model, optimizer)
        return
    named = named_optimizer_state(optimizer, lambda: get_optimizer_state_dict(model, optimizer))
    groups = [group["params"] for group in named["param_groups"]]

    def read() -> dict[str, Any]:
        state = read_optimizer(place)
        return named_state(state, groups) if is_positional(state) else state

    state = _read_on_rank_zero(read)
    _as_checkpoint_error(lambda: load_full_optimizer_state_dict(model, optimizer, state), place.path)


def _load_sharded_model(path: Path, model: nn.Module, *, strict: bool) -> None:
    """Each rank reads what it holds."""
    state = get_model_state_dict(model)
    saved = _saved_names(path, _MODEL)
    missing = [name for name in state if name not in saved]
    _check_names([n for n in missing if not any(n in tie and tie & saved for tie in _ties(model))], saved - set(state), path, strict=strict)
    wanted = {name: value for name, value in state.items() if name in saved}
    _read_shards(path, {_MODEL: wanted})
    set_model_state_dict(model, state)


def _load_sharded_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each rank reads what it holds. A parameter that had no gradient when it was saved has no state."""
    state = get_optimizer_state_dict(model, optimizer)
    saved = _saved_names(path, f"{_OPTIMIZER}.state", parents=True)
    _check_names([], saved - set(state["state"]), path, strict=True)
    wanted = {"state": {name: own for name, own in state["state"].items() if name in saved}, "param_groups": state["param_groups"]}
    _as_checkpoint_error(lambda: _read_shards(path, {_OPTIMIZER: wanted}), path)
    own = split_optimizer_state(wanted, model) if is_split(model) else wanted
    _as_checkpoint_error(lambda: set_named_optimizer_state(model, optimizer, own), path)


def _saved_names(path: Path, prefix: str, *, parents: bool = False) -> set[str]:
    """Names below a key in an index; of the states of parameters (`parents`), the parameters'."""
    index = on_rank_zero(lambda: SafeReader(path).read_metadata().planner_data)
    depth = len(prefix.split("."))
    return {str(keys[depth]) for keys in index.values() if ".".join(map(str, keys[:depth])) == prefix and len(keys) > depth + parents}


def _read_shards(path: Path, state: dict[str, Any]) -> None:
    reader, planner = SafeReader(path), SafePlanner()
    _together(lambda: dcp.load(state, storage_reader=reader, planner=planner, process_group=waiting_group()), path, writes=False)


# ------------------------------------------------------------------------------------------------------------------- names


def _fitting(weights: Mapping[str, torch.Tensor], model: nn.Module, *, strict: bool) -> dict[str, torch.Tensor]:
    """Whole weights under the model's names: one tensor for each tied name, and adapters as peft's own files name them."""
    ties = _ties(model)
    wanted = {name for tie in ties for name in tie}
    found = {_adapter_name(name, wanted): value for name, value in weights.items()}
    for tie in ties:
        given = next((found[name] for name in sorted(tie) if name in found), None)
        if given is not None:
            found |= dict.fromkeys(tie - set(found), given)
    _check_names(sorted(wanted - set(found)), set(found) - wanted, None, strict=strict)
    return {name: value for name, value in found.items() if name in wanted}


def _adapter_name(name: str, wanted: Iterable[str]) -> str:
    """peft's files leave the adapter's name out: `lora_A.weight` is `lora_A.default.weight`."""
    if name in wanted or not name.startswith("base_model."):
        return name
    return next(
        (full for full in wanted if ".default" in full and full.replace(".modules_to_save", "").replace(".default", "") == name), name
    )


def _ties(model: nn.Module) -> list[set[str]]:
    """Hugging Face names in a model's state, those of one tensor together."""
    names: dict[int, set[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), set()).add(canonical_name(name))
    sliced = split_names(model).values()
    wholes = {part: {whole.name for whole in sliced if part == whole.parts[0]} for whole in sliced for part in whole.parts}
    ties = [set().union(*(wholes.get(name, {name}) for name in tie)) for tie in names.values()]
    return [tie for tie in ties if tie]


def _trainable(model: nn.Module) -> set[str]:
    """Hugging Face names of parameters that training changes."""
    names = {canonical_name(name) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return names | {whole.name for whole in split_names(model).values() if whole.parts[0] in names}


def _check_names(missing: Iterable[str], unexpected: Iterable[str], path: Path | None, *, strict: bool) -> None:
    missing, unexpected = sorted(missing), sorted(unexpected)
    if unexpected or (missing and strict):
        where = "The checkpoint" if path is None else str(path)
        raise CheckpointError(
            f"{where} is not of this model: {len(missing)} of its names are missing {missing[:2]}, {len(unexpected)} are not known"
            f" {unexpected[:2]}; make the model that was saved."
        )


# ------------------------------------------------------------------------------------------------------------------ errors


def _read_on_rank_zero(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `read` gives, on rank 0; an empty dict elsewhere. All ranks raise where it does."""
    found: dict[str, Any] = {}
    on_rank_zero(lambda: found.update(read()))
    return found


def _together(act: Callable[[], Any], path: Path, *, writes: bool) -> None:
    """Torch tells every rank of any rank's failure, by an exception that is no `Exception`."""
    try:
        act()
    except CheckpointException as failed:
        if writes:
            raise CheckpointError(f"{path} cannot be written ({cause_of(failed)}); the checkpoint before it is the last.") from None
        raise CheckpointError(f"{path} cannot be read ({cause_of(failed)}); take another checkpoint.") from None


def _as_checkpoint_error(load: Callable[[], Any], path: Path) -> None:
    try:
        load()
    except RuntimeError as error:
        raise CheckpointError(f"{path} is not of this model ({' '.join(str(error).split())}); make the model that was saved.") from None
