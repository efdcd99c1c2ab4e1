"""Work between steps and reads of weights that are refused, and what is whole for them. What equals one process is in
`cases/steps.py` and `cases/reads.py`.
"""

from __future__ import annotations

import copy
import gc
import re
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import hf_osdp
from hf_osdp.distributed import process_group
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, UnreducedGradientError
from hf_osdp.modeling.units import find_units
from hf_osdp.sharding import gradient_checks
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.between_steps import AcrossLayouts
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step
from tests.helpers.checkpointed import whole, worst
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import Case, loop_of

from .cases import reads
from .cases.steps import LLAMA, SGD, with_more


def sharded(layout: str = "mixed", model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = model or with_more()
    units = find_units(model)
    return apply_plan(model, plan_of(units, dist.get_world_size(), layout, **options), units, meshes=Meshes("cpu"))


def first_shard(model: nn.Module) -> Any:
    return next(p for name, p in model.named_parameters() if isinstance(p, DTensor) and name.endswith(".weight"))


@pytest.mark.on_ranks(2, shared=True)
def test_hooks_data_and_optimizers_that_shards_do_not_take_are_refused():
    model = sharded()
    tiny_loss(model, tiny_batch(0)).backward()
    SGD(model.parameters(), lr=0.1).step()
    shard = first_shard(model)
    shard.data = shard.data * 0.5
    with pytest.raises(OSDPError, match=r"\.data of its weight was assigned, which changes no shard"):
        tiny_loss(model, tiny_batch(0))
    model = sharded()
    first_shard(model).register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(OSDPError, match="register_hook on its weight has no effect on a shard"):
        tiny_loss(model, tiny_batch(0))
    model = with_more()
    handle = model.first.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(OSDPError, match="Parameter 'first' has a hook on its gradient"):
        sharded(model=model)
    handle.remove()
    early = SGD(model.parameters(), lr=0.1)
    sharded(model=model)
    tiny_loss(model, tiny_batch(0)).backward()
    with pytest.raises(OSDPError, match="SGD has parameters from before the plan was applied"):
        early.step()
    model.late = nn.Parameter(torch.ones(2))
    model.late.grad = torch.ones(2)
    with pytest.raises(
        OSDPError, match=r"SGD has a parameter of shape \(2,\) that the plan does not have, whose grad"
    ):
        SGD(model.parameters(), lr=0.1).step()


@pytest.mark.on_ranks(2, shared=True)
def test_model_to_frees_shards_and_their_gradients_are_refused():
    model = sharded()
    tiny_loss(model, tiny_batch(0)).backward()
    model.zero_grad()
    before = [weakref.ref(local(parameter)) for parameter in model.parameters() if isinstance(parameter, DTensor)]
    model.to(torch.float64)
    gc.collect()
    assert not any(shard() is not None for shard in before)
    shard = first_shard(model)
    tiny_loss(model, tiny_batch(0)).backward()
    with pytest.raises(UnreducedGradientError, match="got a gradient for a shard of its weight"):
        shard.sum().full_tensor().backward()


@pytest.mark.on_ranks(2, shared=True)
def test_a_step_without_the_last_micro_step_is_refused():
    for layout in ("mixed", "zero3"):
        model = sharded(layout, accumulation_steps=2, reduce_every_micro_step=layout == "mixed")
        with micro_step(model, is_last=False):
            tiny_loss(model, tiny_batch(0)).backward()
        with pytest.raises(OSDPError, match=r"came while gradients of unit .* wait for the last micro-step"):
            SGD(model.parameters(), lr=0.1).step()


@pytest.mark.on_ranks(2, shared=True)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_that_wait_may_not_be_scaled(monkeypatch, in_place, large):
    """Stock training would scale what earlier micro-steps left. A loop that scales by 1 changes nothing."""
    monkeypatch.setattr(gradient_checks, "_DENSE_ELEMENTS", 0 if large else 2**16)
    model = sharded("zero3", accumulation_steps=2, reduce_every_micro_step=False)
    for by in (1.0, 0.5):
        with micro_step(model, is_last=False):
            tiny_loss(model, tiny_batch(0)).backward()
        fits = by == 1.0 and not (in_place and large)
        error = "single memory location" if in_place and large else "was changed between micro-steps"
        with nullcontext() if fits else pytest.raises((OSDPError, RuntimeError), match=error):
            for parameter in (p for p in model.parameters() if p.grad is not None):
                parameter.grad = parameter.grad.mul_(by) if in_place else parameter.grad.detach() * by
            with micro_step(model, is_last=True):
                tiny_loss(model, tiny_batch(0)).backward()


@pytest.mark.on_ranks(2, shared=True)
def test_rank_may_skip_a_micro_step_that_sends_nothing():
    model = sharded("replicate")
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        for last in (False, True):
            if last or dist.get_rank() == 0:
                with micro_step(model, is_last=last):
                    tiny_loss(model, tiny_batch(last)).backward()
        optimizer.step()
    alone = with_more()
    (0.5 * tiny_loss(alone, tiny_batch(0)) + tiny_loss(alone, tiny_batch(1))).backward()
    for (name, found), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert expected.grad is None or torch.allclose(whole(found.grad), expected.grad, rtol=0, atol=1e-12), name


# ---- weights


@pytest.mark.on_ranks(2, shared=True)
def test_a_rank_that_gathers_alone_is_refused(monkeypatch):
    """By a callback's work on weights, or by a number that it reads from shards."""
    monkeypatch.setattr(process_group, "ALL_CALL_S", 0.5)
    model, alone = sharded("zero3", LLAMA()), LLAMA()
    weight = model.lm_head.weight.detach()
    said = "{} gathers a sharded model and must be called on every rank, but ranks"
    if dist.get_rank() == 0:
        with AcrossLayouts("Work in on_log"), pytest.raises(OSDPError, match=said.format("Work in on_log")):
            alone.lm_head.weight.data.add_(weight)
        with pytest.raises(OSDPError, match=said.format(r"A number read from shards .*\(item, float, bool\)")):
            weight.norm().item()
    dist.barrier()


@pytest.mark.on_ranks(2, shared=True)
def test_full_parameters_restore_shards_after_an_error_and_refuse_calls():
    model = sharded("mixed", LLAMA())
    before, kinds = copy.deepcopy(full_state_dict(model)), list(map(type, model.parameters()))
    for call in (
        lambda: tiny_loss(model, tiny_batch(0)),
        lambda: model.lm_head(torch.ones(1, 64, dtype=torch.float64)),
    ):
        with pytest.raises(OSDPError, match=r"was called within hf_osdp\.full_parameters"):
            with hf_osdp.full_parameters(model):
                model.lm_head.weight.data.zero_()
                call()
        assert list(map(type, model.parameters())) == kinds and DTensor in kinds
    after = full_state_dict(model)
    assert dist.get_rank() or worst(after, before) == 0.0
    tiny_loss(model, tiny_batch(0)).backward()
    plain = LLAMA()
    with hf_osdp.full_parameters(plain):
        tiny_loss(plain, tiny_batch(0))


@pytest.mark.on_ranks(2, shared=True)
def test_sums_with_gradients_over_layouts_are_refused():
    model = sharded("mixed", LLAMA())
    with AcrossLayouts("Work on weights in on_step_end"), pytest.raises((RuntimeError, ValueError), match="got mixed"):
        (first_shard(model) * first_shard(model).full_tensor().detach()).sum()  # a gradient would flow past FSDP2


@pytest.mark.on_ranks(2, shared=True)
def test_parts_are_saved_whole_and_shards_are_not_replaced(tmp_path):
    for layout in ("mixed", "replicate"):
        model, alone, folder = sharded(layout, LLAMA()), LLAMA(), tmp_path / layout

        def saved(name: str, alone: nn.Module = alone, folder: Any = folder) -> float:
            found = type(alone.model).from_pretrained(folder / name, dtype=torch.float64)
            return worst(found.state_dict(), alone.model.state_dict())

        model.model.save_pretrained(folder / "together")
        dist.barrier()  # replicas need none, so that rank 0 alone may save too
        assert saved("together") == 0.0
        with hf_osdp.full_parameters(model, write_back=False):
            if dist.get_rank() == 0:  # whole weights need no other rank
                model.model.save_pretrained(folder / "alone")
        dist.barrier()
        assert saved("alone") == 0.0
        with hf_osdp.full_parameters(model.model.layers[1], write_back=False) as block:
            torch.save(block.state_dict(), folder / f"block{dist.get_rank()}.pt")
        block = torch.load(folder / f"block{dist.get_rank()}.pt", weights_only=True)
        assert worst(block, alone.model.layers[1].state_dict()) == 0.0
        with pytest.raises(OSDPError, match=re.escape("load_state_dict(assign=True) would replace")):
            model.load_state_dict(alone.state_dict(), assign=True)


@pytest.mark.on_ranks(2, shared=True)
def test_merged_adapters_are_saved_as_in_one_process(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra `trainers`")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    for inside in (False, True):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(peft.get_peft_model(tiny_model("llama", layers=2), config).double())
        sharded("mixed", models[0])
        with hf_osdp.full_parameters(models[0]) if inside else nullcontext():
            merged = [model.merge_and_unload() for model in models]
        folder = tmp_path / str(inside)
        merged[0].save_pretrained(folder)
        saved = type(merged[1]).from_pretrained(folder, dtype=torch.float64)
        assert worst(saved.state_dict(), merged[1].state_dict()) < 1e-12
        assert all(isinstance(local(p), torch.Tensor) for p in merged[0].parameters())


# ---- numbers and copies of shards


NUMBERS = {
    "norm": lambda t: t.norm().item(), "sum": lambda t: float(t.sum()), "mean": lambda t: t.mean().item(),
    "largest": lambda t: t.abs().max().item(), "least": lambda t: t.aminmax()[0].item(),
    "any NaN": lambda t: bool(torch.isnan(t).any()), "all finite": lambda t: bool(torch.isfinite(t).all()),
    "none zero": lambda t: torch.count_nonzero(t).item(), "positive": lambda t: (t > 0).sum().item(),
    "norms": lambda t: torch.stack(torch._foreach_norm([t, t])).norm().cpu().item(),
}  # fmt: skip


@pytest.mark.on_ranks(2, shared=True)
def test_numbers_of_shards_are_those_of_all_ranks():
    model = sharded("mixed", LLAMA())
    tiny_loss(model, tiny_batch(0)).backward()
    last = first_shard(model).grad
    if dist.get_rank() == dist.get_world_size() - 1:
        last.to_local()[-1].fill_(float("nan"))
    for parameter in model.parameters():
        for tensor in filter(torch.is_tensor, (parameter.detach(), parameter.grad)):
            for name, number in NUMBERS.items():
                assert number(tensor) == pytest.approx(number(whole(tensor)), rel=1e-12, nan_ok=True), name
    assert NUMBERS["any NaN"](last) and not NUMBERS["all finite"](last)


@pytest.mark.on_ranks(2, shared=True)
def test_copies_of_shards_are_not_written(tmp_path):
    model = sharded("mixed", LLAMA())
    optimizer = torch.optim.AdamW(model.parameters())
    tiny_loss(model, tiny_batch(0)).backward()
    optimizer.step()
    name = next(name for name, p in model.named_parameters() if p is first_shard(model))
    one = {
        "cpu": {n: v.detach().cpu() for n, v in model.state_dict().items()},
        "clone": {n: v.clone() for n, v in model.state_dict().items()},
        "data": {n: p.data for n, p in model.named_parameters()},
        "part": model.state_dict()[name],
        "states": optimizer.state_dict(),
    }
    refused = "^A file, a pickle or a copy would get one rank's shard of a tensor of shape"
    for given in one.values():
        with pytest.raises(OSDPError, match=refused):
            torch.save(given, tmp_path / f"{dist.get_rank()}.pt")
    with pytest.raises(OSDPError, match=refused):
        model.save_pretrained(tmp_path, state_dict=one["clone"])
    torch.save({n: v for n, v in model.state_dict().items() if not isinstance(v, DTensor)}, tmp_path / "plain.pt")
    shard = first_shard(model).detach()
    torch.save(shard.redistribute(placements=[Replicate()] * shard.device_mesh.ndim), tmp_path / "whole.pt")


# ---- reads of weights


@pytest.mark.on_ranks(2, shared=True)
def test_second_backward_through_a_read_weight_is_refused():
    loop, _ = loop_of(Case(model=reads.reading("llama", "loss reads head"), layout="zero3"))
    loop.loss(0).backward(retain_graph=True)  # nothing was read
    with pytest.raises(OSDPError, match="retain_graph=True lets backward run again"):
        reads.loss_reads_head(loop.model, tiny_batch(0)).backward(retain_graph=True)
