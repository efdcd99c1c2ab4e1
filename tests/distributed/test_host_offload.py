"""Units on the host against one process, in float64; on the CPU FSDP2's offload moves nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import PlanMismatchError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.host import host_parameters
from hf_osdp.sharding.optimizer_steps import parameter_names, rebind_parameters, step_by_device
from hf_osdp.sharding.state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from tests.helpers.checkpointed import worst
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.read_back import read_back, verify_applied
from tests.helpers.training import assert_trained_alike, train_alone, train_sharded

STEPS, HALVING = 3, 0.5
worlds = pytest.mark.parametrize("world_size", [1, 2])


def with_host(plan: Plan, *, every: int = 2) -> Plan:
    """Each `every`-th unit on the host."""
    return replace(
        plan, units=tuple(replace(unit, on_host=index % every == 0) for index, unit in enumerate(plan.units))
    )


def offloaded(layout: str = "mixed", *, every: int = 2, seed: int = 0, name: str = "gpt2", **options: Any):
    model = tiny_model(name, seed=seed)
    units = find_units(model)
    plan = with_host(plan_of(units, dist.get_world_size(), layout, **options), every=every)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    verify_applied(model, plan, units)
    return model, plan, units


def stepped(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, *, part: int = 0, parts: int = 1
) -> None:
    tiny_loss(model, tiny_batch(step, part=part, parts=parts)).backward()
    optimizer.step()
    optimizer.zero_grad()


def place() -> dict[str, int]:
    return {"part": dist.get_rank(), "parts": dist.get_world_size()}


@worlds
@pytest.mark.on_ranks(shared=True)
def test_units_on_host_train_as_one_process(world_size):
    for name, k, every in (("gpt2", 1, 2), ("gpt2", 2, 1), ("llama", 2, 3)):
        model, plan, _ = offloaded(name=name, every=every, accumulation_steps=k, reduce_every_micro_step=k != 2)
        reference = lambda name=name, k=k: train_alone(name, accumulation_steps=k * world_size)  # noqa: E731
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3
        )  # fused, torch does not take plain parameters beside sharded ones
        assert_trained_alike(train_sharded(model, plan, optimizer=optimizer), reference)


def two_groups(model: torch.nn.Module, options: dict[str, Any]):
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [
        {"params": matrices, "weight_decay": 0.1, "lr": 1e-3},
        {"params": others, "weight_decay": 0.0, "lr": 2e-3},
    ]
    optimizer = torch.optim.AdamW(groups, **options)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: HALVING**step)


@worlds
@pytest.mark.on_ranks(shared=True)
def test_rebound_optimizers_and_schedulers_act_on_host_and_device(world_size):
    """An optimizer of two groups with a scheduler, made before the model is sharded, as Accelerate gives them."""
    alone = tiny_model("gpt2")
    optimizer, scheduler = two_groups(alone, {})
    for step in range(STEPS):
        stepped(alone, optimizer, step)
        scheduler.step()
    for options in ({}, {"foreach": True}, {"fused": True}):
        model = tiny_model("gpt2")
        optimizer, scheduler = two_groups(model, options)
        names, units = parameter_names(model), find_units(model)
        apply_plan(model, with_host(plan_of(units, world_size, "mixed")), units, meshes=Meshes("cpu"))
        rebind_parameters(optimizer, names, model)
        for step in range(STEPS):
            stepped(model, optimizer, step, **place())
            scheduler.step()
        state = full_state_dict(model)
        assert dist.get_rank() or worst(state, alone.state_dict()) < 1e-12, options
        found = [(group["lr"], group["weight_decay"], group["fused"]) for group in optimizer.param_groups]
        told = options.get("fused")
        assert found == [(1e-3 * HALVING**STEPS, 0.1, told), (2e-3 * HALVING**STEPS, 0.0, told)]


@worlds
@pytest.mark.on_ranks(shared=True)
def test_whole_states_go_over_to_another_plan(world_size):
    first, _, _ = offloaded()
    one = torch.optim.AdamW(first.parameters(), lr=1e-2)
    step_by_device(one, host_parameters(first))
    stepped(first, one, 0, **place())
    weights, states = full_state_dict(first), full_optimizer_state_dict(first, one)
    second, _, _ = offloaded("zero3", every=3, seed=1)
    other = torch.optim.AdamW(second.parameters(), lr=1e-2)
    load_full_state_dict(second, weights)
    load_full_optimizer_state_dict(second, other, states)
    for step in (1, 2):
        stepped(first, one, step, **place())
        stepped(second, other, step, **place())
    ours, theirs = full_state_dict(first), full_state_dict(second)
    assert dist.get_rank() or worst(ours, theirs) < 1e-12
    without = {name: value for name, value in weights.items() if "ln_f" not in name}
    with pytest.raises(
        RuntimeError, match=r"2 missing \['transformer.ln_f.weight', 'transformer.ln_f.bias'\], 0 unexpected"
    ):
        load_full_state_dict(second, without)
    with pytest.raises(RuntimeError, match=r"has shape \(2, 2\), but the model.s has \(61, 20\)"):
        load_full_state_dict(second, {**weights, "lm_head.weight": torch.zeros(2, 2)})


@worlds
@pytest.mark.on_ranks(shared=True)
def test_units_on_host_are_read_back(world_size):
    model, plan, units = offloaded()
    read = [unit.on_host for unit in read_back(model, units)]
    assert read == [index % 2 == 0 for index in range(len(read))]
    with pytest.raises(PlanMismatchError, match=r"but the plan says '.*on host"):
        verify_applied(model, with_host(plan, every=1), units)


@pytest.mark.on_ranks(1, init=False)
def test_accelerate_in_one_process_saves_and_goes_on_exactly(tmp_path):
    """No launcher, no process group before the plan is made."""
    from hf_osdp.integrations.accelerator import OSDPAccelerator

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    model = tiny_model("gpt2", dtype=torch.float32)
    plan = replace(with_host(plan_of(find_units(model), 1, "zero3")), sequence_length=12)
    accelerator = OSDPAccelerator(cpu=True, osdp={"plan": plan, "sequence_length": 12})
    assert not accelerator.is_fsdp2
    samples = [{name: value[row] for name, value in tiny_batch(0).items()} for row in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(samples))
    assert accelerator.is_fsdp2

    def epoch() -> tuple[float, float]:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return loss.item(), norm.item()

    epoch()
    accelerator.save_state(tmp_path)
    once = epoch()
    accelerator.load_state(tmp_path)
    assert epoch() == once
    assert {type(parameter).__name__ for parameter in model.parameters()} == {"DTensor", "Parameter"}
    assert set(accelerator.get_state_dict(model)) == tiny_model("gpt2").state_dict().keys()
