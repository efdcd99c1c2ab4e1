"""Which files of a folder hold weights and optimizer states: those of Accelerate, of the Trainer, of one process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..errors import CheckpointError


class Layout(Enum):
    """How states lie in a checkpoint."""

    SHARDED = "sharded"
    """A folder of torch.distributed.checkpoint."""
    WHOLE = "whole"
    """One file of whole tensors by name, written from a sharded model."""
    SINGLE = "single"
    """As one process writes it: safetensors; optimizer states by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where states lie."""

    layout: Layout
    path: Path


def _numbered(stem: str, index: int, suffix: str) -> str:
    """`optimizer.bin`, `optimizer_1.bin`."""
    return f"{stem}{f'_{index}' if index else ''}{suffix}"


def model_place(folder: Path, layout: Layout, index: int = 0) -> Place:
    """Where a model's weights are written."""
    match layout:
        case Layout.SHARDED:
            return Place(layout=layout, path=folder / f"pytorch_model_fsdp_{index}")
        case Layout.WHOLE:
            return Place(layout=layout, path=folder / _numbered("pytorch_model_fsdp", index, ".bin"))
        case Layout.SINGLE:
            return Place(layout=layout, path=folder / _numbered("model", index, ".safetensors"))


def optimizer_place(folder: Path, layout: Layout, index: int = 0) -> Place:
    """Where an optimizer's state is written."""
    path = folder / (f"optimizer_{index}" if layout is Layout.SHARDED else _numbered("optimizer", index, ".bin"))
    return Place(layout=layout, path=path)


_STATE_FILE = re.compile(
    r"optimizer(_\d+)?\.bin|optimizer\.pt|scheduler(_\d+)?\.bin|scheduler\.pt|scaler\.pt|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin"
    r"|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|custom_checkpoint_\d+\.pkl|trainer_state\.json"
    r"|model((_\d+)|(-\d+-of-\d+))?\.safetensors|pytorch_model((_\d+)|(_fsdp(_\d+)?)|(-\d+-of-\d+))?\.bin"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)
_STATE_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""What Accelerate, the Trainer and this package write."""


def is_state(path: Path) -> bool:
    """Whether a file or folder is a checkpoint's state by its name; what is left is configuration, tokenizer, or a user's."""
    return (_STATE_FOLDER if path.is_dir() else _STATE_FILE).fullmatch(path.name) is not None


def find_model(folder: Path, index: int = 0) -> Place:
    """Where a checkpoint's weights are.

    Raises:
        CheckpointError: nowhere.
    """
    for layout in (Layout.SHARDED, Layout.WHOLE):
        if (place := model_place(folder, layout, index)).path.exists():
            return place
    names = [_numbered("model", index, ".safetensors"), _numbered("pytorch_model", index, ".bin")]
    if index == 0:
        names += ["model.safetensors.index.json", "adapter_model.safetensors"]
    for name in names:
        if (folder / name).is_file():
            return Place(layout=Layout.SINGLE, path=folder / name)
    raise CheckpointError(
        f"{folder} has no weights ({', '.join(('pytorch_model_fsdp_0/', 'pytorch_model_fsdp.bin', *names))}); give another."
    )


def find_optimizer(folder: Path, index: int = 0) -> Place:
    """Where a checkpoint's optimizer state is. A single file tells by its content whether it goes by name (`WHOLE`) or by position.

    Raises:
        CheckpointError: nowhere.
    """
    if (place := optimizer_place(folder, Layout.SHARDED, index)).path.is_dir():
        return place
    names = [_numbered("optimizer", index, ".bin"), *(["optimizer.pt"] if index == 0 else [])]
    for name in names:
        if (folder / name).is_file():
            return Place(layout=Layout.WHOLE, path=folder / name)
    raise CheckpointError(f"{folder} has no optimizer state ({', '.join(('optimizer_0/', *names))}); give another.")
