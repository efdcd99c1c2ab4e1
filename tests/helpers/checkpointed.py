"""Steps of a training in float64 with groups and a schedule, and checkpoints of a plain loop."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_osdp.checkpoint.states import stage_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.sharding.gradients import clip_grad_norm_
from hf_osdp.sharding.optimizers import kind_of
from hf_osdp.sharding.steps import micro_step

from .models import tiny_batch, tiny_loss

MAX_NORM = 0.5


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay."""
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def save_loop(
    writer: CheckpointWriter, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **more
):
    """Write a plain loop's checkpoint; further arguments are those of `stage_loop`. Collective."""
    with writer.new(folder, optimizer=kind_of(optimizer).name) as staging:
        stage_loop(staging, model, optimizer, **more)


def trained_step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler, step: int, plan) -> float:
    """One optimizer step; the loss is that of all samples."""
    part, parts = (0, 1) if plan is None else (dist.get_rank(), dist.get_world_size())
    optimizer.zero_grad()
    if plan is None:
        loss = tiny_loss(model, tiny_batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    else:
        with micro_step(model, is_last=True):
            loss = tiny_loss(model, tiny_batch(step, part=part, parts=parts))
            loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    scheduler.step()
    total = loss.detach().clone()
    if plan is not None:
        dist.all_reduce(total)
    return total.item() / parts


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor, gathered if it is sharded; replicated units have plain tensors. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight."""
    assert got.keys() == want.keys()
    return max((got[name] - value).abs().max().item() for name, value in want.items())
