"""All that a plain PyTorch loop resumes from, under the names that Accelerate gives its files; random states of any loop."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import rank
from ..errors import CheckpointError
from ..sharding.optimizer_check import unwrapped
from .resume import check_checkpoint, warn_of_changes
from .safe import load_file
from .states import load_model, load_optimizer, save_model, save_optimizer
from .writer import CheckpointWriter, on_every_rank

PROGRESS_NAME = "custom_checkpoint_0.pkl"


def save_loop(
    writer: CheckpointWriter, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *,
    others: Mapping[str, Stateful], progress: Mapping[str, Any], sharded: bool,
) -> None:  # fmt: skip
    """Write a loop's checkpoint. Collective.

    Args:
        writer: of this run.
        folder: the checkpoint's name.
        model: sharded by a plan, or as it is.
        optimizer: of its parameters.
        others: schedulers, scalers and what else has a state, by the file's name.
        progress: numbers, text and tensors of the loop's own; rank 0's count.
        sharded: each rank writes its shards; else rank 0 writes whole tensors.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    with writer.new(folder, optimizer=type(unwrapped(optimizer)).__name__) as staging:
        save_model(staging.path, model, sharded=sharded, files=staging.file_system)
        save_optimizer(staging.path, model, optimizer, sharded=sharded, files=staging.file_system)
        on_every_rank(lambda: save_random_states(staging.path, rank()))

        def save_rest() -> None:
            for name, owner in others.items():
                torch.save(owner.state_dict(), staging.path / name)
            torch.save(dict(progress), staging.path / PROGRESS_NAME)
            load_file(staging.path / PROGRESS_NAME, numpy=True)  # what could not be read again is better known now

        on_rank_zero(save_rest)


def load_loop(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *,
    others: Mapping[str, Stateful], writer: CheckpointWriter | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Resume from a checkpoint, whatever plan and however many ranks wrote it. Collective.

    Returns:
        What was saved as progress.

    Raises:
        CheckpointError: it is damaged, incomplete, or of another model; on every rank.
    """
    folder = Path(folder)
    check_checkpoint(folder)

    def read_rest() -> dict[str, Any]:
        if absent := [name for name in others if not (folder / name).is_file()]:
            raise CheckpointError(f"Checkpoint {folder} lacks {absent[0]}, which this run needs; take another.")
        return {name: load_file(folder / name, numpy=True) for name in (*others, PROGRESS_NAME) if (folder / name).is_file()}

    rest = on_rank_zero(read_rest)
    run = writer or CheckpointWriter()
    warn_of_changes(folder, {**run.settings, "optimizer": type(unwrapped(optimizer)).__name__}, run.plan)
    load_model(folder, model)
    load_optimizer(folder, model, optimizer)
    for name, owner in others.items():
        owner.load_state_dict(rest[name])
    load_random_states(folder, rank())
    return dict(rest.get(PROGRESS_NAME, {}))


def save_random_states(folder: Path, rank: int) -> None:
    """Write this process's random states, as Accelerate does."""
    states = {"random_state": random.getstate(), "numpy_random_seed": np.random.get_state(), "torch_manual_seed": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    torch.save(states, folder / f"random_states_{rank}.pkl")


def load_random_states(folder: Path, rank: int) -> None:
    """Set this process's generators as they were when the checkpoint was written, by Accelerate or the Trainer.

    A rank that was not there then gets states of its own, which rank 0's and its number determine: no two ranks draw the same.

    Raises:
        CheckpointError: the file cannot be read.
    """
    names = {rank: (f"random_states_{rank}.pkl", f"rng_state_{rank}.pth"), 0: ("random_states_0.pkl", "rng_state_0.pth", "rng_state.pth")}
    for number in (rank, 0):
        for path in (folder / name for name in names[number]):
            if path.is_file():
                _set_random_states(path, of_other_rank=None if number == rank else rank)
                return


def _set_random_states(path: Path, *, of_other_rank: int | None) -> None:
    states = load_file(path, numpy=True)

    def state(accelerates_name: str, trainers_name: str) -> Any:  # noqa: ANN401  # each generator's own
        return states.get(accelerates_name, states.get(trainers_name))

    try:
        cpu, cuda = state("torch_manual_seed", "cpu"), state("torch_cuda_manual_seed", "cuda")
        if of_other_rank is not None:
            seed = zlib.crc32(cpu.numpy().tobytes() + of_other_rank.to_bytes(8, "little"))
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)  # CUDA's generators too
            return
        version, internal, gauss = state("random_state", "python")
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(state("numpy_random_seed", "numpy"))
        torch.set_rng_state(cpu)
        if cuda is not None and torch.cuda.is_available():
            for device, own in zip(range(torch.cuda.device_count()), [cuda] if torch.is_tensor(cuda) else cuda, strict=False):
                torch.cuda.set_rng_state(own, device)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no random states ({error}); take another checkpoint.") from None
