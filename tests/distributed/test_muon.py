"""torch's Muon on shards: the training of one process, checkpoints, what a step holds and sends, and plans that shard for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from hf_osdp.checkpoint.states import load_loop, save_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer import check_optimizer, spec_of_optimizer, spec_of_optimizers
from hf_osdp.sharding.optimizer_steps import step_on_shards
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.unit_steps import bind_optimizer
from hf_osdp.tracing.memory_tracker import MemoryTracker
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model
from tests.helpers.training import trained

MATRICES = ("mlp", "attn", "wpe")
"""Of the embeddings the one of positions, whose rows are fewer than ranks in some cases."""


def model_of(seed: int = 0) -> nn.Module:
    """Matrices alone are trained, as one optimizer has them all."""
    model = tiny_model("gpt2", seed=seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 2 and any(part in name for part in MATRICES))
    return model


def muon_of(model: nn.Module, **options) -> torch.optim.Muon:
    torch.Tensor.bfloat16 = lambda tensor: tensor.to(torch.float64, copy=True)  # products in float64, in a process of the test's own
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def planned(model: nn.Module, layout: str, way: str) -> Plan:
    """Every second trained unit as the way says."""
    units = find_units(model)
    plan, turned = plan_of(units, dist.get_world_size(), layout), {unit.fqn for unit in units if unit.trainable_numel}
    decisions = [replace(d, **{way: bool(i % 2) and d.fqn in turned}) if way else d for i, d in enumerate(plan.units)]
    return replace(plan, units=tuple(decisions))


def on_shards(layout: str, way: str = "", folder: str = "", start: int = 0, steps: int = 2, **options) -> dict[str, torch.Tensor]:
    model = model_of(seed=start)
    units, plan = find_units(model), planned(model, layout, way)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    optimizer = muon_of(model, **options)
    step_on_shards(optimizer, model)
    bind_optimizer(model, plan, units, [optimizer])
    if start:
        load_loop(f"{folder}/{start}", model, optimizer, others={})
    trained(model, optimizer, plan, range(start, start + steps))
    if folder:
        save_loop(CheckpointWriter(), f"{folder}/{start + steps}", model, optimizer, others={}, progress={}, sharded=start == 0)
    assert not any(isinstance(value, DTensor) for states in optimizer.state.values() for value in states.values())
    return full_state_dict(model)


def alone(steps: int, **options) -> dict[str, torch.Tensor]:
    model = model_of()
    trained(model, muon_of(model, **options), None, range(steps))
    return full_state_dict(model)


CASES = [
    ("zero3", "", {}), ("zero2", "", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}), ("mixed", "", {"ns_steps": 3}),
    ("zero3", "step_in_backward", {}), ("mixed", "step_in_backward", {}), ("zero3", "states_on_host", {}),
]  # fmt: skip


def check(cases: list[tuple[str, str, dict]]) -> None:
    """Compare on rank 0, which has whole weights."""
    for layout, way, options in cases:
        weights = on_shards(layout, way, **options)
        if dist.get_rank() == 0:
            assert worst(weights, alone(2, **options)) < 1e-12, (layout, way)


@pytest.mark.on_ranks(2)
def test_training_on_shards_equals_one_process():
    check(CASES)


@pytest.mark.slow
@pytest.mark.on_ranks(4)
def test_training_in_groups_and_two_stages_equals_one_process():
    check([("hsdp", "", {}), ("mixed", "step_in_backward", {}), ("two_stage", "", {}), ("mixed", "states_on_host", {})])


def test_checkpoints_go_on_in_one_process_and_in_another_plan(tmp_path):
    run_ranks(on_shards, 2, "zero3", "", str(tmp_path), 0, timeout_s=200)
    run_ranks(on_shards, 1, "replicate", "", str(tmp_path), 2, timeout_s=200)
    (weights, *_) = run_ranks(on_shards, 2, "mixed", "", str(tmp_path), 4, timeout_s=200)
    assert worst(weights, run_ranks(alone, 1, 6)[0]) < 1e-12
