"""Units on the host against one process, in float64. On the CPU FSDP2's offload moves nothing; all that surrounds it runs."""

from __future__ import annotations

import functools
import os
import tempfile
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
from hf_osdp.sharding.host_offload import host_parameters
from hf_osdp.sharding.optimizer import parameter_names, rebind_parameters, step_by_device
from hf_osdp.sharding.state import full_optimizer_state_dict, full_state_dict, load_full_optimizer_state_dict, load_full_state_dict
from hf_osdp.sharding.verify import read_back, verify_applied
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import train_alone, train_sharded

WORLD_SIZES = (1, 2)
STEPS, HALVING = 3, 0.5


def with_host(plan: Plan, *, every: int = 2) -> Plan:
    """Each `every`-th unit on the host."""
    return replace(plan, units=tuple(replace(unit, on_host=index % every == 0) for index, unit in enumerate(plan.units)))


def offloaded(layout: str = "mixed", *, every: int = 2, seed: int = 0, name: str = "gpt2", **options: Any):
    model = tiny_model(name, seed=seed)
    units = find_units(model)
    plan = with_host(plan_of(units, dist.get_world_size(), layout, **options), every=every)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    verify_applied(model, plan, units)
    return model, plan, units


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    tiny_loss(model, tiny_batch(step, part=dist.get_rank(), parts=dist.get_world_size())).backward()
    optimizer.step()
    optimizer.zero_grad()


@functools.cache
def outcome(world_size: int) -> list[dict[str, Any]]:
    return run_ranks(run_cases, world_size, timeout_s=200)


def run_cases() -> dict[str, Any]:
    return {
        "trained": {
            (name, k, every): train_sharded(*offloaded(name=name, every=every, accumulation_steps=k, reduce_every_micro_step=k != 2)[:2])
            for name, k, every in [("gpt2", 1, 2), ("gpt2", 2, 1), ("llama", 2, 3)]
        },
        "optimizers": {kind: rebound_case(options) for kind, options in OPTIMIZERS.items()},
        "state": state_case(),
        "read back": [unit.on_host for unit in read_back(*offloaded()[::2])],
        "mismatch": mismatch_case(),
    }


OPTIMIZERS = {"plain": {"foreach": False}, "default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def rebound_case(options: dict[str, Any]) -> dict[str, Any]:
    """An optimizer of two groups with a scheduler, made before the model is sharded, as Accelerate gives them."""
    model = tiny_model("gpt2")
    optimizer, scheduler = two_groups(model, options)
    names, units = parameter_names(model), find_units(model)
    plan = with_host(plan_of(units, dist.get_world_size(), "mixed"))
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    rebind_parameters(optimizer, names, model)
    for step in range(STEPS):
        stepped(model, optimizer, step)
        scheduler.step()
    groups = [{key: group[key] for key in ("lr", "weight_decay", "fused")} for group in optimizer.param_groups]
    return {"state": full_state_dict(model), "groups": groups, "told": options.get("fused")}


def two_groups(model: torch.nn.Module, options: dict[str, Any]):
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1, "lr": 1e-3}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]
    optimizer = torch.optim.AdamW(groups, **options)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: HALVING**step)


def state_case() -> dict[str, Any]:
    """Whole weights and optimizer state go over to another plan, which goes on in the same way."""
    first, _, _ = offloaded()
    one = torch.optim.AdamW(first.parameters(), lr=1e-2)
    step_by_device(one, host_parameters(first))
    stepped(first, one, 0)
    weights, states = full_state_dict(first), full_optimizer_state_dict(first, one)
    second, _, _ = offloaded("zero3", every=3, seed=1)
    other = torch.optim.AdamW(second.parameters(), lr=1e-2)
    load_full_state_dict(second, weights)
    load_full_optimizer_state_dict(second, other, states)
    for step in (1, 2):
        stepped(first, one, step)
        stepped(second, other, step)
    ours, theirs = full_state_dict(first), full_state_dict(second)
    lines = []
    for wrong in ({k: v for k, v in weights.items() if "ln_f" not in k}, {**weights, "lm_head.weight": torch.zeros(2, 2)}):
        with pytest.raises(RuntimeError) as raised:
            load_full_state_dict(second, wrong)
        lines.append(str(raised.value))
    return {"error": max(((ours[n] - theirs[n]).abs().max().item() for n in ours), default=0.0), "lines": lines}


def mismatch_case() -> str:
    model, plan, units = offloaded()
    with pytest.raises(PlanMismatchError) as raised:
        verify_applied(model, with_host(plan, every=1), units)
    return str(raised.value)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_trains_as_one_process_does(world_size):
    for (name, k, _), trained in outcome(world_size)[0]["trained"].items():
        errors = trained.worst_error(train_alone(name, accumulation_steps=k * world_size))
        assert errors["loss"] < 1e-13 and errors["norm"] < 1e-13 and errors["parameter"] < 1e-12, (name, k, errors)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_step_what_lies_in_each_place_and_schedulers_act_on_all(world_size, kind):
    model = tiny_model("gpt2")
    optimizer, scheduler = two_groups(model, {})
    for step in range(STEPS):
        tiny_loss(model, tiny_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    case = outcome(world_size)[0]["optimizers"][kind]
    assert max((case["state"][name] - value).abs().max().item() for name, value in model.state_dict().items()) < 1e-12
    rates = [1e-3 * HALVING**STEPS, 2e-3 * HALVING**STEPS]
    assert case["groups"] == [
        {"lr": rates[0], "weight_decay": 0.1, "fused": case["told"]}, {"lr": rates[1], "weight_decay": 0.0, "fused": case["told"]}
    ]  # fmt: skip


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_whole_states_go_over_to_another_plan(world_size):
    for found in outcome(world_size):
        missing, shape = found["state"]["lines"]
        assert found["state"]["error"] < 1e-12
        assert "2 missing ['transformer.ln_f.weight', 'transformer.ln_f.bias'], 0 unexpected" in missing
        assert "has shape (2, 2), the model has (61, 20)" in shape


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_layout_is_read_back(world_size):
    found = outcome(world_size)[0]
    assert found["read back"] == [index % 2 == 0 for index in range(len(found["read back"]))]
    assert "on host" in found["mismatch"] and "but the plan says" in found["mismatch"]


def accelerated() -> dict[str, Any]:
    """Accelerate in one process: no launcher, no process group before the plan is made."""
    from hf_osdp.integrations.accelerator import OSDPAccelerator

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    model = tiny_model("gpt2", dtype=torch.float32)
    plan = replace(with_host(plan_of(find_units(model), 1, "zero3")), sequence_length=12)
    accelerator = OSDPAccelerator(cpu=True, osdp={"plan": plan, "sequence_length": 12})
    before = accelerator.is_fsdp2
    samples = [{name: value[row] for name, value in tiny_batch(0).items()} for row in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(samples))

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
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        once = epoch()
        accelerator.load_state(folder)
        again = epoch()
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    return {
        "fsdp": (before, accelerator.is_fsdp2),
        "once": once,
        "again": again,
        "kinds": kinds,
        "names": set(accelerator.get_state_dict(model)),
    }


def test_accelerate_in_one_process():
    found = run_ranks(accelerated, 1, init=False)[0]
    assert found["fsdp"] == (False, True) and found["kinds"] == {"DTensor", "Parameter"}
    assert found["once"] == found["again"], "a checkpoint goes on as if nothing had been"
    assert found["names"] == tiny_model("gpt2").state_dict().keys()
