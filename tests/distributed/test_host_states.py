"""Optimizer states on the host: training as in one process, checkpoints over worlds, what is refused."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer_steps import bind_optimizer, step_by_device
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step
from tests.helpers.checkpointed import trained_by_plan, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import trained

STEPS = 3


def gpt2() -> torch.nn.Module:
    return tiny_model("gpt2", layers=2, width=32)


def planned(model: torch.nn.Module, layout: str) -> Plan:
    """The layout's plan, in which all but one unit have their states on the host."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = plan_of(find_units(model), world, layout)
    units = tuple(replace(unit, on_host=False, states_on_host=number != 1) for number, unit in enumerate(plan.units))
    return replace(plan, units=units, accumulation_steps=1, micro_batch_size=1)


def train(
    layout: str | None, kind: str = "AdamW", frozen: str = "", package: str = "torch.optim"
) -> dict[str, torch.Tensor]:
    """Train with a learning rate that changes, under the layout, or in one process as it comes for None."""
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name if frozen else True)
    plan, units, rank, parts = None, find_units(model), 0, 1
    if layout is not None:
        plan = planned(model, layout)
        apply_plan(model, plan, units, meshes=Meshes("cpu") if dist.is_initialized() else None)
        rank, parts = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = getattr(import_module(package), kind)(decayed, lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if plan is not None:
        step_by_device(optimizer)
        bind_optimizer(model, plan, units, [optimizer])
    for step in range(STEPS):
        with micro_step(model, is_last=True, plan=plan):
            tiny_loss(model, tiny_batch(step, part=rank, parts=parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if kind == "AdamW" and plan is not None:
        waiting = {id(p) for unit in units if plan.decision(unit.fqn).states_on_host for p in named(model, unit)}
        owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_post_hooks.values())
        owners = [stage for owner in owners if owner is not None for stage in owner.stages]
        buffers = {id(value) for owner in owners for value in owner._host.values()}
        held = {id(local(state)): id(p) for p, states in optimizer.state.items() for state in states.values()}
        assert {held[buffer] for buffer in buffers} == waiting, "their states are the buffers that go to the host"
    return full_state_dict(model)


def named(model: torch.nn.Module, unit) -> list[torch.nn.Parameter]:
    parameters = dict(model.named_parameters())
    return [parameters[p.name] for p in unit.trainable]


LAYOUTS, KINDS = ("zero3", "mixed", "replicate"), ("AdamW", "SGD", "NAdam")


def train_each(cases: list[tuple[str, ...]]) -> dict[tuple[str, ...], dict[str, torch.Tensor]]:
    return {case: train(*case) for case in cases}


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_units_with_states_on_host_train_as_one_process(slow):
    cases = [case for case in product(LAYOUTS, KINDS) if (case[0] == "replicate" or case[1] == "NAdam") == slow]
    (found, _) = run_ranks(train_each, 2, cases, timeout_s=300, shared=True)
    alone = {kind: train(None, kind) for kind in {kind for _, kind in cases}}
    assert not {
        case: error for case, weights in found.items() if not (error := worst(weights, alone[case[1]])) < 1e-12
    }


def test_those_of_bitsandbytes_do_too():
    package = "bitsandbytes.optim"
    pytest.importorskip(package, reason="bitsandbytes is not installed; pip install 'hf_osdp[bnb]'")
    (weights, _) = run_ranks(train, 2, "mixed", "AdEMAMix", "", package, shared=True)
    assert worst(weights, train(None, "AdEMAMix", package=package)) < 1e-9


def test_plain_parameters_and_frozen_ones_of_one_process():
    assert worst(train("replicate"), train(None)) < 1e-12
    assert worst(train("replicate", frozen="mlp"), train(None, frozen="mlp")) < 1e-12


def chain(folder: str, layout: str, start: int) -> dict[str, torch.Tensor]:
    """Two steps from a checkpoint."""
    model = gpt2()
    steps = range(start, start + 2)
    trained_by_plan(
        model, planned(model, layout), lambda: torch.optim.AdamW(model.parameters(), lr=1e-2), steps, folder
    )
    return full_state_dict(model)


def test_checkpoints_go_over_worlds(tmp_path):
    run_ranks(chain, 2, str(tmp_path), "mixed", 0, timeout_s=300, shared=True)
    run_ranks(chain, 1, str(tmp_path), "replicate", 2, timeout_s=300, shared=True)
    (weights, _) = run_ranks(chain, 2, str(tmp_path), "zero3", 4, timeout_s=300, shared=True)
    model = gpt2()
    trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), None, range(6))
    assert worst(weights, full_state_dict(model)) < 1e-12


def test_optimizers_with_shared_counters_and_several_are_refused():
    model = gpt2()
    plan, units = planned(model, "replicate"), find_units(model)

    class Counts(torch.optim.SGD):
        pass

    with pytest.raises(OSDPError, match="Counts may keep state that all its parameters share"):
        bind_optimizer(model, plan, units, [Counts(model.parameters())])
    with pytest.raises(OSDPError, match=r"there are several optimizers"):
        bind_optimizer(model, plan, units, [torch.optim.SGD([p]) for p in model.parameters()])
