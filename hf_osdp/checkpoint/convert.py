"""Convert a checkpoint to another layout, in one process and without the training script.

Training reads every layout unconverted.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..modeling.split.names import at_positions
from . import layouts
from .folders import MANIFEST_NAME
from .resume import check_checkpoint
from .states import write_shards
from .writer import CheckpointWriter

_TRAINER = "trainer_state.json"
_OTHER_MODELS = ("optimizer_1", "pytorch_model_fsdp_1", "model_1")


class Target(Enum):
    SHARDED = "sharded"
    """Accelerate's FSDP2 with `SHARDED_STATE_DICT`."""
    WHOLE = "whole"
    """Accelerate's FSDP2 with `FULL_STATE_DICT`."""
    SINGLE = "single"
    """Accelerate or the Trainer in one process: safetensors; optimizer states by position."""
    WEIGHTS = "weights"
    """Only safetensors, as `from_pretrained` reads them."""


def convert(source: Path, target: Path, *, to: Target) -> None:
    """Write a checkpoint in another layout, and copy its other files. First all weights, then all optimizer states are
    in memory at once.

    Refuse an existing target, a damaged source, several models, optimizer states by position, and adapters with
    `Target.WEIGHTS`.
    """
    if target.exists():
        raise ValueError(f"{target} already exists; give a folder that does not.")
    check_checkpoint(source)
    if others := [path.name for path in source.iterdir() if path.name.startswith(_OTHER_MODELS)]:
        raise ValueError(
            f"{source} holds several models ({others[0]}); load it in the training script, which reads every layout."
        )
    weights, optimizer = layouts.find_model(source), None
    if to is not Target.WEIGHTS:
        with suppress(CheckpointError):  # a checkpoint of weights has none
            optimizer = layouts.find_optimizer(source)
    own = {MANIFEST_NAME, weights.name, *((optimizer.name,) if optimizer else ())}
    with CheckpointWriter().new(target) as staging:
        _write_weights(staging.path, layouts.read_weights(weights), to)
        if optimizer is not None:
            _write_optimizer(
                staging.path, layouts.read_optimizer(optimizer), to, from_trainer=(source / _TRAINER).is_file()
            )
        _copy_rest(source, staging.path, own, to)


def _write_weights(folder: Path, weights: dict[str, torch.Tensor], to: Target) -> None:
    if to is Target.WEIGHTS and (adapted := next((name for name in weights if name.startswith("base_model.")), None)):
        raise ValueError(
            f"The checkpoint holds peft's adapters ({adapted}); save them by save_pretrained in the training script."
        )
    match to:
        case Target.SHARDED:
            write_shards(layouts.model_path(folder, sharded=True), {"model": weights}, None)
        case Target.WHOLE:
            torch.save(weights, layouts.model_path(folder, sharded=False))
        case Target.SINGLE | Target.WEIGHTS:
            from huggingface_hub import save_torch_state_dict  # handles tied weights, and splits large files

            save_torch_state_dict(weights, folder, max_shard_size="50GB")


def _write_optimizer(folder: Path, state: dict[str, Any], to: Target, *, from_trainer: bool) -> None:
    if layouts.is_positional(state):
        raise CheckpointError(
            "The optimizer's states are stored by the parameters' positions, as one process writes them; load the"
            " checkpoint in the"
            " training script, which reads every layout, or convert only its weights."
        )
    path = layouts.optimizer_path(folder, sharded=False)
    match to:
        case Target.SHARDED:
            write_shards(layouts.optimizer_path(folder, sharded=True), {"optimizer": state}, None)
        case Target.WHOLE:
            torch.save(state, path)
        case Target.SINGLE:
            torch.save(at_positions(state), path.with_name("optimizer.pt") if from_trainer else path)


def _copy_rest(source: Path, target: Path, own: set[str], to: Target) -> None:
    for path in sorted(source.iterdir()):
        name = path.name
        is_weights = name.startswith(("model", "pytorch_model")) and name.endswith(
            (".safetensors", ".bin", ".index.json")
        )
        skipped = (
            name in own or is_weights or name.startswith(".") or (to is Target.WEIGHTS and layouts.is_state(path))
        )
        if path.is_file() and not skipped and not (target / name).exists():
            shutil.copyfile(path, target / name)
    if to is Target.SINGLE and (target / "rng_state_0.pth").is_file():
        (target / "rng_state_0.pth").replace(target / "rng_state.pth")  # the Trainer's name in one process
