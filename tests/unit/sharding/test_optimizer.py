"""What the planner is told about the optimizer."""

from __future__ import annotations

import pytest
import torch

from hf_osdp.planner.optimizers import spec_of_trainer_name
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep
from hf_osdp.sharding.optimizer import frozen_parameters, spec_of_optimizer
from hf_osdp.sharding.optimizer_steps import reason_against_unit_steps
from hf_osdp.sharding.optimizers import kind_of


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


def test_spec_of_names_and_frozen_parameters_are_known():
    assert spec_of_trainer_name("adamw_torch_fused", device_type="cpu").step is OptimizerStep.FUSED
    assert spec_of_trainer_name("sgd", device_type="cpu").states == 0
    layer = torch.nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    assert frozen_parameters(torch.optim.SGD(layer.parameters(), lr=0.1)) == 1
    assert frozen_parameters(None) == frozen_parameters(OptimizerSpec()) == 0


def test_other_torchao_optimizers_are_not_taken_for_quantized_ones():
    quantizes_weights = type("QuantOptimizer", (torch.optim.SGD,), {"__module__": "torchao.prototype.parq.optim"})
    optimizer = quantizes_weights([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    assert "share" in reason_against_unit_steps(optimizer)
    assert not kind_of(optimizer).lr_is_tensor


class KeepsMatrices(torch.optim.Optimizer):
    """Holds a state of another shape than its parameter, as Shampoo does."""

    kept = staticmethod(lambda p: p @ p.T)

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self.kept(parameter)
                parameter.sub_(parameter.grad, alpha=group["lr"])


class KeepsLists(KeepsMatrices):
    kept = staticmethod(lambda p: [p.clone()])


@pytest.mark.parametrize(("cls", "said"), [(KeepsMatrices, r"\(96, 96\)"), (KeepsLists, "list")])
def test_states_of_other_shapes_than_the_parameters_are_refused(cls, said):
    with pytest.raises(ValueError, match=f"^The memory of {cls.__name__} cannot be determined .*{said}"):
        spec_of_optimizer(cls([torch.nn.Parameter(torch.ones(2, 2))]), device_type="cpu")


def test_the_group_that_keeps_most_counts():
    class OneKeeps(KeepsMatrices):
        def step(self):
            for group, kept in zip(self.param_groups, (0, 2), strict=True):
                for parameter in group["params"]:
                    self.state[parameter] = {str(number): torch.zeros_like(parameter) for number in range(kept)}
                    parameter.data -= parameter.grad

    groups = [{"params": [torch.nn.Parameter(torch.ones(2, 2))]} for _ in range(2)]
    assert spec_of_optimizer(OneKeeps(groups), device_type="cpu").states == 2
