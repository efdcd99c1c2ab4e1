"""Save and load weights, optimizer and random states of any plan and world size, and the whole checkpoint of a
plain loop.
"""

from __future__ import annotations

import math
import random
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.checkpoint.stateful import Stateful
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import rank
from ..distributed.process_group import gloo_group
from ..errors import CheckpointError, first_line, one_line
from ..modeling.identity import optimizer_texts
from ..modeling.split.names import merged_names
from ..modeling.units import canonical_name, class_of, named_parameters
from ..sharding.gradients import local
from ..sharding.optimizers import kind_of
from ..sharding.replicas import is_under_plan
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
from .resume import check_checkpoint, warn_of_changes
from .safe import SafePlanner, SafeReader, load_file, save_file
from .writer import CheckpointWriter, Staging, on_every_rank, on_first_rank

_MODEL, _OPTIMIZER = "model", "optimizer"
"""Accelerate's keys of the states in folders of shards."""
PROGRESS_NAME = "custom_checkpoint_0.pkl"
_TRAINERS_NAMES = {
    "cpu": "torch_manual_seed",
    "cuda": "torch_cuda_manual_seed",
    "python": "random_state",
    "numpy": "numpy_random_seed",
}
"""The Trainer's names of random states → Accelerate's names."""


def save_model(
    folder: Path,
    model: nn.Module,
    *,
    sharded: bool,
    index: int = 0,
    trainable_only: bool = False,
    files: FileSystem | None = None,
) -> None:
    """Write weights under their Hugging Face names into a checkpoint's folder. Collective; all raise CheckpointError
    if it fails.

    If `sharded`, each rank writes its shards, to the disk or to `files`; else rank 0 writes whole tensors. `index` is
    the model's number among several. `trainable_only` leaves frozen parameters and buffers out, as for adapters.
    """
    free_gathered(model)
    check_finite(model, folder.name)
    weights = named_weights(model) if sharded else full_state_dict(model)
    names = set(weights)
    if trainable_only:
        trained = (name for name, parameter in named_parameters(model).items() if parameter.requires_grad)
        names = set(merged_names(trained, model, tied=True))
    state = {
        name: value.detach() if torch.is_tensor(value) else value for name, value in weights.items() if name in names
    }
    if sharded:
        write_shards(layouts.model_path(folder, index, sharded=True), {_MODEL: state}, files)
    else:
        on_first_rank(lambda: save_file(state, layouts.model_path(folder, index, sharded=False)))


def save_optimizer(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sharded: bool,
    index: int = 0,
    files: FileSystem | None = None,
) -> None:
    """Write an optimizer's state by its parameters' Hugging Face names.

    Collective; arguments and errors are as for `save_model`.
    """
    free_gathered(model)  # the optimizer has the shards
    if sharded:
        write_shards(
            layouts.optimizer_path(folder, index, sharded=True), {_OPTIMIZER: optimizer_state(model, optimizer)}, files
        )
        return
    whole = full_optimizer_state_dict(model, optimizer)
    on_first_rank(lambda: save_file(whole, layouts.optimizer_path(folder, index, sharded=False)))


def write_shards(path: Path, state: dict[str, Any], files: FileSystem | None) -> None:
    """Write a state by torch.distributed.checkpoint, on each rank its shards.

    Collective; all raise CheckpointError if one fails.
    """
    writer = FileSystemWriter(path, sync_files=False)  # `CheckpointWriter` flushes all files of the checkpoint
    writer.fs = files or writer.fs

    def error(cause: str) -> CheckpointError:
        return CheckpointError(f"{path} cannot be written ({cause}); the previous checkpoint is the last.")

    with _errors_in_one_line(error):
        save_shards(state, storage_writer=writer, process_group=gloo_group())


@contextmanager
def _errors_in_one_line(make: Callable[[str], CheckpointError]) -> Iterator[None]:
    """Make one line of errors of torch.distributed.checkpoint, which raises on every rank if any rank fails; hide its
    warning of a single process.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        first = min(failed.failures)
        cause, _ = failed.failures[first]
        raise make(f"rank {first}: {type(cause).__name__}: {one_line(cause)}") from None


def check_finite(model: nn.Module, folder: str | Path) -> None:
    """Refuse to save weights that are not finite, before they replace others. Collective.

    Raise CheckpointError on every rank if one rank's shards have NaN or infinity.
    """

    def look() -> None:
        for name, parameter in model.named_parameters():
            shard = local(parameter.detach())
            if parameter.requires_grad and shard.is_floating_point() and shard.numel():
                if not math.isfinite(torch.linalg.vector_norm(shard, float("inf")).item()):
                    raise CheckpointError(
                        f"{canonical_name(name)} has values on rank {rank()} that are not finite, so {folder} is not"
                        " written: training has diverged. Go on from an earlier checkpoint, with a lower learning rate"
                        " or without the data that caused it."
                    )

    on_every_rank(look)


def load_model(folder: Path, model: nn.Module, *, index: int = 0, trainable_only: bool = False) -> None:
    """Load weights of any layout.

    Collective; all ranks raise CheckpointError if they are missing, damaged or of another model.
    """
    free_gathered(model)
    path = on_rank_zero(lambda: layouts.find_model(folder, index))
    targets = named_weights(model)
    if layouts.is_sharded(path):
        content = _index_of(path)
        keys = {flat: key for flat, key in content.planner_data.items() if key[0] == _MODEL and len(key) > 1}
        kinds = content.state_dict_metadata
        saved = {str(key[1]): getattr(kinds[flat], "properties", None) for flat, key in keys.items()}
        names = _saved_names(saved, targets, path, strict=not trainable_only)
        found = {
            names[name]: value.detach() if torch.is_tensor(value) else value
            for name, value in targets.items()
            if name in names
        }
        _read_shards(path, {_MODEL: found})
        if is_under_plan(model):  # its tensors have been read in place
            found = {name: value for name, value in found.items() if not torch.is_tensor(value)}
        model.load_state_dict(found, strict=False)
        return

    def read() -> dict[str, torch.Tensor]:
        weights = layouts.read_weights(path)
        if not trainable_only and weights.keys() - targets.keys():
            weights = _under_own_names(weights, model, path)
        names = _saved_names(weights, targets, path, strict=not trainable_only)
        return {name: weights[saved] for name, saved in names.items()}

    try:
        load_full_state_dict(model, _read_on_rank_zero(read), strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} is not of this model ({one_line(error)}); make the model that was saved."
        ) from None


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, index: int = 0) -> None:
    """Load an optimizer's state of any layout.

    Collective; all ranks raise CheckpointError if it is missing or does not fit.
    """
    path = on_rank_zero(lambda: layouts.find_optimizer(folder, index))
    try:
        if layouts.is_sharded(path):
            _load_sharded_optimizer(path, model, optimizer)
            return
        groups = [group["params"] for group in optimizer_state(model, optimizer)["param_groups"]]

        def read() -> dict[str, Any]:
            state = layouts.read_optimizer(path)
            return layouts.named_state(state, groups) if layouts.is_positional(state) else state

        load_full_optimizer_state_dict(model, optimizer, _read_on_rank_zero(read))
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be loaded ({one_line(error).rstrip('.')}); make the model and the optimizer that were"
            " saved."
        ) from None


def _load_sharded_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load states in shards; each rank reads its own.

    Parameters without a gradient at the time of saving have no state.
    """
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
    groups = [{key: value for key, value in group.items() if key in group_keys} for group in mine["param_groups"]]
    found = {"state": {name: own for name, own in mine["state"].items() if name in saved}, "param_groups": groups}
    _read_shards(path, {_OPTIMIZER: found})
    whole = [{**own, **read} for own, read in zip(mine["param_groups"], groups, strict=True)]
    set_optimizer_state(model, optimizer, {**found, "param_groups": whole})


def _index_of(path: Path) -> Metadata:
    return on_rank_zero(lambda: SafeReader(path).read_metadata())


def _read_shards(path: Path, state: dict[str, Any]) -> None:
    def error(cause: str) -> CheckpointError:
        return CheckpointError(f"{path} cannot be read ({cause}); use another checkpoint.")

    with _errors_in_one_line(error):
        load_shards(state, storage_reader=SafeReader(path), planner=SafePlanner(), process_group=gloo_group())


def _read_on_rank_zero(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `read` on rank 0, an empty dict elsewhere. All ranks raise if `read` does."""
    found: dict[str, Any] = {}
    on_rank_zero(lambda: found.update(read()))
    return found


def _under_own_names(weights: dict[str, Any], model: nn.Module, path: Path) -> dict[str, Any]:
    """Return weights that transformers has saved under other names, as it does for vision-language models, under those
    of the model, read by transformers; else these weights.
    """
    cls: Any = class_of(model)
    if not issubclass(cls, PreTrainedModel) or not (path.parent / CONFIG_NAME).exists():
        return weights
    with suppress(OSError, ValueError, RuntimeError):
        loaded, found = cls.from_pretrained(
            path.parent, config=deepcopy(model.config), dtype="auto", output_loading_info=True
        )
        if not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return dict(loaded.state_dict())
    return weights


def _saved_names(
    saved: Mapping[str, Any], targets: Mapping[str, torch.Tensor], path: Path, *, strict: bool
) -> dict[str, str]:
    """Map the model's names to those in the file, which may hold only one of several tied names; refuse names that
    do not fit, and dtypes that loading would round.
    """
    own = {_adapter_name(name, targets): name for name in saved}
    by_tensor = {id(target): own[name] for name, target in targets.items() if name in own}
    found = {
        name: own.get(name) or by_tensor[id(target)] for name, target in targets.items() if id(target) in by_tensor
    }
    missing, unexpected = sorted(targets.keys() - found.keys()), sorted(own.keys() - targets.keys())
    if unexpected or (missing and strict):
        raise CheckpointError(
            f"{path} is not of this model: {len(missing)} of its names are missing {missing[:2]}, {len(unexpected)}"
            " are not known"
            f" {unexpected[:2]}; make the model that was saved."
        )
    for name, stored in found.items():
        was, now = (getattr(one, "dtype", torch.int) for one in (saved[stored], targets[name]))
        floats = was != now and was.is_floating_point and now.is_floating_point
        if floats and torch.finfo(now).bits <= torch.finfo(was).bits:
            raise CheckpointError(
                f"{path} has {name} in {was}, which this model would round to {now}; load the model in {was}."
            )
    return found


def _adapter_name(name: str, names: Iterable[str]) -> str:
    """Return the model's own name of a saved one; peft's files omit the adapter's name: `lora_A.weight` is
    `lora_A.default.weight`.
    """
    if name in names or not name.startswith("base_model."):
        return name
    adapters = (full for full in names if ".default" in full)
    return next(
        (full for full in adapters if full.replace(".modules_to_save", "").replace(".default", "") == name), name
    )


def stage_loop(
    staging: Staging, model: nn.Module, optimizer: torch.optim.Optimizer, *,
    others: Mapping[str, Stateful], progress: Mapping[str, Any], sharded: bool,
) -> None:  # fmt: skip
    """Write the files of a loop's checkpoint: model, optimizer, random states, `others` by file name, rank 0's
    `progress`. Collective.

    All ranks raise CheckpointError if a file cannot be written.
    """
    save_model(staging.path, model, sharded=sharded, files=staging.file_system)
    save_optimizer(staging.path, model, optimizer, sharded=sharded, files=staging.file_system)
    on_every_rank(lambda: save_random_states(staging.path, rank()))

    def save_rest() -> None:
        for name, owner in others.items():
            save_plain(staging.path / name, owner.state_dict(), type(owner).__name__)
        save_plain(staging.path / PROGRESS_NAME, dict(progress), "save_checkpoint's progress")

    on_first_rank(save_rest)


def save_plain(path: Path, state: object, owner: str) -> None:
    """Write a state; raise CheckpointError, which names its owner, if it could not be read again without unpickling
    code.
    """
    save_file(state, path)
    try:
        load_file(path, numpy=True)
    except CheckpointError:
        raise CheckpointError(
            f"The state of {owner} holds more than tensors and plain values, and could not be read again; let it hold"
            " numbers, text, lists, dicts and tensors."
        ) from None


def load_plain(path: Path, owner: Stateful) -> None:
    """Load a state that `save_plain` or the stock classes wrote; raise CheckpointError if it is not its owner's."""
    load_into(owner, load_file(path, numpy=True), path)


def load_into(owner: Stateful, state: Any, path: Path) -> None:  # noqa: ANN401  # whatever the file contains
    """Load a state that was read from a file; raise CheckpointError if it is of another kind."""
    try:
        owner.load_state_dict(state)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        kind = type(getattr(owner, "scheduler", owner)).__name__
        raise CheckpointError(
            f"{path} is not the state of a {kind} ({first_line(error)}); make the one that was saved, or use another"
            " checkpoint."
        ) from None


def load_loop(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *,
    others: Mapping[str, Stateful], writer: CheckpointWriter | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Resume from a checkpoint of any plan and number of ranks, and return its saved progress. Collective.

    All ranks raise CheckpointError if it is damaged, incomplete, or of another model.
    """
    folder = Path(folder)
    check_checkpoint(folder)

    def read_rest() -> dict[str, Any]:
        if missing := [name for name in others if not (folder / name).is_file()]:
            raise CheckpointError(f"Checkpoint {folder} lacks {missing[0]}, which this run needs; take another.")
        return {
            name: load_file(folder / name, numpy=True)
            for name in (*others, PROGRESS_NAME)
            if (folder / name).is_file()
        }

    rest = on_rank_zero(read_rest)
    run = writer or CheckpointWriter()
    run.settings = {**optimizer_texts(optimizer), **run.settings}  # as given: loading replaces them
    warn_of_changes(folder, {**run.settings, "optimizer": kind_of(optimizer).name}, run.plan)
    load_model(folder, model)
    load_optimizer(folder, model, optimizer)
    for name, owner in others.items():
        load_into(owner, rest[name], folder / name)
    load_random_states(folder, rank())
    return dict(rest.get(PROGRESS_NAME, {}))


def save_random_states(folder: Path, rank: int) -> None:
    states = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    save_file(states, folder / f"random_states_{rank}.pkl")


def load_random_states(folder: Path, rank: int) -> None:
    """Restore this process's random states; a rank that was not saved gets a new state, derived from rank 0's and
    its own number.
    """
    names = {
        rank: (f"random_states_{rank}.pkl", f"rng_state_{rank}.pth"),
        0: ("random_states_0.pkl", "rng_state_0.pth", "rng_state.pth"),
    }
    for number in (rank, 0):
        for path in (folder / name for name in names[number]):
            if path.is_file():
                _set_random_states(path, of_other_rank=None if number == rank else rank)
                return


def _set_random_states(path: Path, *, of_other_rank: int | None) -> None:
    read = load_file(path, numpy=True)
    try:
        states = {_TRAINERS_NAMES.get(name, name): state for name, state in read.items()}
        cpu, cuda = states["torch_manual_seed"], states.get("torch_cuda_manual_seed")
        if of_other_rank is not None:
            seed = zlib.crc32(cpu.numpy().tobytes() + of_other_rank.to_bytes(8, "little"))
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)  # CUDA's generators too
            return
        version, internal, gauss = states["random_state"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(cpu)
        if cuda is not None and torch.cuda.is_available():
            for device, own in zip(
                range(torch.cuda.device_count()), [cuda] if torch.is_tensor(cuda) else cuda, strict=False
            ):
                torch.cuda.set_rng_state(own, device)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path} holds no random states ({error}); use another checkpoint.") from None
