"""Where Accelerate and the Trainer write and read states, and what they call there in our place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate.accelerator
import torch
import transformers.trainer
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.nn.modules.module import _IncompatibleKeys

from ..checkpoint.safe import load_file
from ..checkpoint.states import load_model, load_optimizer, save_model, save_optimizer
from ..distributed.consensus import on_rank_zero
from ..errors import CheckpointError
from ..modeling.split.names import is_split
from ..modeling.split.positions import keep_positions
from .plugin import writes_shards


@contextmanager
def own_states(files: FileSystem | None = None) -> Iterator[None]:
    """Within, Accelerate and the Trainer write and read the states of sharded models, and registered objects, by our functions.

    They call those functions by their names in their own modules, and have no argument for others.

    Args:
        files: where shards are written; None is the disk.
    """

    def save_fsdp_model(plugin, accelerator, model, output_dir, model_index=0, adapter_only=False, **_: Any) -> None:
        only = adapter_only and is_adapted(model)
        save_model(Path(output_dir), model, sharded=writes_shards(plugin), index=model_index, trainable_only=only, files=files)

    def load_fsdp_model(plugin, accelerator, model, input_dir, model_index=0, adapter_only=False, **_: Any) -> Any:
        load_model(Path(input_dir), model, index=model_index, trainable_only=adapter_only and is_adapted(model))
        return _IncompatibleKeys([], [])

    def save_fsdp_optimizer(plugin, accelerator, optimizer, model, output_dir, optimizer_index=0, **_: Any) -> None:
        save_optimizer(Path(output_dir), model, optimizer, sharded=writes_shards(plugin), index=optimizer_index, files=files)

    def load_fsdp_optimizer(plugin, accelerator, optimizer, model, input_dir, optimizer_index=0, **_: Any) -> None:
        load_optimizer(Path(input_dir), model, optimizer, index=optimizer_index)

    ours = {function.__name__: function for function in (save_fsdp_model, load_fsdp_model, save_fsdp_optimizer, load_fsdp_optimizer)}
    custom = {"save_custom_state": _save_custom_state, "load_custom_state": _load_custom_state}
    with replaced(accelerate.accelerator, **ours, **custom), replaced(transformers.trainer, **ours):
        yield


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within, attributes of a module or an object have these values."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _custom_file(path: str | Path, index: int) -> Path:
    return Path(path) / f"custom_checkpoint_{index}.pkl"


def _save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """A registered object's state, which must be readable without running anything: better known now than when it is needed."""

    def save() -> None:
        torch.save(obj.state_dict(), _custom_file(path, index))
        try:
            load_file(_custom_file(path, index), numpy=True)
        except CheckpointError:
            raise CheckpointError(
                f"The state of {type(obj).__name__}, registered for checkpointing, holds more than tensors and plain values, and could not"
                " be read again; have its state_dict return numbers, text, lists, dicts and tensors."
            ) from None

    on_rank_zero(save)


def _load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    obj.load_state_dict(load_file(_custom_file(path, index), numpy=True))


def by_position(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Let operators in slices not show in the positions of an optimizer whose model is not sharded."""
    for model in models:
        for optimizer in optimizers if is_split(model) else ():
            keep_positions(optimizer, model)


def model_of(optimizer: Any, models: Sequence[nn.Module]) -> nn.Module:
    """The model that an optimizer has parameters of; a model may have several optimizers, each with a part."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return next((model for model in models if any(id(parameter) in own for parameter in model.parameters())), models[-1])


def is_adapted(model: nn.Module) -> bool:
    """Whether a model has peft's adapters, which are all that its checkpoints hold."""
    return hasattr(model, "peft_config")
