"""Norm, clipping and loss scaling of gradients on several meshes and on two devices."""

from __future__ import annotations

import math
from itertools import product
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.sharding import gradients as clip
from hf_osdp.sharding.gradients import OSDPGradScaler, clip_grad_norm_, total_norm
from tests.helpers.checkpointed import whole
from tests.helpers.elsewhere import ELSEWHERE, There, two_devices

SIZES = {(3, 5): 4, (5, 2): 2, (2, 3): 1, (7,): 0}
"""Shapes of gradients, each with the ranks that shard it; 0 for a plain tensor. Of 3 rows the last of 4 has none."""


def parameters_with_gradients(meshes: Meshes | None) -> list[torch.nn.Parameter]:
    dice, made = torch.Generator().manual_seed(0), []
    for shape, ranks in SIZES.items():
        gradient = torch.randn(shape, generator=dice, dtype=torch.float64)
        if meshes is not None and ranks:
            placements = [Replicate()] * (ranks < 4) + [Shard(0)]
            gradient = distribute_tensor(gradient, meshes.mesh(ranks), placements, src_data_rank=None)
        made.append(torch.nn.Parameter(torch.zeros_like(gradient)))
        made[-1].grad = gradient
    return made


@pytest.mark.on_ranks(4, shared=True)
def test_clip_scales_shards_as_torch_scales_whole_gradients_by_one_operator_for_each_layout(monkeypatch):
    """Norms by layout, and torch's of the whole."""
    meshes = Meshes("cpu")
    for norm_type, max_norm in product((1.0, 2.0, 3.0, math.inf), (0.1, 100.0)):
        wanted, found = parameters_with_gradients(None), parameters_with_gradients(meshes)
        norm = torch.nn.utils.clip_grad_norm_(wanted, max_norm, norm_type).item()
        operators = {name: Mock(wraps=getattr(torch, name)) for name in ("_foreach_norm", "_foreach_mul_")}
        with monkeypatch.context() as counting:
            for name, counted in operators.items():
                counting.setattr(torch, name, counted)
            without = torch.nn.Parameter(torch.zeros(3))
            assert clip_grad_norm_(iter([*found, without]), max_norm, norm_type).item() == pytest.approx(norm, 1e-14)
        assert [counted.call_count for counted in operators.values()] == [4 - (dist.get_rank() == 3), 1]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-14, atol=0)


def test_clip_takes_single_parameters_and_refuses_other_norms():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert clip_grad_norm_(parameter, 1.0).item() == 5.0
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-6)
    for norm_type in (0.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match=r"norm_type=.* must be positive; use 1, 2 or inf"):
            total_norm([torch.ones(1)], norm_type)


def test_total_norm_is_sent_where_collectives_run(monkeypatch):
    """Gradients may be on the host, where NCCL cannot reach."""
    sent = []
    monkeypatch.setattr(clip, "world_size", lambda: 2)
    monkeypatch.setattr(clip, "collective_device", lambda: torch.device("meta"))
    monkeypatch.setattr(clip.dist, "all_reduce", lambda value, op, group=None: sent.append(value.device.type))
    assert total_norm([torch.ones(3)]).device.type == "meta" and sent == ["meta"]


@pytest.mark.parametrize("dtypes", [[], ["bfloat16"], ["float16", "bfloat16"], ["bfloat16", "float64"]])
@pytest.mark.parametrize("value", [1.0, 2.0**-14])  # the second's square is 0 in float16
def test_total_norm_has_widest_dtype_of_at_least_float32(dtypes, value):
    norm = total_norm([torch.full((4096,), value, dtype=getattr(torch, dtype)) for dtype in dtypes])
    assert norm.dtype == (torch.float64 if "float64" in dtypes else torch.float32)
    assert norm.item() == pytest.approx(value * math.sqrt(4096 * len(dtypes)), rel=1e-6)


# ---- parameters on two devices


def parameters_of(*, mixed: bool) -> list[torch.nn.Parameter]:
    """The same numbers, in `mixed` every other one elsewhere."""
    dice = torch.Generator().manual_seed(0)
    made = []
    for index, shape in enumerate([(3, 2), (4,), (2, 2), (5,)]):
        value, gradient = (torch.randn(shape, generator=dice, dtype=torch.float64) for _ in range(2))
        there = mixed and index % 2 == 1
        made.append(torch.nn.Parameter(value.as_subclass(There) if there else value))
        made[-1].grad = gradient.as_subclass(There) if there else gradient
    return made


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clip_norm_is_that_of_both_devices(norm_type, monkeypatch):
    plain, mixed = parameters_of(mixed=False), parameters_of(mixed=True)
    assert clip._main_device(clip._by_layout(p.grad for p in mixed)) == ELSEWHERE, (
        "the norm is where most of a model is"
    )
    cpu = torch.device("cpu")  # the other is not real
    monkeypatch.setattr(clip, "_main_device", lambda grads: cpu)
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
