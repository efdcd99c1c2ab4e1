"""A training as data: under a plan on ranks, or whole in one process, and all of it that must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.checkpoint.states import load_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.mesh import Meshes, collective_device
from hf_osdp.modeling.build import disable_cache
from hf_osdp.modeling.split.names import is_split
from hf_osdp.modeling.units import canonical_name, find_units
from hf_osdp.planner.description import UnitDescription
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.training_job import Precision
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import move_to_device, mp_policy
from hf_osdp.sharding.gradients import OSDPGradScaler, clip_grad_norm_
from hf_osdp.sharding.optimizer_steps import bind_optimizer, parameter_names, rebind_parameters, step_on_shards
from hf_osdp.sharding.state import full_optimizer_state_dict, full_state_dict
from hf_osdp.sharding.steps import micro_step

from .checkpointed import save_loop
from .layouts import plan_of
from .models import tiny_batch, tiny_loss, tiny_model
from .read_back import verify_applied

Loss = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
Batches = Callable[..., dict[str, torch.Tensor]]
"""Step, and which `part` of how many `parts` of its samples → a batch."""
STEPS = 3
MAX_NORM = 0.5
"""Below the norms that occur, so that clipping acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training gave; parameters and states, by names, are empty on ranks other than 0."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    parameters: dict[str, torch.Tensor]
    states: dict[str, Any] = field(default_factory=dict)
    absent: tuple[frozenset[str], ...] = ()
    """Parameters without a gradient, at each step; empty for models in slices, whose parameters are others."""

    def worst_error(self, other: Trained) -> dict[str, float]:
        """Return the largest absolute differences."""
        assert self.parameters.keys() == other.parameters.keys() and self.states.keys() == other.states.keys()
        assert not self.absent or self.absent == other.absent, [
            a ^ b for a, b in zip(self.absent, other.absent, strict=True)
        ]
        return {
            "loss": _apart(zip(self.losses, other.losses, strict=True)),
            "norm": _apart(zip(self.norms, other.norms, strict=True)),
            "parameter": _apart((value, other.parameters[name]) for name, value in self.parameters.items()),
            "state": _apart((value, other.states[name]) for name, value in self.states.items()),
        }


def _apart(pairs: Iterable[tuple[Any, Any]]) -> float:
    """Return the largest difference; NaN where one is, unlike Python's max."""
    tensors = ((torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)) for a, b in pairs)
    found = [torch.zeros((), dtype=torch.float64), *((a - b).abs().max() for a, b in tensors if b.numel())]
    return torch.stack(found).max().item()


def assert_trained_alike(found: Trained, reference: Callable[[], Trained], tolerance: float = 1e-12) -> None:
    """Compare with the reference, on rank 0: the others hold no whole parameters."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        errors = found.worst_error(reference())
        assert max(errors.values()) < tolerance, errors


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW of torch's fused kernels."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "fused": True, **options})


@dataclass(slots=True, kw_only=True)
class Loop:
    """A model that is trained by its plan, this rank with its part of each batch, or whole without one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan | None = None
    loss_of: Loss = tiny_loss
    batch_of: Batches = tiny_batch
    device: torch.device | str = "cpu"
    parts: int = 1
    """Micro-steps."""
    max_norm: float | None = MAX_NORM
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    scaler: torch.amp.GradScaler = field(default_factory=partial(torch.amp.GradScaler, enabled=False))
    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    absent: list[frozenset[str]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    """Further tensors that must agree."""

    @property
    def place(self) -> tuple[int, int]:
        """This rank, of how many."""
        if self.plan is None or not dist.is_initialized():
            return 0, 1
        return dist.get_rank(), dist.get_world_size()

    def loss(self, step: int, part: int = 0) -> torch.Tensor:
        """Return this rank's loss of a micro-step, as a share of the step's."""
        rank, world = self.place
        batch = self.batch_of(step, part=part * world + rank, parts=world * self.parts)
        return self.loss_of(self.model, self.moved(batch)) / self.parts

    def moved(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch where the model computes."""
        return {name: v.to(self.device) if isinstance(v, torch.Tensor) else v for name, v in batch.items()}

    def backward(self, step: int) -> None:
        """Run forward and backward of all micro-steps."""
        losses = []
        for part in range(self.parts):
            with micro_step(self.model, is_last=part == self.parts - 1):
                loss = self.loss(step, part)
                self.scaler.scale(loss).backward()
            losses.append(loss.detach().double())
        self.losses.append(torch.stack(losses).sum())
        if not is_split(self.model):
            named = ((canonical_name(name), p) for name, p in self.model.named_parameters())
            self.absent.append(frozenset(name for name, p in named if p.requires_grad and p.grad is None))

    def clip(self) -> None:
        """Clip gradients, if the training does."""
        self.scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            clip = nn.utils.clip_grad_norm_ if self.plan is None else clip_grad_norm_
            self.norms.append(clip(self.model.parameters(), self.max_norm).detach())

    def step(self, number: int) -> None:
        """Take a usual step."""
        self.backward(number)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()

    def result(self, *, with_states: bool = True) -> Trained:
        """Return what came of it, over all ranks."""
        losses, world = torch.stack(self.losses), self.place[1]
        if world > 1:
            dist.all_reduce(losses)
        parameters = full_state_dict(self.model)
        states: dict[str, Any] = {}
        if with_states and self.optimizer.state:  # after the weights, which frees what an evaluation left gathered
            found = full_optimizer_state_dict(self.model, self.optimizer).get("state", {})
            states = {f"{name}.{key}": value for name, own in found.items() for key, value in own.items()}
        return Trained(
            losses=tuple((losses / world).tolist()), norms=tuple(map(float, self.norms)), states=states,
            absent=tuple(self.absent), parameters={**parameters, **self.more} if parameters else {},
        )  # fmt: skip


_GPT2 = partial(tiny_model, "gpt2")


def _usual_batches(model: nn.Module) -> Batches:
    return tiny_batch


Change = Callable[[int, UnitDecision, UnitDescription], Mapping[str, Any]]
"""Number, decision and description of a unit → what of the decision is different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training that must be the same under a plan as in one process."""

    model: Callable[[], nn.Module] = _GPT2
    units: Callable[[nn.Module], tuple[UnitDescription, ...]] = find_units
    batches: Callable[[nn.Module], Batches] = _usual_batches
    loss: Loss = tiny_loss
    world: int = 2
    """Ranks; 0 stands for one process without a group."""
    layout: str | None = "mixed"
    """Of `plan_of`; None: whole, in one process."""
    change: Change | None = None
    prepare: Callable[[nn.Module], object] | None = None
    """Changes the model that is sharded, before it is."""
    applied: Callable[[nn.Module], object] | None = None
    """Does so afterwards."""
    accumulation_steps: int = 1
    reduce: bool | None = True
    precision: str = "no"
    """As Accelerate names it; fp16 scales the loss."""
    parts_alone: int = 1
    """Micro-steps in one process, where a loss is of its batch alone."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    rebinds: bool = False
    """Whether the optimizer is made of the whole model, and bound to shards afterwards."""
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    steps: int = STEPS
    max_norm: float | None = MAX_NORM
    step: Callable[[Loop, int], object] = Loop.step
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Holds during either training."""
    within_ranks: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Holds during the training on ranks."""
    check: Callable[[Loop, tuple[UnitDescription, ...]], object] | None = None
    """Asserts more of a trained rank."""
    tolerance: float = 1e-12
    with_states: bool = True
    """Whether the optimizer's states are compared."""
    only: str = ""
    """Part of the names of parameters that are compared."""
    needs: str = ""
    """A package without which the case is skipped."""
    slow: bool = False

    @property
    def alone(self) -> Case:
        """The same in one process."""
        return replace(
            self, layout=None, world=0, change=None, prepare=None, applied=None, reduce=True, accumulation_steps=1,
            rebinds=False, check=None, within_ranks=nullcontext, tolerance=0.0, slow=False,
        )  # fmt: skip


def plan_for(case: Case, units: tuple[UnitDescription, ...]) -> Plan:
    """Return the plan of a case."""
    assert case.layout is not None
    steps = {"accumulation_steps": case.accumulation_steps, "reduce_every_micro_step": case.reduce}
    plan = plan_of(units, max(1, case.world), case.layout, **steps)
    if case.change is None:
        return plan
    pairs = enumerate(zip(plan.units, units, strict=True))
    return replace(plan, units=tuple(replace(one, **case.change(i, one, unit)) for i, (one, unit) in pairs))


def loop_of(
    case: Case, *, meshes: Meshes | None = None, device: str = "", scale: float = 1.0
) -> tuple[Loop, tuple[UnitDescription, ...]]:
    """Return a case that is ready to train, its weights and learning rate scaled, and its units."""
    model, device_type = case.model(), torch.device(device or "cpu").type
    for parameter in model.parameters() if scale != 1.0 else ():
        parameter.detach().mul_(scale)
    plan, units, names, batch_of = None, (), parameter_names(model), case.batches(model)
    optimizer = case.optimizer(model) if case.rebinds else None
    if case.layout is not None:
        disable_cache(model)  # as all roads do
        if case.prepare is not None:
            case.prepare(model)
        units = case.units(model)
        plan = plan_for(case, units)
        meshes = (meshes or Meshes(device_type)) if dist.is_initialized() else None
        apply_plan(model, plan, units, meshes=meshes, mp_policy=mp_policy(Precision.named(case.precision)))
        verify_applied(model, plan, units)
    place = torch.device(device) if device else collective_device()
    move_to_device(model, place)
    if case.applied is not None:
        case.applied(model)
    if optimizer is None:
        optimizer = case.optimizer(model)
        if plan is not None:
            step_on_shards(optimizer, model)
    else:
        rebind_parameters(optimizer, names, model)
    if plan is not None:
        bind_optimizer(model, plan, units, [optimizer])
    for group in optimizer.param_groups if scale != 1.0 else ():
        group["lr"] = scale * (group["lr"] or 1.0)
    loop = Loop(
        model=model, optimizer=optimizer, plan=plan, loss_of=case.loss, batch_of=batch_of, device=place,
        parts=case.parts_alone if plan is None else plan.accumulation_steps, max_norm=case.max_norm,
        schedule=case.schedule(optimizer) if case.schedule else None,
        scaler=OSDPGradScaler(device_type, enabled=case.precision == "fp16", init_scale=2.0**10),
    )  # fmt: skip
    return loop, units


def train(
    case: Case, *, meshes: Meshes | None = None, device: str = "", folder: str = "", start: int = 0,
    sharded: bool = True, in_background: bool = False,
) -> Trained:  # fmt: skip
    """Train a case on this rank; with a folder, go on from the checkpoint of step `start` in it, and save another."""
    with case.within(), case.within_ranks():
        loop, units = loop_of(case, meshes=meshes, device=device, scale=0.5 if start else 1.0)
        others = {} if loop.schedule is None else {"scheduler.bin": loop.schedule}
        if start:
            load_loop(f"{folder}/{start}", loop.model, loop.optimizer, others=others)
        for number in range(start, start + case.steps):
            case.step(loop, number)
        found = loop.result(with_states=case.with_states)
        if case.check is not None:
            case.check(loop, units)
        if folder:
            writer = CheckpointWriter(plan=loop.plan, in_background=in_background)
            place, contents = f"{folder}/{start + case.steps}", {"others": others, "progress": {}, "sharded": sharded}
            save_loop(writer, place, loop.model, loop.optimizer, **contents)
            if in_background:  # what is trained on meanwhile must not show in what is written
                case.step(loop, 99)
                writer.wait()
        return replace(found, parameters={name: v for name, v in found.parameters.items() if case.only in name})


@cache
def alone(case: Case, device: str = "cpu") -> Trained:
    """Train a case in one process: torch alone, and the whole batch."""
    return train(case.alone, device=device)
