"""Optimizers that are let through train as one process does, and others are stopped before their first step; findings are agreed on."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_osdp.errors import OSDPError, PreflightError
from hf_osdp.planning.preflight.checks import Check, Finding, Severity
from hf_osdp.planning.preflight.run import merged_findings
from hf_osdp.sharding.optimizer import prepare_new_optimizers
from hf_osdp.sharding.optimizer_check import _ELEMENT_WISE, check_optimizer, difference_on_shards
from tests.helpers.distributed import run_ranks

STEPS = 3


class SignOfMomentum(torch.optim.Optimizer):
    """Element-wise, and not torch's own."""

    def __init__(self, parameters: Any, lr: float = 0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                parameter.add_(momentum.sign(), alpha=-group["lr"])


class TrustRatio(SignOfMomentum):
    """Scales by norms, under a name that says nothing of it."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad * (parameter.norm() / parameter.grad.norm()), alpha=-group["lr"])


class NeedsClosure(SignOfMomentum):
    def step(self, closure: Any) -> None:
        closure()


def test_what_no_name_tells_is_told_by_a_trial():
    weights = [nn.Parameter(torch.ones(2, 2))]
    schedule_at_0, state = SignOfMomentum(weights, lr=0.0), copy.deepcopy(weights)
    assert difference_on_shards(schedule_at_0) < 1e-6
    check_optimizer(schedule_at_0)
    assert not schedule_at_0.state and schedule_at_0.param_groups[0]["lr"] == 0.0 and torch.equal(weights[0], state[0])
    with pytest.raises(OSDPError, match=r"^TrustRatio is not element-wise: .* differ by \d[\d.e+]* % of the update; use an element-wise"):
        check_optimizer(TrustRatio(weights))
    with pytest.raises(OSDPError, match=r"^NeedsClosure cannot be tried on shards \(TypeError: .*closure.*\); use an element-wise"):
        check_optimizer(NeedsClosure(weights))


def sharded() -> tuple[nn.Module, nn.Module]:
    """One layer on two ranks, one on each, and the same in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, dtype=torch.float64), nn.Tanh(), nn.Linear(7, 3, dtype=torch.float64))
    alone = copy.deepcopy(model)
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model[2], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return model, alone


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        model(torch.randn(4, 5, dtype=torch.float64, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def apart(model: nn.Module, alone: nn.Module) -> float:
    whole = [p.full_tensor() for p in model.parameters()]
    return max(float((a - b).detach().abs().max()) for a, b in zip(whole, alone.parameters(), strict=True))


def on_two_ranks() -> dict[str, Any]:
    results: dict[str, Any] = {"apart": {}, "said": {}}
    for cls in (*_ELEMENT_WISE, SignOfMomentum):
        model, alone = sharded()
        for module in (model, alone):
            train(module, cls(module.parameters(), lr=0.1))
        results["apart"][cls.__name__] = apart(model, alone)
    model, alone = sharded()
    prepare_new_optimizers(model)
    for cls in (TrustRatio, torch.optim.Muon, SignOfMomentum):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        try:
            train(model, cls(matrices, lr=0.1))
        except OSDPError as problem:
            results["said"][cls.__name__] = str(problem)
            results["moved"] = apart(model, alone)
    try:
        merged_findings(
            [Finding(Check.MODEL, Severity.ERROR, "Bad here.")] if dist.get_rank() else [Finding(Check.PLAN, Severity.NOTE, "Fine.")]
        )
    except PreflightError as problem:
        results["agreed"] = str(problem)
    results["notes"] = [finding.message for finding in merged_findings([Finding(Check.PLAN, Severity.NOTE, f"Fine on {dist.get_rank()}.")])]
    return results


@functools.cache
def outcome() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


def test_every_optimizer_that_is_let_through_trains_as_one_process_does():
    assert len(outcome()[0]["apart"]) == 11
    assert all(difference < 1e-12 for difference in outcome()[0]["apart"].values()), outcome()[0]["apart"]


def test_in_a_plain_loop_others_are_stopped_before_their_first_step():
    said = outcome()[0]["said"]
    assert set(said) == {"TrustRatio", "Muon"} and outcome()[0]["moved"] == 0.0
    assert "TrustRatio is not element-wise" in said["TrustRatio"] and "orthogonalises" in said["Muon"]


def test_an_error_of_one_rank_stops_all_and_notes_stand_once():
    assert [result["agreed"] for result in outcome()] == ["On rank 1: Bad here."] * 2
    assert [result["notes"] for result in outcome()] == [["Fine on 0."]] * 2
