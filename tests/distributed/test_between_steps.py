"""What a loop does between backward, the step and the next forward: equal to one process, or refused in a line."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, UnreducedGradientError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import clip_grad_norm_, local
from hf_osdp.sharding.optimizer_steps import bind_optimizer, step_on_shards
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model

STEPS = 3
Weights = dict[str, torch.Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, Callable[[int], torch.Tensor], int], object]


class AssignsData(torch.optim.Optimizer):
    """Plain descent as some write it, which leaves new tensors in the place of parameters and no gradients."""

    def __init__(self, parameters, lr: float):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad
                parameter.grad = None


def whole_model() -> nn.Module:
    """With two parameters that only some losses use."""
    model = tiny_model("gpt2", layers=2, scale=10.0)
    for name in ("first", "second"):
        model.register_parameter(name, nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return model


def sharded(
    layout: str = "mixed", way: str | None = None, accumulation_steps: int = 1
) -> tuple[nn.Module, Plan, object]:
    """The model under a plan in which, for a `way`, all but the last unit step so."""
    model = whole_model()
    units = find_units(model)
    plan = plan_of(
        units, dist.get_world_size(), layout, accumulation_steps=accumulation_steps, reduce_every_micro_step=False
    )
    if way is not None:
        plan = replace(plan, units=tuple(replace(unit, **{way: unit is not plan.units[-1]}) for unit in plan.units))
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    return model, plan, units


def train(step: Step, kind: type[torch.optim.Optimizer], layout: str | None, way: str | None = None) -> Weights:
    model, part, parts = whole_model(), 0, 1
    optimizer = None
    if layout is not None:
        model, plan, units = sharded(layout, way)
        PLANS[model] = plan
        part, parts = dist.get_rank(), dist.get_world_size()
        optimizer = kind(model.parameters(), lr=0.1)
        step_on_shards(optimizer, model)
        bind_optimizer(model, plan, units, [optimizer])
    optimizer = optimizer or kind(model.parameters(), lr=0.1)

    def loss(number: int) -> torch.Tensor:
        return tiny_loss(model, tiny_batch(number, part=part, parts=parts)) + 0.1 * (
            model.first.sum() + model.second.sum()
        )

    for number in range(STEPS):
        step(model, optimizer, loss, number)
    return full_state_dict(model)


def usual(model, optimizer, loss, number) -> None:
    loss(number).backward()
    optimizer.step()
    optimizer.zero_grad()


def measures_before_the_step(model, optimizer, loss, number) -> None:
    loss(number).backward()
    with torch.no_grad():
        tiny_loss(model, tiny_batch(number))
    clip = clip_grad_norm_ if dist.is_initialized() else nn.utils.clip_grad_norm_
    clip(model.parameters(), 0.1)
    if number == 1:
        tiny_loss(model, tiny_batch(number))  # without backward
    optimizer.step()
    optimizer.zero_grad()


def writes_after_an_evaluation(model, optimizer, loss, number) -> None:
    usual(model, optimizer, loss, number)
    with torch.no_grad():
        tiny_loss(model, tiny_batch(number))
        for parameter in model.parameters():
            parameter.mul_(0.9)


def loads_after_an_evaluation(model, optimizer, loss, number) -> None:
    before = {name: value * 0.9 for name, value in model.state_dict().items()}
    usual(model, optimizer, loss, number)
    with torch.no_grad():
        tiny_loss(model, tiny_batch(number))
    model.load_state_dict(before if number == 1 else model.state_dict())


def leaves_freeing_to_the_optimizer(model, optimizer, loss, number) -> None:
    loss(number).backward()
    optimizer.step()


def scales_in_a_hook(model, optimizer, loss, number) -> None:
    def scale(optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.1)

    if number == 0:
        optimizer.register_step_pre_hook(scale)
    usual(model, optimizer, loss, number)


def gives_up_a_group_of_micro_steps(model, optimizer, loss, number) -> None:
    """As where a loss is not finite: what the first micro-step left is zeroed, and is in no later step."""
    plan = PLANS.get(model)
    with micro_step(model, is_last=False, plan=plan):
        loss(number).backward()
    if number > 0:
        optimizer.zero_grad(set_to_none=number == 1)
    for last in (False, True):
        with micro_step(model, is_last=last, plan=plan):
            loss(number + 5).backward()
    optimizer.step()
    optimizer.zero_grad()


def scales_between_micro_steps(model, optimizer, loss, number) -> None:
    for last in (False, True):
        with micro_step(model, is_last=last, plan=PLANS.get(model)):
            loss(number + 5 * last).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0)
    optimizer.step()
    optimizer.zero_grad()


PLANS: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()
SGD = torch.optim.SGD
EQUAL = [
    (measures_before_the_step, SGD, "mixed", None),
    (measures_before_the_step, SGD, "zero2", None),
    (writes_after_an_evaluation, SGD, "mixed", None),
    (loads_after_an_evaluation, SGD, "mixed", None),
    (leaves_freeing_to_the_optimizer, AssignsData, "mixed", None),
    (scales_in_a_hook, SGD, "mixed", "states_on_host"),
    (gives_up_a_group_of_micro_steps, SGD, "mixed", None),
    (gives_up_a_group_of_micro_steps, SGD, "mixed", "reduce_every_micro_step"),
    (gives_up_a_group_of_micro_steps, SGD, "zero3", "reduce_every_micro_step"),
    (gives_up_a_group_of_micro_steps, partial(SGD, foreach=True), "zero3", None),
    (scales_between_micro_steps, SGD, "mixed", "reduce_every_micro_step"),
]


def train_each(cases) -> list[Weights]:
    return [train(*case) for case in cases]


def test_loops_with_more_between_their_steps_equal_one_process():
    (found, _) = run_ranks(train_each, 2, EQUAL, timeout_s=300, shared=True)
    alone = {step: train(step, kind, None) for step, kind, _, _ in EQUAL}
    assert not {
        (case[0].__name__, *case[2:]): error
        for case, weights in zip(EQUAL, found, strict=True)
        if not (error := worst(weights, alone[case[0]])) < 1e-12
    }


@pytest.mark.on_ranks(2, shared=True)
def test_hooks_and_data_that_shards_do_not_take_are_refused():
    model, _, _ = sharded()
    optimizer = SGD(model.parameters(), lr=0.1)
    tiny_loss(model, tiny_batch(0)).backward()
    optimizer.step()
    norm = model.transformer.ln_f.weight
    norm.data = norm.data * 0.5
    with pytest.raises(OSDPError, match=r"\.data of its weight was assigned, which changes no shard"):
        tiny_loss(model, tiny_batch(0))
    model, _, _ = sharded()
    model.transformer.ln_f.bias.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(OSDPError, match="register_hook on its bias has no effect on a shard"):
        tiny_loss(model, tiny_batch(0))
    whole = whole_model()
    whole.first.register_hook(lambda gradient: gradient * 0.5)
    units = find_units(whole)
    with pytest.raises(OSDPError, match="Parameter 'first' has a hook on its gradient"):
        apply_plan(whole, plan_of(units, 2, "mixed"), units, meshes=Meshes("cpu"))


@pytest.mark.on_ranks(2, shared=True)
def test_model_to_frees_shards_and_their_gradients_are_refused():
    model, _, _ = sharded()
    tiny_loss(model, tiny_batch(0)).backward()
    model.zero_grad()
    before = [weakref.ref(local(parameter)) for parameter in model.parameters()]
    model.to(torch.float64)
    gc.collect()
    assert not any(shard() is not None for shard in before)
    shard = model.transformer.ln_f.weight
    tiny_loss(model, tiny_batch(0)).backward()
    with pytest.raises(UnreducedGradientError, match="got a gradient for a shard of its weight"):
        shard.sum().full_tensor().backward()


@pytest.mark.on_ranks(2, shared=True)
def test_optimizers_of_other_parameters_are_refused():
    whole = whole_model()
    early, units = SGD(whole.parameters(), lr=0.1), find_units(whole)
    apply_plan(whole, plan_of(units, 2, "mixed"), units, meshes=Meshes("cpu"))
    tiny_loss(whole, tiny_batch(0)).backward()
    with pytest.raises(OSDPError, match="SGD has parameters from before the plan was applied"):
        early.step()
    whole.late = nn.Linear(61, 61).double()
    nn.functional.cross_entropy(
        whole.late(whole(input_ids=tiny_batch(0)["input_ids"]).logits)[:, 0], tiny_batch(0)["labels"][:, 0]
    ).backward()
    with pytest.raises(
        OSDPError,
        match=r"SGD has a parameter of shape \(61, 61\) that the plan does not have, whose gradients are not averaged",
    ):
        SGD(whole.parameters(), lr=0.1).step()


@pytest.mark.on_ranks(2, shared=True)
def test_a_step_without_the_last_micro_step_is_refused():
    for layout in ("mixed", "zero3"):
        model, plan, _ = sharded(layout, accumulation_steps=2)
        if layout == "mixed":
            plan = replace(plan, units=tuple(replace(unit, reduce_every_micro_step=True) for unit in plan.units))
        with micro_step(model, is_last=False, plan=plan):
            tiny_loss(model, tiny_batch(0)).backward()
        with pytest.raises(OSDPError, match=r"came while gradients of unit .* wait for the last micro-step"):
            SGD(model.parameters(), lr=0.1).step()


@pytest.mark.on_ranks(2, shared=True)
def test_rank_may_skip_a_micro_step_that_sends_nothing():
    model, plan, _ = sharded("replicate", way="reduce_every_micro_step")
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        for last in (False, True):
            if last or dist.get_rank() == 0:
                with micro_step(model, is_last=last, plan=plan):
                    tiny_loss(model, tiny_batch(last)).backward()
        optimizer.step()
    alone = whole_model()
    (0.5 * tiny_loss(alone, tiny_batch(0)) + tiny_loss(alone, tiny_batch(1))).backward()
    for (name, found), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert expected.grad is None or torch.allclose(found.grad.full_tensor(), expected.grad, rtol=0, atol=1e-12), (
            name
        )


@pytest.mark.on_ranks(2, shared=True)
def test_closures_do_not_go_with_states_on_the_host():
    model, plan, units = sharded(way="states_on_host")
    optimizer = SGD(model.parameters(), lr=0.1)
    step_on_shards(optimizer, model)
    bind_optimizer(model, plan, units, [optimizer])
    with pytest.raises(OSDPError, match=r"SGD\.step\(closure\) would step shards by gradients"):
        optimizer.step(closure=lambda: None)
