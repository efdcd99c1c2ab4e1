"""Norm, clipping and loss scaling of gradients on several meshes, where ranks run in turn in one process, and on two
devices.
"""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_osdp.sharding import gradients as clip
from hf_osdp.sharding.gradients import OSDPGradScaler, clip_grad_norm_, total_norm
from tests.helpers.elsewhere import ELSEWHERE, There, two_devices


def whole_gradients() -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    shapes = {"shard": (3, 5), "shard 2": (5, 2), "replicate": (2, 3), "plain": (7,)}
    return {name: torch.randn(shape, generator=dice, dtype=torch.float64) for name, shape in shapes.items()}


def of_rank(rank: int, size: int, whole: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What one of `size` ranks holds of each gradient, as FSDP2 cuts it: with 3 rows the last of 4 ranks has none."""
    held = [whole["plain"].clone()]
    for name, shape in {"shard": (size,), "shard 2": (size // 2, 2), "replicate": (size, 1)}.items():
        mesh = DeviceMesh("cpu", torch.arange(size).reshape(shape), _init_backend=False, _rank=0)
        chunks = whole[name].chunk(shape[-1])
        place = rank % shape[-1]
        local = chunks[place].clone() if place < len(chunks) else whole[name][:0].clone()
        held.append(DTensor.from_local(local, mesh, [*[Replicate()] * (len(shape) - 1), Shard(0)], run_check=False))
    return held


@pytest.fixture(params=[2, 4], ids="{} ranks".format)
def size(request) -> int:
    return request.param


@pytest.fixture
def world(monkeypatch, size):
    """`world(fn)` gives what `fn(rank)` returns on each rank in turn, with one all-reduce over all."""

    def run(fn):
        told: list[tuple[torch.Tensor, object]] = []
        monkeypatch.setattr(clip, "world_size", lambda: size)
        monkeypatch.setattr(clip.dist, "all_reduce", lambda value, op, group=None: told.append((value.clone(), op)))
        for rank in range(size):
            fn(rank)
        given, ops = zip(*told, strict=True)
        assert len(given) == size and len(set(ops)) == 1, "every rank asks for the same, once"
        reduced = torch.stack(given).amax(0) if ops[0] is torch.distributed.ReduceOp.MAX else torch.stack(given).sum(0)
        monkeypatch.setattr(clip.dist, "all_reduce", lambda value, op, group=None: value.copy_(reduced))
        return [fn(rank) for rank in range(size)]

    return run


def clipped(held: list[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> tuple[float, list[torch.Tensor]]:
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in held]
    for parameter, grad in zip(parameters, held, strict=True):
        parameter.grad = grad
    norm = clip_grad_norm_(iter([*parameters, torch.nn.Parameter(torch.zeros(3))]), max_norm, norm_type)
    return norm.item(), [clip.local(grad) for grad in held]


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_clip_grad_norm_scales_shards_as_torch_scales_whole_gradients(world, size, max_norm, norm_type):
    whole = whole_gradients()
    alone = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in whole.values()]
    for parameter, grad in zip(alone, whole.values(), strict=True):
        parameter.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(alone, max_norm, norm_type).item()
    after = {name: parameter.grad for name, parameter in zip(whole, alone, strict=True)}
    found = world(lambda rank: clipped(of_rank(rank, size, whole), max_norm, norm_type))
    for rank, (norm, locals_) in enumerate(found):
        assert norm == pytest.approx(expected, rel=1e-14)
        for mine, theirs in zip(locals_, map(clip.local, of_rank(rank, size, after)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=0)


def test_clip_takes_single_parameters_and_total_norm_known_norms():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert clip_grad_norm_(parameter, 10.0).item() == 5.0 and parameter.grad.tolist() == [3.0, 4.0]
    assert clip_grad_norm_(parameter, 1.0).item() == 5.0
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-6)
    for norm_type in (0.0, -1.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match=r"norm_type=.* must be positive; use 1, 2 or inf"):
            total_norm([torch.ones(1)], norm_type)


def test_total_norm_is_sent_where_collectives_run(monkeypatch):
    """Gradients may be on the host, where NCCL cannot reach. One process sends nothing."""
    sent = []
    with monkeypatch.context() as alone:
        alone.setattr(clip.dist, "all_reduce", None)
        alone.setattr(clip, "collective_device", None)
        assert total_norm([torch.tensor([3.0]), torch.tensor([[-4.0]])]).item() == 5.0
    monkeypatch.setattr(clip, "world_size", lambda: 2)
    monkeypatch.setattr(clip, "collective_device", lambda: torch.device("meta"))
    monkeypatch.setattr(clip.dist, "all_reduce", lambda value, op, group=None: sent.append(value.device.type))
    assert total_norm([torch.ones(3)]).device.type == "meta" and sent == ["meta"]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([], torch.float32),
        ([torch.bfloat16], torch.float32),
        ([torch.float16, torch.bfloat16], torch.float32),
        ([torch.bfloat16, torch.float64], torch.float64),
    ],
)
@pytest.mark.parametrize("value", [1.0, 2.0**-14])  # the second's square is 0 in float16
def test_total_norm_has_widest_dtype_of_at_least_float32(dtypes, expected, value):
    norm = total_norm([torch.full((4096,), value, dtype=dtype) for dtype in dtypes])
    assert norm.dtype == expected
    assert norm.item() == pytest.approx(value * math.sqrt(4096 * len(dtypes)), rel=1e-6)


def test_clip_takes_one_operator_for_each_layout_and_dtype(monkeypatch):
    """Norms by layout and dtype, and torch's of the whole; scaling by dtype alone."""
    grads = [grad for _ in range(5) for grad in of_rank(0, 2, whole_gradients())]  # sharded over 2, 2 of 4, or whole
    grads += [torch.full((3,), 2.0, dtype=torch.bfloat16) for _ in range(5)]
    squares = sum(clip.local(grad).double().square().sum().item() * clip.shard_size(grad) for grad in grads)
    operators = {name: Mock(wraps=getattr(torch, name)) for name in ("_foreach_norm", "_foreach_mul_")}
    for name, counted in operators.items():
        monkeypatch.setattr(torch, name, counted)
    norm, after = clipped(grads, 1.0)
    assert [counted.call_count for counted in operators.values()] == [4, 2]
    assert norm == pytest.approx(math.sqrt(squares)), "one process: nothing is held twice"
    assert after[-1].dtype is torch.bfloat16 and after[-1].tolist() == pytest.approx([2 / norm] * 3, rel=1e-2)


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
