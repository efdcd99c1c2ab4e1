"""A checkpoint of one process, in any layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hf_osdp.checkpoint.writer import CheckpointWriter
from tests.helpers.checkpointed import groups_of, save_loop, scheduler_of, trained_step
from tests.helpers.models import tiny_model


def trained(seed: int = 0, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After some steps; an optimizer of two groups, of matrices and of the rest."""
    model = tiny_model("gpt2", seed=seed, layers=1)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    for step in range(steps):
        trained_step(model, optimizer, scheduler_of(optimizer), step, None)
    return model, optimizer


def saved(folder: Path, *, sharded: bool = True, model=None, optimizer=None) -> Path:
    """Write a checkpoint; the same trained model unless one is given."""
    if model is None:
        model, optimizer = trained()
    save_loop(CheckpointWriter(), folder, model, optimizer, others={}, progress={"step": 2}, sharded=sharded)
    return folder
