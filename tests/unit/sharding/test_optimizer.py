"""What the planner is told about the optimizer."""

from __future__ import annotations

import pytest
import torch

from hf_osdp.planner.optimizers import spec_of_trainer_name
from hf_osdp.planner.training_job import OptimizerStep
from hf_osdp.sharding.optimizer import spec_of_optimizer


@pytest.mark.parametrize(
    ("cls", "options", "states"),
    [
        (torch.optim.AdamW, {}, 2),
        (torch.optim.AdamW, {"amsgrad": True}, 3),
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
        (torch.optim.Adagrad, {}, 1),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, 3),
    ],
)
def test_spec_of_optimizer_counts_the_states_that_torch_keeps(cls, options, states):
    parameter = torch.nn.Parameter(torch.ones(7))
    optimizer = cls([parameter], **options)
    parameter.grad = torch.ones(7)
    optimizer.step()
    kept = sum(1 for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.numel() == 7)
    assert spec_of_optimizer(optimizer, device_type="cpu").states == states == kept


@pytest.mark.parametrize(
    ("options", "device_type", "step"),
    [
        ({}, "cpu", OptimizerStep.FOR_LOOP),
        ({}, "cuda", OptimizerStep.FOREACH),
        ({"fused": True}, "cpu", OptimizerStep.FUSED),
        ({"foreach": True}, "cpu", OptimizerStep.FOREACH),
        ({"foreach": False}, "cuda", OptimizerStep.FOR_LOOP),
    ],
)
def test_spec_of_optimizer_says_how_the_step_runs(options, device_type, step):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **options)
    found = spec_of_optimizer(optimizer, device_type=device_type)
    assert found.step is step
    if not options:
        assert spec_of_optimizer(None, device_type=device_type) == found
        assert spec_of_trainer_name("adamw_torch", device_type=device_type) == found
