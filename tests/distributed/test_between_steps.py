"""Work between steps and reads of weights that are refused, and what is whole for them. What equals one process is in
`cases/steps.py` and `cases/reads.py`.
"""

from __future__ import annotations

import copy
import gc
import re
import weakref
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

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
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.between_steps import AcrossLayouts
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step
from hf_osdp.sharding.unit_order import UnitOrder
from tests.helpers.checkpointed import whole, worst
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import Case, alone, assert_trained_alike, loop_of, train

from .cases import reads
from .cases.steps import LLAMA, SGD, with_more


def sharded(layout: str = "mixed", model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Plan]:
    model = model or with_more()
    units = find_units(model)
    plan = plan_of(units, dist.get_world_size(), layout, **options)
    return apply_plan(model, plan, units, meshes=Meshes("cpu")), plan


def first_shard(model: nn.Module) -> Any:
    return next(p for name, p in model.named_parameters() if isinstance(p, DTensor) and name.endswith(".weight"))


@pytest.mark.on_ranks(2, shared=True)
def test_hooks_and_data_that_shards_do_not_take_are_refused():
    model, _ = sharded()
    optimizer = SGD(model.parameters(), lr=0.1)
    tiny_loss(model, tiny_batch(0)).backward()
    optimizer.step()
    shard = first_shard(model)
    shard.data = shard.data * 0.5
    with pytest.raises(OSDPError, match=r"\.data of its weight was assigned, which changes no shard"):
        tiny_loss(model, tiny_batch(0))
    model, _ = sharded()
    first_shard(model).register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(OSDPError, match="register_hook on its weight has no effect on a shard"):
        tiny_loss(model, tiny_batch(0))
    whole = with_more()
    whole.first.register_hook(lambda gradient: gradient * 0.5)
    units = find_units(whole)
    with pytest.raises(OSDPError, match="Parameter 'first' has a hook on its gradient"):
        apply_plan(whole, plan_of(units, 2, "mixed"), units, meshes=Meshes("cpu"))


@pytest.mark.on_ranks(2, shared=True)
def test_model_to_frees_shards_and_their_gradients_are_refused():
    model, _ = sharded()
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
def test_optimizers_of_other_parameters_are_refused():
    whole = with_more()
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
        model, plan = sharded(layout, accumulation_steps=2, reduce_every_micro_step=layout == "mixed")
        with micro_step(model, is_last=False, plan=plan):
            tiny_loss(model, tiny_batch(0)).backward()
        with pytest.raises(OSDPError, match=r"came while gradients of unit .* wait for the last micro-step"):
            SGD(model.parameters(), lr=0.1).step()


@pytest.mark.on_ranks(2, shared=True)
def test_rank_may_skip_a_micro_step_that_sends_nothing():
    model, plan = sharded("replicate")
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        for last in (False, True):
            if last or dist.get_rank() == 0:
                with micro_step(model, is_last=last, plan=plan):
                    tiny_loss(model, tiny_batch(last)).backward()
        optimizer.step()
    alone = with_more()
    (0.5 * tiny_loss(alone, tiny_batch(0)) + tiny_loss(alone, tiny_batch(1))).backward()
    for (name, found), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert expected.grad is None or torch.allclose(whole(found.grad), expected.grad, rtol=0, atol=1e-12), name


# ---- weights


@pytest.mark.on_ranks(2, shared=True)
def test_a_rank_that_gathers_alone_is_refused():
    (model, _), alone = sharded("zero3", LLAMA()), LLAMA()
    weight, process_group.ALL_CALL_S = model.lm_head.weight.detach(), 1.0
    if dist.get_rank() == 0:
        said = r"Work on weights in on_log gathers a sharded model and must be called on every rank, but ranks \[0\]"
        with AcrossLayouts("Work on weights in on_log"), pytest.raises(OSDPError, match=said):
            alone.lm_head.weight.data.add_(weight)
    dist.barrier()
    process_group.ALL_CALL_S = 300.0


@pytest.mark.on_ranks(2, shared=True)
def test_full_parameters_restore_shards_after_an_error_and_refuse_calls():
    model, _ = sharded("mixed", LLAMA())
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
    model, _ = sharded("mixed", LLAMA())
    with AcrossLayouts("Work on weights in on_step_end"), pytest.raises((RuntimeError, ValueError), match="got mixed"):
        (first_shard(model) * first_shard(model).full_tensor().detach()).sum()  # a gradient would flow past FSDP2


@pytest.mark.on_ranks(2, shared=True)
def test_parts_are_saved_whole_and_shards_are_not_replaced(tmp_path):
    for layout in ("mixed", "replicate"):
        (model, _), alone, folder = sharded(layout, LLAMA()), LLAMA(), tmp_path / layout

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
    model, _ = sharded("mixed", LLAMA())
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
def test_a_number_of_shards_that_one_rank_reads_alone_is_an_error(monkeypatch):
    monkeypatch.setattr(process_group, "ALL_CALL_S", 0.2)
    model, _ = sharded()
    if dist.get_rank() == 0:
        with pytest.raises(OSDPError, match=r"A number read from shards of weights \(item, float, bool\) gathers"):
            first_shard(model).norm().item()
    dist.barrier()


@pytest.mark.on_ranks(2, shared=True)
def test_copies_of_shards_are_not_written(tmp_path):
    model, _ = sharded("mixed", LLAMA())
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


def warm(model: nn.Module) -> nn.Module:
    """Have forward read a weight of a unit that an earlier call has left gathered, before the unit runs."""

    def logits(self: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            reads.hidden_of(self, input_ids)
        scale = reads.weight_of(reads.matrix(self)).mean()
        return self.lm_head(reads.hidden_of(self, input_ids)) * (1 + scale)

    reads.with_forward(model, logits)
    return model


UNGUARDED = {"forward reads head": "llama", "loss reads head": "llama", "penalties": "gpt2", "read first": "llama"}


@pytest.mark.on_ranks(2, shared=True)
def test_guard_raises_on_all_ranks_where_reads_are_not_gathered():
    """Without the mechanism, a read of each kind is an error, or right where the weight happened to be gathered."""
    meshes, raised = Meshes("cpu"), set()
    with patch.object(UnitOrder, "read", lambda self, group: None):
        for (kind, name), layout in product(UNGUARDED.items(), ("zero3", "mixed")):
            case = Case(model=reads.reading(name, kind), loss=reads.KINDS[kind][1], layout=layout)
            try:
                trained = train(case, meshes=meshes)
            except UnreducedGradientError as error:
                assert str(error).startswith("Unit '") and "got a gradient for a shard of its weight" in str(error)
                raised.add(kind)
            else:
                assert_trained_alike(trained, lambda case=case: alone(case.alone))
        assert raised == set(UNGUARDED), "the guard is needed for every way to read"
        late = Case(model=lambda: warm(tiny_model("llama")), layout="zero2")
        assert_trained_alike(train(late, meshes=meshes), lambda: alone(late.alone))


@pytest.mark.on_ranks(2, shared=True)
def test_second_backward_through_a_read_weight_is_refused():
    loop, _ = loop_of(Case(model=reads.reading("llama", "loss reads head"), layout="zero3"))
    loop.loss(0).backward(retain_graph=True)  # nothing was read
    with pytest.raises(OSDPError, match="retain_graph=True lets backward run again"):
        reads.loss_reads_head(loop.model, tiny_batch(0)).backward(retain_graph=True)
