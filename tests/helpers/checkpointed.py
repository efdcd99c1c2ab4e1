"""A training in float64 that is interrupted, and goes on under other plans on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.checkpoint.states import load_loop, stage_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.split.names import keep_positions
from hf_osdp.modeling.split.operators import split_operators
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import clip_grad_norm_
from hf_osdp.sharding.host import host_parameters
from hf_osdp.sharding.optimizer_steps import bind_optimizer, step_by_device, step_on_shards
from hf_osdp.sharding.optimizers import kind_of
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step

from .layouts import plan_of
from .models import tiny_batch, tiny_loss, tiny_model
from .training import trained

MAX_NORM, LAYERS = 0.5, 2
SPLIT = ("lm_head", "transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_attn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Steps between two interruptions, by a layout of `plan_of` or in one process, and how they are saved."""

    steps: int
    layout: str | None
    slices: int = 1
    sharded: bool = True
    in_background: bool = False


def built(leg: Leg, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, object | None]:
    """A model with other weights than the checkpoint's, its optimizer of two groups, and the plan."""
    model = tiny_model("gpt2", seed=seed, layers=LAYERS)
    if leg.slices > 1:
        split_operators(model, [OperatorSplit(fqn=fqn, slices=leg.slices) for fqn in SPLIT])
    plan = None
    if leg.layout is not None:
        units = find_units(model)
        plan = plan_of(units, dist.get_world_size(), leg.layout)
        apply_plan(model, plan, units, meshes=Meshes("cpu"))
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    step_by_device(optimizer, host_parameters(model))
    if leg.slices > 1:
        keep_positions(optimizer, model)
    return model, optimizer, plan


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


def run_leg(leg: Leg, load: str | None, save: str, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Go on from `load`, train, write `save`. Losses, and whole weights on rank 0."""
    model, optimizer, plan = built(leg, seed)
    scheduler = scheduler_of(optimizer)
    others = {"scheduler.bin": scheduler}
    start = 0 if load is None else load_loop(load, model, optimizer, others=others)["step"]
    losses = [trained_step(model, optimizer, scheduler, step, plan) for step in range(start, start + leg.steps)]
    writer = CheckpointWriter(plan=plan, in_background=leg.in_background)
    save_loop(writer, save, model, optimizer, others=others, progress={"step": start + leg.steps}, sharded=leg.sharded)
    if leg.in_background:  # what is trained on meanwhile must not show in what is written
        trained_step(model, optimizer, scheduler, 99, plan)
        writer.wait()
        load_loop(save, model, optimizer, others=others)
    return losses, full_state_dict(model)


def trained_step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler, step: int, plan) -> float:
    """One optimizer step; the loss is that of all samples."""
    part, parts = (0, 1) if plan is None else (dist.get_rank(), dist.get_world_size())
    optimizer.zero_grad()
    if plan is None:
        loss = tiny_loss(model, tiny_batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    else:
        with micro_step(model, is_last=True, plan=plan):
            loss = tiny_loss(model, tiny_batch(step, part=part, parts=parts))
            loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    scheduler.step()
    total = loss.detach().clone()
    if plan is not None:
        dist.all_reduce(total)
    return total.item() / parts


def uninterrupted(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same in one process."""
    model = tiny_model("gpt2", layers=LAYERS)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    scheduler = scheduler_of(optimizer)
    return [trained_step(model, optimizer, scheduler, step, None) for step in range(steps)], full_state_dict(model)


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight."""
    assert got.keys() == want.keys()
    return max((got[name] - value).abs().max().item() for name, value in want.items())


def folders(parent: Path, legs: Sequence[Leg]) -> list[str | None]:
    """What each leg begins with, and what the last one writes."""
    return [None, *(str(parent / f"checkpoint-{number}") for number in range(1, len(legs) + 1))]


def trained_by_plan(
    model: nn.Module, plan: Plan, make_optimizer: Callable[[], torch.optim.Optimizer], steps: range, folder: str = ""
) -> torch.optim.Optimizer:
    """Apply a plan, train these steps from the checkpoint before them; with a folder, save one. The optimizer."""
    units = find_units(model)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    optimizer = make_optimizer()
    step_on_shards(optimizer, model)
    bind_optimizer(model, plan, units, [optimizer])
    if steps.start:
        load_loop(f"{folder}/{steps.start}", model, optimizer, others={})
    trained(model, optimizer, plan, steps)
    if folder:
        contents = {"others": {}, "progress": {}, "sharded": steps.start == 0}
        save_loop(CheckpointWriter(), f"{folder}/{steps.stop}", model, optimizer, **contents)
    return optimizer
