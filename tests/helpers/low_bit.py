"""Models trained by optimizers that quantize their states in blocks, which `make` makes, whole and under plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.checkpoint.states import load_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.split.operators import split_operators
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer import check_optimizer, spec_of_optimizer
from hf_osdp.sharding.state import full_optimizer_state_dict, full_state_dict

from .checkpointed import save_loop
from .layouts import plan_of
from .models import tiny_model
from .training import trained

Run = TypeVar("Run", bound=Callable)
Make = Callable[[str, nn.Module, float], torch.optim.Optimizer]
WIDTH, ODD_WIDTH = 128, 72
"""With the first, blocks of 256 lie inside shards of whole rows; with the second, some shards have no whole blocks."""


def eagerly(function: Run) -> Run:
    """Decorate what need not be compiled: torchao compiles its steps for each shape, which takes longest."""
    return torch.compiler.set_stance("force_eager")(function)


def gpt2(width: int, *, seed: int = 0) -> nn.Module:
    return tiny_model("gpt2", seed=seed, layers=2, width=width)


def sharded(width: int, layout: str | None, *, seed: int = 0, slices: int = 1):
    model, plan = gpt2(width, seed=seed), None
    if slices > 1:
        split_operators(model, [OperatorSplit(fqn="transformer.h.0.mlp.c_fc", slices=slices)])
    if layout is not None:
        units = find_units(model)
        plan = plan_of(units, dist.get_world_size(), layout)
        apply_plan(model, plan, units, meshes=Meshes("cpu"))
    return model, plan


def state_bytes(tensor: torch.Tensor) -> int:
    tensor = local(tensor)
    names = getattr(tensor, "tensor_attrs", None)
    return tensor.nbytes if names is None else sum(getattr(tensor, name).nbytes for name in names)


@eagerly
def held(make: Make, kind: str, width: int, layout: str) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Bytes of each parameter's states on this rank, and as planned."""
    model, plan = sharded(width, layout)
    optimizer = make(kind, model, 1e-3)
    check_optimizer(optimizer)
    spec = spec_of_optimizer(optimizer, device_type="cpu")
    trained(model, optimizer, plan, range(1))
    sizes = {unit.module_names[0]: unit.shard_size for unit in plan.units}
    units = [(unit, sizes[unit.module_names[0]]) for unit in find_units(gpt2(width))]
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return (
        {name: sum(state_bytes(value) for key, value in of.items() if key != "step") for name, of in states.items()},
        {p.name: spec.state_bytes(p, size) for unit, size in units for p in unit.trainable},
    )


@eagerly
def chain(
    make: Make, kind: str, width: int, folder: str, layout: str, slices: int, is_sharded: bool, start: int
) -> tuple[dict, dict]:
    """Two steps from a checkpoint, under another plan."""
    model, plan = sharded(width, layout, seed=start, slices=slices)
    optimizer = make(kind, model, 0.3 if start else 1e-2)
    if start:
        load_loop(f"{folder}/{start}", model, optimizer, others={})
    trained(model, optimizer, plan, range(start, start + 2))
    contents = {"others": {}, "progress": {}, "sharded": is_sharded}
    save_loop(CheckpointWriter(), f"{folder}/{start + 2}", model, optimizer, **contents)
    return full_state_dict(model), full_optimizer_state_dict(model, optimizer).get("state", {})


@eagerly
def alone(make: Make, kind: str, width: int, steps: int) -> dict[str, torch.Tensor]:
    model, _ = sharded(width, None)
    trained(model, make(kind, model, 1e-2), None, range(steps))
    return full_state_dict(model)


def apart(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return sum(float((weights[name] - value).norm()) for name, value in others.items())
