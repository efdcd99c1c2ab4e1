"""Optimizers under a plan: which train as one process does, which are refused, and how they are bound to shards."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_osdp.errors import OSDPError, PreflightError
from hf_osdp.preparation.preflight import Check, Finding, Severity, merged_findings
from hf_osdp.sharding.optimizer import check_optimizer
from hf_osdp.sharding.optimizer_steps import (
    parameter_names,
    prepare_new_optimizers,
    rebind_parameters,
    release_parameters,
    step_by_device,
)
from hf_osdp.sharding.optimizers import kind_of
from hf_osdp.sharding.optimizers.kind import ELEMENT_WISE
from hf_osdp.sharding.optimizers.trial import difference_on_shards

STEPS = 3


class Lamb(torch.optim.AdamW):
    """As other packages call it."""


class MyLamb(Lamb):
    """A subclass by a user."""


class MyMuon(torch.optim.Muon):
    """By its base as torch's, but a user may have changed it."""


class StepsOthers(torch.optim.Optimizer):
    """Keeps states where neither a plan nor a checkpoint finds them."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.Muon(parameters)

    def step(self, closure=None) -> None:
        self.inner.step()


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


class ScalesRows(SignOfMomentum):
    """Is the same on shards of rows, and not on others."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(nn.functional.normalize(parameter.grad, dim=-1), alpha=-group["lr"])


class Noisy(SignOfMomentum):
    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=-group["lr"])


class NeedsClosure(SignOfMomentum):
    def step(self, closure: Any) -> None:
        closure()


# ---- one process


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_check_refuses_optimizers_that_cannot_run_under_a_plan(name):
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(OSDPError, match=f"^{name} .*use an element-wise optimizer"):
        check_optimizer(optimizer)


def test_check_finds_by_base_class_and_trial_who_needs_whole():
    weights = [nn.Parameter(torch.ones(2, 2))]
    schedule_at_0, state = SignOfMomentum(weights, lr=0.0), copy.deepcopy(weights)
    assert difference_on_shards(schedule_at_0) < 1e-6
    assert not kind_of(schedule_at_0).needs_whole()
    assert not schedule_at_0.state and schedule_at_0.param_groups[0]["lr"] == 0.0 and torch.equal(weights[0], state[0])
    assert difference_on_shards(MyLamb(weights)) < 1e-6 and kind_of(MyLamb(weights)).needs_whole(), (
        "by the name of its base"
    )
    for optimizer in (TrustRatio(weights), ScalesRows(weights), torch.optim.Adafactor(weights), MyMuon(weights)):
        assert kind_of(optimizer).needs_whole()
        check_optimizer(optimizer)
    for optimizer in (torch.optim.Rprop(weights), torch.optim.Muon(weights)):
        assert not kind_of(optimizer).needs_whole()
    with pytest.raises(OSDPError, match=r"^NeedsClosure cannot be tried on a matrix \(TypeError: .*closure.*\)"):
        check_optimizer(NeedsClosure(weights))
    with pytest.raises(OSDPError, match=r"^StepsOthers cannot be tried on a matrix"):
        check_optimizer(StepsOthers(weights))
    with pytest.raises(OSDPError, match=r"^Noisy updates at random, so that replicas would drift apart"):
        check_optimizer(Noisy(weights))


def test_rebind_takes_new_adagrad_with_state_and_refuses_used_one():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    rebind_parameters(optimizer, parameter_names(model), model)
    assert all(optimizer.state[parameter]["sum"].eq(0.5).all() for parameter in model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(OSDPError, match=r"^Adagrad has state .* make it from the sharded model's parameters"):
        rebind_parameters(optimizer, parameter_names(model), model)


def test_strange_and_missing_parameters_are_refused_and_optimizer_is_unchanged():
    model, strange = nn.Linear(2, 2), nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([*model.parameters(), strange], lr=0.1)
    with pytest.raises(OSDPError, match=r"shape \(5,\) that the model does not have"):
        release_parameters(optimizer, parameter_names(model))
    assert optimizer.param_groups[0]["params"][-1] is strange
    with pytest.raises(OSDPError, match="no parameter 'weight'"):
        rebind_parameters(torch.optim.SGD(model.parameters(), lr=0.1), parameter_names(model), nn.Module())


# ---- ranks


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


def apart(model: nn.Module, others: Iterable[torch.Tensor]) -> float:
    whole = [p.full_tensor() for p in model.parameters()]
    return max(float((a - b).detach().abs().max()) for a, b in zip(whole, others, strict=True))


@pytest.mark.on_ranks(2, shared=True)
def test_every_allowed_optimizer_trains_as_one_process_does():
    assert len(ELEMENT_WISE) == 10
    for cls in (*ELEMENT_WISE, torch.optim.Rprop, SignOfMomentum):
        model, alone = sharded()
        for module in (model, alone):
            optimizer = cls(module.parameters(), lr=0.1)
            if kind_of(optimizer).steps_shards:
                step_by_device(optimizer)
            train(module, optimizer)
        assert apart(model, alone.parameters()) < 1e-12, cls


@pytest.mark.on_ranks(2, shared=True)
def test_others_are_refused_before_their_first_plain_loop_step():
    model, alone = sharded()
    prepare_new_optimizers(model, lambda module, optimizer: None)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    for cls in (TrustRatio, MyMuon):
        with pytest.raises(
            OSDPError, match=f"{cls.__name__} is not element-wise: it needs whole parameters, and 1 of 2 are sharded"
        ):
            train(model, cls(matrices, lr=0.1))
    assert apart(model, alone.parameters()) == 0.0
    train(model, SignOfMomentum(matrices, lr=0.1))


def note(text: str) -> Finding:
    return Finding(Check.PLAN, Severity.NOTE, text)


@pytest.mark.on_ranks(2, shared=True)
def test_findings_of_one_rank_stop_all_and_notes_stand_once():
    rank = dist.get_rank()
    with pytest.raises(PreflightError, match=r"^On rank 1: Bad here\.$"):
        merged_findings([Finding(Check.MODEL, Severity.ERROR, "Bad here.") if rank else note("Fine.")])
    assert [finding.message for finding in merged_findings([note(f"Fine on {rank}.")])] == ["Fine on 0."]
