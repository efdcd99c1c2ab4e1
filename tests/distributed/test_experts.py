"""Two experts on four ranks, sharded along another dimension than 0, train and resume as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import hf_osdp
from hf_osdp.checkpoint.states import load_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import total_norm
from hf_osdp.sharding.host import host_parameters
from hf_osdp.sharding.optimizer_steps import step_by_device
from tests.helpers.architectures import batch_of, loss_of, tiny_architecture
from tests.helpers.checkpointed import save_loop, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.read_back import verify_applied
from tests.helpers.training import Trained, train_sharded, train_whole

KIND, LAYERS, WORLD = "MixtralForCausalLM", 5, 4
OPTIMIZERS = {"AdamW": partial(torch.optim.AdamW, lr=1e-3, fused=True), "Rprop": partial(torch.optim.Rprop, lr=1e-3)}
"""Rprop steps local shards as plain tensors, as optimizers of other packages do."""


def experts() -> nn.Module:
    return tiny_architecture(KIND, num_local_experts=2, num_hidden_layers=LAYERS)


def planned(layout: str, optimizer: str, *, changed: bool = False) -> tuple[nn.Module, Plan, torch.optim.Optimizer]:
    """A model under a plan; if `changed`, with other weights than it was saved with."""
    model = experts()
    for parameter in model.parameters() if changed else ():
        parameter.detach().mul_(0.5)
    units = find_units(model)
    plan = plan_of(units, dist.get_world_size(), layout)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    verify_applied(model, plan, units)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    step_by_device(chosen, host_parameters(model))
    return model, plan, chosen


def steps(model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer, which: range) -> Trained:
    return train_sharded(
        model, plan, loss_of=loss_of, batch_of=partial(batch_of, model), steps=which, optimizer=optimizer
    )


def train_and_save(folder: str, optimizer: str) -> tuple[Trained, Trained, set[tuple[int, ...]]]:
    """Two steps, a checkpoint in both forms, a third step; the dimensions along which experts are sharded."""
    model, plan, chosen = planned("everything", optimizer)
    dims = {
        tuple(place.dim for place in parameter.placements if place.is_shard())
        for name, parameter in model.named_parameters()
        if "experts" in name
    }
    before = steps(model, plan, chosen, range(2))
    for sharded in (True, False):
        save_loop(CheckpointWriter(), f"{folder}/{sharded}", model, chosen, others={}, progress={}, sharded=sharded)
    return before, steps(model, plan, chosen, range(2, 3)), dims


def resume(folder: str, optimizer: str) -> list[Trained]:
    """The third step by other plans, from both forms of the checkpoint."""
    found = []
    for layout, sharded in (
        (("zero3", True), ("hsdp", False)) if dist.get_world_size() == WORLD else (("mixed", True),)
    ):
        model, plan, chosen = planned(layout, optimizer, changed=True)
        load_loop(f"{folder}/{sharded}", model, chosen, others={})
        found.append(steps(model, plan, chosen, range(2, 3)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "Rprop"])
def test_fewer_experts_than_ranks_train_and_resume_exactly(tmp_path, optimizer):
    (before, after, dims), *_ = run_ranks(train_and_save, WORLD, str(tmp_path), optimizer, shared=True)
    assert dims == {(0,), (1,)}, "on two ranks, and on four"
    resumed = {world: run_ranks(resume, world, str(tmp_path), optimizer, shared=True)[0] for world in (WORLD, 2)}
    for found in (each for several in resumed.values() for each in several):
        assert max(found.worst_error(after).values()) < 1e-12
    if optimizer == "AdamW":
        model = experts()
        alone = [
            train_whole(experts(), loss_of=loss_of, batch_of=partial(batch_of, model), steps=count) for count in (2, 3)
        ]
        assert max(before.worst_error(alone[0]).values()) < 1e-12
        assert worst(after.parameters, alone[1].parameters) < 1e-12


@pytest.mark.on_ranks(WORLD, shared=True)
def test_whole_experts_are_read_written_and_clipped_between_steps():
    model, *_ = planned("zero3", "AdamW")
    alone, batch = experts(), batch_of(model, 0)
    for module in (model, alone):
        loss_of(module, batch).backward()
    named = {name: p for name, p in model.named_parameters() if "experts" in name}
    assert {p.placements for p in named.values()} == {(Shard(1),)}
    norms = [torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1) for module in (alone, model)]
    clipped: Any = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
    assert float(clipped) == pytest.approx(float(norms[0]), rel=1e-12)
    assert float(total_norm([p.grad for p in model.parameters()])) == pytest.approx(0.1, rel=1e-4)
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    assert worst({n: p.grad.full_tensor() for n, p in named.items()}, {n: gradients[n] for n in named}) < 1e-12
    with hf_osdp.full_parameters(model):
        assert worst(dict(model.named_parameters()), dict(alone.named_parameters())) == 0
        for parameter in model.parameters():
            parameter.detach().mul_(2)
    model.load_state_dict({n: p.detach() * 3 for n, p in alone.named_parameters() if "gate_up" in n}, strict=False)
    for name, parameter in named.items():
        factor = 3 if "gate_up" in name else 2
        assert torch.equal(parameter.full_tensor(), factor * dict(alone.named_parameters())[name])
