"""Random states from a checkpoint, on as many ranks as wrote it or another number."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from .safe import load_file

_KEYS = {
    "python": ("python", "random_state"),
    "numpy": ("numpy", "numpy_random_seed"),
    "cpu": ("cpu", "torch_manual_seed"),
    "cuda": ("cuda", "torch_cuda_manual_seed"),
}
"""What the Trainer and Accelerate call each generator's state."""


def save_random_states(folder: Path, rank: int) -> None:
    """Write this process's random states, as Accelerate does."""
    states = {"random_state": random.getstate(), "numpy_random_seed": np.random.get_state(), "torch_manual_seed": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    torch.save(states, folder / f"random_states_{rank}.pkl")


def load_random_states(folder: Path, rank: int) -> None:
    """Set this process's generators as they were when the checkpoint was written.

    A rank that was not there then gets states of its own, which rank 0's and its number determine: no two ranks draw the same.

    Args:
        folder: of the checkpoint. Without random states in it nothing happens.
        rank: of this process.

    Raises:
        CheckpointError: the file cannot be read.
    """
    if (path := _file_of(folder, rank)) is not None:
        _restore(load_file(path, numpy=True), path)
    elif (first := _file_of(folder, 0)) is not None:
        _seed_apart(load_file(first, numpy=True), rank)


def _file_of(folder: Path, rank: int) -> Path | None:
    names = [f"random_states_{rank}.pkl", f"rng_state_{rank}.pth", *(["rng_state.pth"] if rank == 0 else [])]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _state(states: Mapping[str, Any], kind: str) -> Any:
    return next((states[key] for key in _KEYS[kind] if key in states), None)


def _restore(states: Mapping[str, Any], path: Path) -> None:
    try:
        version, internal, gauss = _state(states, "python")
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(_state(states, "numpy"))
        torch.set_rng_state(_state(states, "cpu"))
        on_devices = _state(states, "cuda")
        if on_devices is not None and torch.cuda.is_available():
            several = [on_devices] if torch.is_tensor(on_devices) else on_devices
            for device, state in zip(range(torch.cuda.device_count()), several, strict=False):
                torch.cuda.set_rng_state(state, device)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no random states ({error}); take another checkpoint.") from None


def _seed_apart(states: Mapping[str, Any], rank: int) -> None:
    first = _state(states, "cpu")
    content = b"" if first is None else first.numpy().tobytes()
    seed = zlib.crc32(content + rank.to_bytes(8, "little"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # CUDA's generators too
