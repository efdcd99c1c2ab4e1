"""Norm, clipping, loss scaling and optimizer steps where parameters lie on two devices."""

from __future__ import annotations

import math

import pytest
import torch

from hf_osdp.sharding.gradients import OSDPGradScaler, _by_layout, _main_device, clip_grad_norm_
from hf_osdp.sharding.optimizer_steps import step_by_device
from tests.helpers.elsewhere import ELSEWHERE, There, two_devices

SHAPES = [(3, 2), (4,), (2, 2), (5,)]


def parameters_of(*, mixed: bool, dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    """The same numbers, in `mixed` every other one elsewhere."""
    dice = torch.Generator().manual_seed(0)
    made = []
    for index, shape in enumerate(SHAPES):
        value, gradient = (torch.randn(shape, generator=dice, dtype=dtype) for _ in range(2))
        there = mixed and index % 2 == 1
        made.append(torch.nn.Parameter(value.as_subclass(There) if there else value))
        made[-1].grad = gradient.as_subclass(There) if there else gradient
    return made


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clip_norm_is_that_of_both_devices(norm_type, monkeypatch):
    plain, mixed = parameters_of(mixed=False), parameters_of(mixed=True)
    assert _main_device(_by_layout(p.grad for p in mixed)) == ELSEWHERE, "the norm is where most of a model is"
    cpu = torch.device("cpu")  # the other is not real
    monkeypatch.setattr("hf_osdp.sharding.gradients._main_device", lambda grads: cpu)
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, norm_type)
    with two_devices():
        norm = clip_grad_norm_(mixed, 0.5, norm_type)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-14)
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-14) for a, b in zip(plain, mixed, strict=True))


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("overflows", [None, 0, 1])
def test_scaler_steps_or_skips_on_both_devices(unscales, overflows):
    """An optimizer that is said to unscale by itself, as with fused kernels, is given unscaled gradients."""
    plain, mixed = parameters_of(mixed=False), parameters_of(mixed=True)
    before = [parameter.detach().clone() for parameter in mixed]
    torch.optim.AdamW(plain, lr=1e-2).step()
    optimizer, scaler = torch.optim.AdamW(mixed, lr=1e-2, foreach=False), OSDPGradScaler(device="cpu", init_scale=8.0)
    optimizer._step_supports_amp_scaling = unscales
    with two_devices():
        scaler.scale(torch.ones(()))
        for index, parameter in enumerate(mixed):
            parameter.grad.mul_(8.0 if index != overflows else math.inf)
        scaler.step(optimizer)
        scaler.update()
    expected = plain if overflows is None else before
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in zip(expected, mixed, strict=True))
    assert scaler.get_scale() == (8.0 if overflows is None else 4.0)
    assert optimizer._step_supports_amp_scaling is unscales and not hasattr(optimizer, "found_inf")


def stepped(optimizer: torch.optim.Optimizer) -> list[tuple]:
    """Return what the stand-in has in its groups, which torch passes to hooks in the place of `self`."""
    seen: list[dict] = []
    optimizer.register_step_post_hook(lambda _, args, kwargs: seen.extend(dict(g) for g in args[0].param_groups))
    optimizer.step()
    return [(len(group["params"]), group["lr"], group["foreach"], group["fused"]) for group in seen]


def test_step_by_device_makes_a_group_for_each_device():
    mixed = parameters_of(mixed=True)
    optimizer = torch.optim.AdamW([{"params": mixed[:3], "lr": 1e-2}, {"params": mixed[3:], "lr": 1e-3}], foreach=True)
    step_by_device(optimizer, mixed[::2])
    assert stepped(optimizer) == [(2, 1e-2, False, True), (1, 1e-2, True, None), (1, 1e-3, True, None)]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1] and len(optimizer.state) == 4
    on_one_device = torch.optim.SGD(parameters_of(mixed=False), lr=0.1, foreach=True)
    step_by_device(on_one_device)
    assert stepped(on_one_device) == [(4, 0.1, True, None)]
