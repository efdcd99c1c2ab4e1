"""An optimizer's step on shards: as on plain tensors, in its own groups and states; what the planner is told of it."""

from __future__ import annotations

import gc
import weakref
from copy import deepcopy
from importlib import import_module
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_osdp.errors import OSDPError
from hf_osdp.planner.training_job import OptimizerStep
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer import spec_of_optimizer
from hf_osdp.sharding.optimizer_steps import step_by_device
from tests.helpers.elsewhere import There

ROWS = [(3, 4), (2,), (0, 4), (5, 2)]
"""Shapes of a rank's parameters, of which the third is an empty shard."""
OPTIONS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    *((torch.optim.AdamW, {option: True}) for option in ("amsgrad", "maximize", "fused")),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
]


@pytest.fixture
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)


def sharded(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    shape = (2 * len(value), *value.shape[1:])
    return DTensor.from_local(value, mesh, [Shard(0)], run_check=False, shape=shape, stride=value.stride())


def twins(mesh: DeviceMesh) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return a rank's shards as DTensors, the last one whole and plain, and plain tensors of the same values."""
    dice = torch.Generator().manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape, generator=dice)) for shape in ROWS]
    parameters = [nn.Parameter(sharded(p.detach().clone(), mesh)) for p in plain[:-1]]
    return [*parameters, nn.Parameter(plain[-1].detach().clone())], plain


def trained_by(
    cls: type[torch.optim.Optimizer], mesh: DeviceMesh, count: int = len(ROWS), **options: Any
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[torch.optim.Optimizer]]:
    """Return twins with an optimizer of the first ones each, which steps those with DTensors by device."""
    parameters, plain = twins(mesh)
    optimizers = [cls(of[:count], **deepcopy(options)) for of in (parameters, plain)]
    step_by_device(optimizers[0])
    return parameters, plain, optimizers


def set_gradients(number: int, *of: list[nn.Parameter]) -> None:
    for parameters in of:
        dice = torch.Generator().manual_seed(number)
        for parameter in parameters:
            gradient = torch.randn(local(parameter).shape, generator=dice)
            is_shard = isinstance(parameter, DTensor)
            parameter.grad = sharded(gradient, parameter.device_mesh) if is_shard else gradient


def assert_equal(
    parameters: list[nn.Parameter], plain: list[nn.Parameter], *optimizers: torch.optim.Optimizer
) -> None:
    """Parameters and states are equal, bit for bit, and those of shards are DTensors like their parameters."""
    for one, other in zip(parameters, plain, strict=True):
        assert torch.equal(local(one), other)
        found, wanted = (optimizer.state[p] for optimizer, p in zip(optimizers, (one, other), strict=True))
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert torch.equal(local(found[key]), value), key
            if value.shape == other.shape and value.dim():
                assert found[key].shape == one.shape
                assert getattr(found[key], "placements", None) == getattr(one, "placements", None)


def record(optimizer: torch.optim.Optimizer) -> list[list[list[type]]]:
    """Return a list to which each step appends the types that it has stepped, by group."""
    seen: list[Any] = []
    optimizer.register_step_post_hook(
        lambda _, args, kwargs: seen.append([[type(p) for p in group["params"]] for group in args[0].param_groups])
    )
    return seen


@pytest.mark.parametrize(("cls", "options"), OPTIONS, ids=lambda value: getattr(value, "__name__", None))
def test_step_on_shards_is_that_on_plain_tensors_and_keeps_dtensor_states(cls, options, mesh):
    parameters, plain, optimizers = trained_by(cls, mesh, 1, **{"lr": 0.1, **options})
    for optimizer, of in zip(optimizers, (parameters, plain), strict=True):
        optimizer.add_param_group({"params": of[1:], "weight_decay": 0.1})
    seen = record(optimizers[0])
    groups = [(id(group), [id(p) for p in group["params"]]) for group in optimizers[0].param_groups]
    held: dict[int, dict[str, Any]] = {}
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
    for number in range(4):
        set_gradients(number, parameters, plain)
        if number == 2:  # a parameter without gradient is left alone
            parameters[1].grad = plain[1].grad = None
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        assert_equal(parameters, plain, *optimizers)
        states = {id(p): dict(optimizers[0].state[p]) for p in parameters}
        assert not held or all(states[key][k] is v for key, of in held.items() for k, v in of.items() if v.dim())
        held = states
    assert [(id(group), [id(p) for p in group["params"]]) for group in optimizers[0].param_groups] == groups
    assert all(kind is torch.Tensor for step in seen for group in step[:-1] for kind in group)
    assert set(optimizers[0].state) == set(parameters)


def test_groups_and_states_that_change_between_steps_are_used(mesh):
    parameters, plain, optimizers = trained_by(torch.optim.AdamW, mesh, 2, lr=0.1, fused=True)
    for number, change in enumerate([
        lambda o, of: None,
        lambda o, of: o.add_param_group({"params": of[2:], "lr": 0.01}),
        lambda o, of: o.load_state_dict(o.state_dict()),
        lambda o, of: o.param_groups[0].update(lr=0.5, maximize=True),
        lambda o, of: [value.zero_() for p in of for key, value in o.state[p].items() if key != "step"],
        lambda o, of: o.state.pop(of[0]),
        lambda o, of: [o.state[p].update(exp_avg=o.state[p]["exp_avg"].clone()) for p in of],
        lambda o, of: of[1].requires_grad_(False),
    ]):  # fmt: skip
        for optimizer, of in zip(optimizers, (parameters, plain), strict=True):
            change(optimizer, of)
        set_gradients(number, parameters, plain)
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(parameters[: 2 if not number else None], plain[: 2 if not number else None], *optimizers)


def test_states_of_another_layout_are_refused_and_gradients_brought_to_their_parameters(mesh):
    parameters, plain, (optimizer, _) = trained_by(torch.optim.AdamW, mesh, 1, fused=True)
    weight = nn.Parameter(torch.ones(6, 4))
    weight.grad = torch.ones(6, 4)
    (whole := torch.optim.AdamW([weight])).step()
    optimizer.load_state_dict(whole.state_dict())
    set_gradients(0, parameters)
    with pytest.raises(OSDPError, match=r"exp_avg has shape \(6, 4\) for a shard of shape \(3, 4\)"):
        optimizer.step()
    assert torch.equal(local(parameters[0]), plain[0])
    parameters, plain, (optimizer, _) = trained_by(torch.optim.SGD, mesh, 1, lr=1.0)
    gradient = torch.randn(6, 4)
    parameters[0].grad = DTensor.from_local(gradient, mesh, [Replicate()], run_check=False)
    optimizer.step()
    assert torch.equal(local(parameters[0]), plain[0] - gradient[:3])


def test_step_that_raises_leaves_groups_states_and_no_gradient(mesh, monkeypatch):
    parameters, plain, optimizers = trained_by(torch.optim.AdamW, mesh, lr=0.1)
    for number in range(2):
        set_gradients(number, parameters, plain)
        groups, states = list(optimizers[0].param_groups), {p: dict(optimizers[0].state[p]) for p in parameters}
        with monkeypatch.context() as broken, pytest.raises(torch.OutOfMemoryError):
            broken.setattr(import_module("torch.optim.adam"), "adam", Mock(side_effect=torch.OutOfMemoryError))
            optimizers[0].step()
        assert all(a is b for a, b in zip(optimizers[0].param_groups, groups, strict=True))
        assert number == 0 or {p: dict(optimizers[0].state[p]) for p in parameters} == states
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(parameters, plain, *optimizers)
    gradients = [weakref.ref(local(p.grad)) for p in parameters]
    gc.disable()
    try:
        optimizers[0].zero_grad()
        assert not any(gradient() is not None for gradient in gradients), "without the garbage collector"
    finally:
        gc.enable()


@pytest.mark.parametrize("option", ["closure", "differentiable"])
def test_steps_that_compute_gradients_or_have_them_step_the_parameters_themselves(option, mesh):
    parameters, plain, optimizers = trained_by(torch.optim.SGD, mesh, 2, lr=0.1, momentum=0.9)
    seen = record(optimizers[0])
    for number in range(2):
        if option == "closure":
            for optimizer, of in zip(optimizers, (parameters, plain), strict=True):
                assert optimizer.step(lambda of=of, n=number: set_gradients(n, of) or n) == number
        else:
            optimizers[0].param_groups[0]["differentiable"] = True
            set_gradients(number, parameters, plain)
            with torch.no_grad():
                for optimizer in optimizers:
                    optimizer.step()
    assert seen == [[[DTensor] * 2]] * 2
    assert_equal(parameters[:2], plain[:2], *optimizers)


@pytest.mark.parametrize("overflows", [False, True])
def test_fused_step_gets_scale_and_overflow_from_the_optimizer(overflows, mesh):
    parameters, plain, optimizers = trained_by(torch.optim.AdamW, mesh, lr=0.1, fused=True)
    set_gradients(0, parameters, plain)
    for optimizer in optimizers:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(overflows))
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    assert_equal(parameters, plain, *optimizers)


def groups_stepped(optimizer: torch.optim.Optimizer) -> list[tuple]:
    """Sizes and options of groups in a step, of the stand-in that torch passes to hooks in the place of `self`."""
    seen: list[dict] = []
    optimizer.register_step_post_hook(lambda _, args, kwargs: seen.extend(dict(g) for g in args[0].param_groups))
    optimizer.step()
    return [(len(group["params"]), group["lr"], group["foreach"], group["fused"]) for group in seen]


def test_step_by_device_makes_a_group_for_each_device():
    on_cpu = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    mixed = [nn.Parameter(torch.ones(2).as_subclass(There) if number % 2 else torch.ones(2)) for number in range(4)]
    for parameter in (*on_cpu, *mixed):
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([{"params": mixed[:3], "lr": 1e-2}, {"params": mixed[3:], "lr": 1e-3}], foreach=True)
    step_by_device(optimizer, mixed[::2])
    assert groups_stepped(optimizer) == [(2, 1e-2, False, True), (1, 1e-2, True, None), (1, 1e-3, True, None)]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1] and len(optimizer.state) == 4
    on_one_device = torch.optim.SGD(on_cpu, lr=0.1, foreach=True)
    step_by_device(on_one_device)
    assert groups_stepped(on_one_device) == [(4, 0.1, True, None)]


# ---- what the planner is told


@pytest.mark.parametrize(
    ("cls", "options", "states"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, 3), (torch.optim.SGD, {"lr": 0.1}, 0), (torch.optim.Adagrad, {}, 1),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, 3),
    ],
)  # fmt: skip
def test_spec_of_optimizer_counts_the_states_that_torch_keeps(cls, options, states):
    optimizer = cls([parameter := nn.Parameter(torch.ones(7))], **options)
    parameter.grad = torch.ones(7)
    optimizer.step()
    kept = sum(1 for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.numel() == 7)
    assert spec_of_optimizer(optimizer, device_type="cpu").states == states == kept


FOR_LOOP, FOREACH, FUSED = OptimizerStep.FOR_LOOP, OptimizerStep.FOREACH, OptimizerStep.FUSED


@pytest.mark.parametrize(
    ("options", "device_type", "step"),
    [
        ({}, "cpu", FOR_LOOP), ({}, "cuda", FOREACH), ({"fused": True}, "cpu", FUSED),
        ({"foreach": True}, "cpu", FOREACH), ({"foreach": False}, "cuda", FOR_LOOP),
    ],
)  # fmt: skip
def test_spec_of_optimizer_says_how_the_step_runs(options, device_type, step):
    found = spec_of_optimizer(torch.optim.AdamW([nn.Parameter(torch.ones(1))], **options), device_type=device_type)
    assert found.step is step
    if not options:
        assert spec_of_optimizer(None, device_type=device_type) == found
