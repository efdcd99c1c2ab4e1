"""A checkpoint in another layout, in one process and without the training script. Training itself reads every layout as it is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..modeling.split.names import at_positions
from . import layouts
from .layouts import Layout
from .manifest import MANIFEST_NAME
from .resume import check_checkpoint
from .states import write_shards
from .writer import CheckpointWriter

_TRAINER = "trainer_state.json"
_SEVERAL = ("optimizer_1", "pytorch_model_fsdp_1", "model_1")


class Target(Enum):
    """What a checkpoint becomes."""

    SHARDED = "sharded"
    """Accelerate's FSDP2 with `SHARDED_STATE_DICT`."""
    WHOLE = "whole"
    """Accelerate's FSDP2 with `FULL_STATE_DICT`."""
    SINGLE = "single"
    """Accelerate or the Trainer in one process."""
    WEIGHTS = "weights"
    """Safetensors alone, as `from_pretrained` reads them."""


def convert(source: Path, target: Path, *, to: Target, model: nn.Module | None = None) -> None:
    """Write a checkpoint again. All of its weights, and then of its optimizer states, are in memory meanwhile.

    What else is in it (schedulers, random states, configuration) is copied.

    Args:
        source: complete; it stays as it is.
        target: a folder that does not exist yet.
        to: the layout.
        model: the checkpoint's model; it may be on the meta device. Needed where one process wrote the optimizer's state, which goes
            by position: the model says which names these are.

    Raises:
        CheckpointError: the source is damaged, or the model is not its.
        ValueError: the target exists, or the source holds adapters or several models.
    """
    if target.exists():
        raise ValueError(f"{target} exists already; give a folder that does not.")
    check_checkpoint(source)
    if several := [path.name for path in source.iterdir() if path.name.startswith(_SEVERAL)]:
        raise ValueError(f"{source} holds several models ({several[0]}); load it in the training script, which reads every layout.")
    weights, optimizer = layouts.find_model(source), None if to is Target.WEIGHTS else _optimizer_of(source)
    own = {MANIFEST_NAME, weights.path.name, *((optimizer.path.name,) if optimizer else ())}
    with CheckpointWriter().new(target) as staging:
        _write_weights(staging.path, layouts.read_weights(weights), to)
        if optimizer is not None:
            _write_optimizer(
                staging.path, _named(layouts.read_optimizer(optimizer), model), to, beside_trainer=(source / _TRAINER).is_file()
            )
        _copy_rest(source, staging.path, own, to)


def _optimizer_of(source: Path) -> layouts.Place | None:
    """Return where the optimizer's state is; a checkpoint of weights has none."""
    try:
        return layouts.find_optimizer(source)
    except CheckpointError:
        return None


def _write_weights(folder: Path, weights: dict[str, torch.Tensor], to: Target) -> None:
    if to is Target.WEIGHTS and (adapted := next((name for name in weights if name.startswith("base_model.")), None)):
        raise ValueError(f"The checkpoint holds peft's adapters ({adapted}); save them by save_pretrained in the training script.")
    match to:
        case Target.SHARDED:
            write_shards(layouts.model_place(folder, Layout.SHARDED).path, {"model": weights}, None)
        case Target.WHOLE:
            torch.save(weights, layouts.model_place(folder, Layout.WHOLE).path)
        case Target.SINGLE | Target.WEIGHTS:
            from huggingface_hub import save_torch_state_dict  # knows tied weights, and splits what is too large for one file

            save_torch_state_dict(weights, folder, max_shard_size="50GB")


def _write_optimizer(folder: Path, state: dict[str, Any], to: Target, *, beside_trainer: bool) -> None:
    match to:
        case Target.SHARDED:
            write_shards(layouts.optimizer_place(folder, Layout.SHARDED).path, {"optimizer": state}, None)
        case Target.WHOLE:
            torch.save(state, layouts.optimizer_place(folder, Layout.WHOLE).path)
        case Target.SINGLE:
            path = folder / "optimizer.pt" if beside_trainer else layouts.optimizer_place(folder, Layout.SINGLE).path
            torch.save(at_positions(state), path)


def _copy_rest(source: Path, target: Path, own: set[str], to: Target) -> None:
    """Copy files beside the states."""
    for path in sorted(source.iterdir()):
        name = path.name
        is_weights = name.startswith(("model", "pytorch_model")) and name.endswith((".safetensors", ".bin", ".index.json"))
        skipped = name in own or is_weights or name.startswith(".") or (to is Target.WEIGHTS and layouts.is_state(path))
        if path.is_file() and not skipped and not (target / name).exists():
            shutil.copyfile(path, target / name)
    if to is Target.SINGLE and (target / "rng_state_0.pth").is_file():
        (target / "rng_state_0.pth").replace(target / "rng_state.pth")  # as the Trainer calls it in one process


# -------------------------------------------------------------------------------------------------------------------- names


def _named(state: dict[str, Any], model: nn.Module | None) -> dict[str, Any]:
    """Return an optimizer's state by names.

    Raises:
        CheckpointError: it goes by position, and the model is not known or has other parameters.
    """
    if not layouts.is_positional(state):
        return state
    if model is None:
        raise CheckpointError(
            "The optimizer's state goes by the parameters' positions; give the model (--model), or load the checkpoint in the training"
            " script, which reads every layout."
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for groups in _possible_groups(model):
        if _fits(state, groups, shapes):
            return layouts.named_state(state, groups)
    sizes = [len(group["params"]) for group in state["param_groups"]]
    raise CheckpointError(
        f"The optimizer's parameter groups of {sizes} are neither all of the model's {len(shapes)} parameters nor those of the Trainer;"
        " load the checkpoint in the training script, which reads every layout."
    )


def _possible_groups(model: nn.Module) -> list[list[list[str]]]:
    """Return names in the order of one group, of the Trainer's two, of matrices and the rest."""
    from transformers import Trainer

    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    matrices = {name for name, parameter in named.items() if parameter.ndim > 1}
    halves = [[[n for n in named if n in chosen], [n for n in named if n not in chosen]] for chosen in (decay, matrices)]
    return [[list(named)], *halves]


def _fits(state: Mapping[str, Any], groups: Sequence[Sequence[str]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether every state tensor has its parameter's shape."""
    if [len(group["params"]) for group in state["param_groups"]] != [len(names) for names in groups]:
        return False
    states = layouts.named_state(state, groups)["state"]
    return all(
        tuple(value.shape) == shapes[name]
        for name, own in states.items()
        for value in own.values()
        if torch.is_tensor(value) and value.ndim
    )
