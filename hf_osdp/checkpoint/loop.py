"""All that a plain PyTorch loop goes on from, under the names that Accelerate gives its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import rank
from ..errors import CheckpointError
from ..planner.plan import Plan
from .finding import check_checkpoint
from .random_states import load_random_states, save_random_states
from .safe import load_file
from .states import load_model, load_optimizer, save_model, save_optimizer
from .writer import CheckpointWriter, on_every_rank

PROGRESS_NAME = "custom_checkpoint_0.pkl"


class Stateful(Protocol):
    """A scheduler, or a loss scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, text, lists, dicts and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse."""


def save_loop(
    writer: CheckpointWriter, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *,
    others: Mapping[str, Stateful], progress: Mapping[str, Any], sharded: bool, plan: Plan | None,
) -> None:  # fmt: skip
    """Write a loop's checkpoint. Collective.

    Args:
        writer: of this run.
        folder: the checkpoint's name.
        model: sharded by a plan, or as it is.
        optimizer: of its parameters.
        others: what else has a state, by the file's name.
        progress: numbers, text and tensors of the loop's own; rank 0's count.
        sharded: each rank writes its shards; else rank 0 writes whole tensors.
        plan: the one that runs.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    with writer.new(folder, plan=plan) as staging:
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
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, others: Mapping[str, Stateful]
) -> dict[str, Any]:  # fmt: skip
    """Go on from a checkpoint, whatever plan and however many ranks wrote it. Collective.

    Args:
        folder: of the checkpoint.
        model: sharded or not.
        optimizer: of its parameters, with the parameter groups that it was saved with.
        others: as `save_loop`.

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
    load_model(folder, model)
    load_optimizer(folder, model, optimizer)
    for name, owner in others.items():
        owner.load_state_dict(rest[name])
    load_random_states(folder, rank())
    return rest.get(PROGRESS_NAME, {})
