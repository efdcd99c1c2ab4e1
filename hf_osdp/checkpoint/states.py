"""Weights and optimizer states of a model, sharded or not, to and from a checkpoint. What is read may be of any plan and world."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.fsdp import FSDPModule

from ..distributed.consensus import on_rank_zero
from ..distributed.process_group import waiting_group
from ..errors import CheckpointError
from ..modeling.split.names import split_names
from ..modeling.units import canonical_name
from ..sharding.state import (
    check_states,
    free_gathered,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    named_weights,
    optimizer_state,
    set_optimizer_state,
)
from . import layouts
from .safe import SafePlanner, SafeReader

_MODEL, _OPTIMIZER = "model", "optimizer"
"""Keys of the states in folders of shards, as Accelerate has them."""


def save_model(
    folder: Path, model: nn.Module, *, sharded: bool, index: int = 0, trainable_only: bool = False, files: FileSystem | None = None
) -> None:
    """Write weights under their Hugging Face names into a checkpoint's folder. Collective.

    Args:
        folder: it exists.
        model: sharded by a plan, or plain.
        sharded: each rank writes its shards, and nothing is ever whole; else rank 0 writes whole tensors.
        index: of the model, where there are several.
        trainable_only: leave frozen parameters and buffers out, as for adapters.
        files: where shards go; None is the disk.

    Raises:
        CheckpointError: they cannot be written; on every rank.
    """
    free_gathered(model)
    weights = named_weights(model) if sharded else full_state_dict(model)
    names = _trainable(model) if trainable_only else weights.keys()
    state = {name: value.detach() if torch.is_tensor(value) else value for name, value in weights.items() if name in names}
    if sharded:
        write_shards(layouts.model_path(folder, index, sharded=True), {_MODEL: state}, files)
    else:
        on_rank_zero(lambda: torch.save(state, layouts.model_path(folder, index, sharded=False)))


def save_optimizer(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool, index: int = 0, files: FileSystem | None = None
) -> None:
    """Write an optimizer's state by its parameters' Hugging Face names. Collective. As `save_model`."""
    if sharded:
        write_shards(layouts.optimizer_path(folder, index, sharded=True), {_OPTIMIZER: optimizer_state(model, optimizer)}, files)
        return
    whole = full_optimizer_state_dict(model, optimizer)
    on_rank_zero(lambda: torch.save(whole, layouts.optimizer_path(folder, index, sharded=False)))


def write_shards(path: Path, state: dict[str, Any], files: FileSystem | None) -> None:
    """Write a state by torch.distributed.checkpoint, each rank what it holds. Collective; all raise CheckpointError where one does."""
    writer = FileSystemWriter(path, sync_files=False)  # they are flushed with the rest of the checkpoint
    writer.fs = files or writer.fs
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # where there is one process
        try:
            save_shards(state, storage_writer=writer, process_group=waiting_group())
        except CheckpointException as failed:  # of any rank, on every rank
            raise CheckpointError(f"{path} cannot be written ({layouts.cause_of(failed)}); the checkpoint before it is the last.") from None


def load_model(folder: Path, model: nn.Module, *, index: int = 0, trainable_only: bool = False) -> None:
    """Load weights, whatever wrote them. Collective.

    Raises:
        CheckpointError: they are missing, damaged, or of another model; on every rank.
    """
    free_gathered(model)
    path = on_rank_zero(lambda: layouts.find_model(folder, index))
    targets = named_weights(model)
    if layouts.is_sharded(path) and isinstance(model, FSDPModule):
        keys = _index_of(path).planner_data.values()
        saved = {str(key[1]) for key in keys if key[0] == _MODEL and len(key) > 1}
        names = _saved_names(saved, targets, path, strict=not trainable_only)
        found = {names[name]: value.detach() if torch.is_tensor(value) else value for name, value in targets.items() if name in names}
        _read_shards(path, {_MODEL: found})
        if others := {name: value for name, value in found.items() if not torch.is_tensor(value)}:
            model.load_state_dict(others, strict=False)
        return

    def read() -> dict[str, torch.Tensor]:
        weights = layouts.read_weights(path)
        names = _saved_names(weights, targets, path, strict=not trainable_only)
        return {name: weights[saved] for name, saved in names.items()}

    try:
        load_full_state_dict(model, _read_on_rank_zero(read), strict=False)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path} is not of this model ({text}); make the model that was saved.") from None


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, index: int = 0) -> None:
    """Load an optimizer's state, whatever wrote it. Collective.

    Raises:
        CheckpointError: it is missing, damaged, or of another model, optimizer or groups; on every rank.
    """
    path = on_rank_zero(lambda: layouts.find_optimizer(folder, index))
    try:
        if layouts.is_sharded(path) and isinstance(model, FSDPModule):
            _load_sharded_optimizer(path, model, optimizer)
            return
        groups = [group["params"] for group in optimizer_state(model, optimizer)["param_groups"]]

        def read() -> dict[str, Any]:
            state = layouts.read_optimizer(path)
            return layouts.named_state(state, groups) if layouts.is_positional(state) else state

        load_full_optimizer_state_dict(model, optimizer, _read_on_rank_zero(read))
    except (RuntimeError, ValueError, KeyError) as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(f"{path} cannot be loaded ({text}); make the model and the optimizer that were saved.") from None


def _load_sharded_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load states, of which each rank reads what it holds. A parameter that had no gradient when it was saved has no state."""
    mine = optimizer_state(model, optimizer, as_target=True)
    index, saved, group_keys = _index_of(path), dict[str, dict[str, Any]](), set[str]()
    for flat, keys in index.planner_data.items():
        if keys[:2] == (_OPTIMIZER, "param_groups") and len(keys) > 3:
            group_keys.add(str(keys[3]))
        if keys[:2] == (_OPTIMIZER, "state") and len(keys) > 3:
            stored = index.state_dict_metadata[flat]
            shapes = saved.setdefault(str(keys[2]), {})
            if isinstance(stored, TensorStorageMetadata) and stored.size:
                shapes[str(keys[3])] = stored.size
    check_states(saved, group_keys, mine, optimizer)
    found = {"state": {name: own for name, own in mine["state"].items() if name in saved}, "param_groups": mine["param_groups"]}
    _read_shards(path, {_OPTIMIZER: found})
    set_optimizer_state(model, optimizer, found)


def _index_of(path: Path) -> Metadata:
    return on_rank_zero(lambda: SafeReader(path).read_metadata())


def _read_shards(path: Path, state: dict[str, Any]) -> None:
    try:
        load_shards(state, storage_reader=SafeReader(path), planner=SafePlanner(), process_group=waiting_group())
    except CheckpointException as failed:  # of any rank, on every rank
        raise CheckpointError(f"{path} cannot be read ({layouts.cause_of(failed)}); take another checkpoint.") from None


def _read_on_rank_zero(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `read` gives on rank 0, an empty dict elsewhere. All ranks raise where it does."""
    found: dict[str, Any] = {}
    on_rank_zero(lambda: found.update(read()))
    return found


def _saved_names(saved: Iterable[str], targets: Mapping[str, torch.Tensor], path: Path, *, strict: bool) -> dict[str, str]:
    """Return for each of the model's names the one under which it was saved; of tied names one is enough. Refuse what does not fit."""
    own = {_adapter_name(name, targets): name for name in saved}
    by_tensor = {id(target): own[name] for name, target in targets.items() if name in own}
    found = {name: own.get(name) or by_tensor[id(target)] for name, target in targets.items() if id(target) in by_tensor}
    missing, unexpected = sorted(targets.keys() - found.keys()), sorted(own.keys() - targets.keys())
    if unexpected or (missing and strict):
        raise CheckpointError(
            f"{path} is not of this model: {len(missing)} of its names are missing {missing[:2]}, {len(unexpected)} are not known"
            f" {unexpected[:2]}; make the model that was saved."
        )
    return found


def _adapter_name(name: str, names: Iterable[str]) -> str:
    """Return the model's own name: peft's files leave the adapter's out, `lora_A.weight` is `lora_A.default.weight`."""
    if name in names or not name.startswith("base_model."):
        return name
    adapters = (full for full in names if ".default" in full)
    return next((full for full in adapters if full.replace(".modules_to_save", "").replace(".default", "") == name), name)


def _trainable(model: nn.Module) -> set[str]:
    """Return Hugging Face names of parameters that training changes."""
    names = {canonical_name(name) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return names | {whole.name for whole in split_names(model).values() if whole.parts[0] in names}
