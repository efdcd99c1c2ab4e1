"""Train a tiny model by a plan, or in one process, and give back all that must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.distributed.mesh import Meshes, collective_device
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import move_to_device
from hf_osdp.sharding.gradients import clip_grad_norm_
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step

from .layouts import plan_of
from .models import tiny_batch, tiny_loss, tiny_model
from .read_back import verify_applied

Loss = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
Batches = Callable[..., dict[str, torch.Tensor]]
"""Step, and which `part` of how many `parts` of its samples → a batch."""
STEPS = 5
MAX_NORM = 0.5
"""Below the norms that occur, so that clipping acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training gave; `parameters` is empty on ranks other than 0."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    parameters: dict[str, torch.Tensor]

    def worst_error(self, other: Trained) -> dict[str, float]:
        """Largest absolute differences."""
        assert self.parameters.keys() == other.parameters.keys()
        pairs = [(mine, other.parameters[name]) for name, mine in self.parameters.items() if mine.numel()]
        return {
            "loss": _greatest(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)),
            "norm": _greatest(abs(a - b) for a, b in zip(self.norms, other.norms, strict=True)),
            "parameter": _greatest((a - b).abs().max().item() for a, b in pairs),
        }


def assert_trained_alike(found: Trained, reference: Callable[[], Trained], tolerance: float = 1e-12) -> None:
    """Compare loss, norm and every parameter with the reference, on rank 0: the others hold no whole parameters."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        errors = found.worst_error(reference())
        assert max(errors.values()) < tolerance, errors


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | None, steps: range) -> None:
    """Take steps of a model by its plan, this rank with its part of each batch; without a plan, with all of it."""
    rank, parts = (dist.get_rank(), dist.get_world_size()) if plan is not None else (0, 1)
    for step in steps:
        with micro_step(model, is_last=True, plan=plan):
            tiny_loss(model, tiny_batch(step, part=rank, parts=parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _on_device_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Units on the host are gathered where the loss's labels belong, too."""
    on_cuda = any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _greatest(values: Iterable[float]) -> float:
    """NaN where one is, unlike Python's max."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def train_alone(model_name: str, *, accumulation_steps: int = 1, device: str = "cpu") -> Trained:
    """The reference: torch alone, one process, the whole batch (cut in micro-steps as asked)."""
    return train_whole(tiny_model(model_name).to(device), accumulation_steps=accumulation_steps)


def train_whole(
    model: nn.Module, *, accumulation_steps: int = 1, loss_of: Loss = tiny_loss, batch_of: Batches = tiny_batch,
    steps: int = STEPS, lr: float = 1e-3,
) -> Trained:  # fmt: skip
    """The same for a model as it is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(accumulation_steps):
            batch = _on_device_of(model, batch_of(step, part=part, parts=accumulation_steps))
            loss = loss_of(model, batch) / accumulation_steps
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(total)
    parameters = {name: value.clone().cpu() for name, value in model.state_dict().items()}
    return Trained(losses=tuple(losses), norms=tuple(norms), parameters=parameters)


def train_by_layout(
    model_name: str, layout: str, meshes: Meshes, *, accumulation_steps: int = 1,
    reduce_every_micro_step: bool | None = True, checkpointing: bool = False, async_gathers: bool = False,
) -> Trained:  # fmt: skip
    """The same training on all ranks of the process group."""
    model = tiny_model(model_name)
    if checkpointing:
        wrap_blocks(model)
    units = find_units(model)
    steps = {"accumulation_steps": accumulation_steps, "reduce_every_micro_step": reduce_every_micro_step}
    plan = plan_of(units, meshes.world_size, layout, **steps)
    apply_plan(model, plan, units, meshes=meshes)
    verify_applied(model, plan, units)
    move_to_device(model, collective_device())
    if async_gathers:
        model._set_unshard_async_op(True)  # FSDP2 then waits for the works that all-gathers return
    return train_sharded(model, plan)


def train_sharded(
    model: nn.Module, plan: Plan, *, loss_of: Loss = tiny_loss, batch_of: Batches = tiny_batch,
    steps: int | range = STEPS, optimizer: torch.optim.Optimizer | None = None,
) -> Trained:  # fmt: skip
    """Run the reference's steps, or some of them, on a model that is sharded already."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    world, rank, k = plan.world_size, dist.get_rank(), plan.accumulation_steps
    losses, norms = [], []
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=collective_device())
        for part in range(k):
            with micro_step(model, is_last=part == k - 1, plan=plan):
                batch = _on_device_of(model, batch_of(step, part=part * world + rank, parts=world * k))
                loss = loss_of(model, batch) / k
                loss.backward()
            total += loss.detach()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return Trained(losses=tuple(losses), norms=tuple(norms), parameters=full_state_dict(model))


def wrap_blocks(model: nn.Module) -> None:
    """Activation checkpointing around every block, as Accelerate does it."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    blocks = {"GPT2Block", "BertLayer", "LlamaDecoderLayer"}
    wrapper.apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ in blocks)
