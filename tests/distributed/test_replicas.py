"""Replicated units outside of FSDP2: what has no counterpart in float64, and what is refused.

That they train as one process does is in `cases/`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import hf_osdp
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, UnreducedGradientError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import Precision
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import mp_policy
from hf_osdp.sharding.replicas import is_under_plan, replicas_of
from hf_osdp.sharding.steps import micro_step
from tests.helpers.checkpointed import whole
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_model


class Towers(nn.Module):
    """A recurrent layer, and two blocks of which each rank may use one."""

    def __init__(self, *, scaled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.gru = nn.Embedding(7, 4), nn.GRU(4, 4, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.tensor(0.5)) if scaled else 0.5

    def forward(self, ids: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        hidden, _ = self.gru(self.table(ids))
        for index in used:
            hidden = hidden + self.blocks[index](hidden)
        return (hidden.mean((0, 1)) * self.scale).square().sum()

    def by_parts(self, ids: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        """A loss of the blocks, without a call of the model."""
        hidden = torch.sin(ids[..., None] * torch.arange(1.0, 5.0))
        for index in used:
            hidden = hidden + self.blocks[index](hidden)
        return hidden.mean((0, 1)).square().sum()


def replicated(
    model: nn.Module, precision: str = "no", *, layout: str = "replicate", micro_steps: int = 1
) -> tuple[nn.Module, Plan]:
    """Apply a plan in which all units are replicated, or those of a layout are."""
    units = find_units(model)
    plan = plan_of(units, dist.get_world_size(), layout, accumulation_steps=micro_steps, reduce_every_micro_step=False)
    apply_plan(model, plan, units, meshes=Meshes("cpu"), mp_policy=mp_policy(Precision.named(precision)))
    return model, plan


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def of_lower_precision(make: Callable[[], nn.Module], losses: Iterator[Callable[[nn.Module], torch.Tensor]]) -> dict:
    """Gradients of a model wholly in bf16, each loss's added in float32, as a mean over the ranks."""
    model = make().bfloat16()
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for loss_of in losses:
        model.zero_grad()
        loss_of(model).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad.float() / 2
    return sums


FLOAT = torch.float32


def gpt2() -> nn.Module:
    return tiny_model("gpt2", dtype=torch.float32)


def loss_of(model: nn.Module, part: int) -> torch.Tensor:
    batch = tiny_batch(0, part=part, parts=4)
    logits = model(input_ids=batch["input_ids"]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.on_ranks(2, shared=True)
@pytest.mark.parametrize("layout", ["replicate", "mixed"])
def test_bf16_is_that_of_a_model_in_bf16_with_sums_in_float32(layout):
    """Two micro-steps, an evaluation before and between, and weights that change between steps."""
    rank = dist.get_rank()
    model, _ = replicated(gpt2(), "bf16", layout=layout, micro_steps=2)
    for factor in (1.0, 1.25):
        with torch.no_grad():
            loss_of(model, 0)
        for micro in range(2):
            with micro_step(model, is_last=micro == 1):
                (loss_of(model, 2 * micro + rank) / 2).backward()
        if layout == "replicate":
            assert is_under_plan(model) and not any(isinstance(module, FSDPModule) for module in model.modules())
            kinds = {(type(p), p.dtype, type(p.grad)) for p in model.parameters()}
            assert kinds == {(nn.Parameter, FLOAT, torch.Tensor)}
            assert model.transformer.h[0].mlp.c_fc.weight.dtype is FLOAT, "copies are seen within a step alone"
        found = {name: whole(gradient) for name, gradient in gradients(model).items()}

        def changed(factor: float = factor) -> nn.Module:
            reference = gpt2()
            for parameter in reference.parameters():
                parameter.data.mul_(factor)
            return reference

        wanted = of_lower_precision(changed, [lambda one, part=part: loss_of(one, part) / 2 for part in range(4)])
        for name, gradient in found.items():
            exact = layout == "replicate"  # FSDP2's root computes with inputs that it has cast
            torch.testing.assert_close(gradient, wanted[name], rtol=0 if exact else 0.02, atol=1e-9 if exact else 2e-3)
        model.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.mul_(1.25)  # which no version counter shows


@pytest.mark.on_ranks(2, shared=True)
def test_two_calls_before_two_backwards_and_a_call_between():
    rank = dist.get_rank()
    model, _ = replicated(gpt2(), "bf16")
    first, second = loss_of(model, rank), loss_of(model, 2 + rank)
    first.backward()
    third = loss_of(model, rank)
    second.backward()
    third.backward()
    wanted = of_lower_precision(gpt2, [lambda m, part=part: loss_of(m, part) for part in (0, 1, 0, 1, 2, 3)])
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-8)


def assert_means(
    model: nn.Module, used: tuple[tuple[int, ...], ...], precision: str, *, loss: str = "forward", scaled: bool = True
) -> None:
    """Run backward, each rank with its own blocks: all get the means, and none where no rank has one."""
    reference, ids = Towers(scaled=scaled), torch.arange(6).view(2, 3)
    reference.to(FLOAT if precision == "no" else torch.bfloat16)
    for one, ranks in ((model, [dist.get_rank()]), (reference, [0, 1])):
        for rank in ranks:
            ((one if loss == "forward" else one.by_parts)(ids + rank, used[rank]) / len(ranks)).backward()
    limits = {"rtol": 0.05, "atol": 1e-3} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-7}
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    for name, gradient in gradients(model).items():
        assert (gradient is None) == (wanted[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(whole(gradient), wanted[name].float(), **limits)


@pytest.mark.on_ranks(2, shared=True)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_ranks_use_different_blocks_and_later_one_that_none_had_used(precision):
    model, _ = replicated(Towers(), precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, weight_decay=0.1)
    for used in (((0,), (0, 1)), ((0, 1), (0,)), ((2, 0), (0,)), ((0,), (1,)), ((0,), (0, 2))):
        assert_means(model, used, precision)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.on_ranks(2, shared=True)
@pytest.mark.parametrize(("precision", "loss"), [("no", "forward"), ("bf16", "forward"), ("no", "by_parts")])
def test_rank_leaves_out_the_only_replicated_unit_of_a_sharded_model(precision, loss):
    """It takes part in the average that others wait for, with zeros; in parts, backward meets the replica first."""
    model = Towers(scaled=False)
    units = find_units(model)
    plan = plan_of(units, 2, "zero3")
    plan = replace(plan, units=tuple(replace(u, shard_size=1 if u.fqn == "blocks.0" else 2) for u in plan.units))
    apply_plan(model, plan, units, meshes=Meshes("cpu"), mp_policy=mp_policy(Precision.named(precision)))
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert plain == ["blocks.0.weight", "blocks.0.bias"]
    for used in (((1, 0), (1,)), ((1,), (1, 0)), ((1,), (1,))):
        assert_means(model, used, precision, loss=loss, scaled=False)
        model.zero_grad()


@pytest.mark.on_ranks(2, shared=True)
def test_what_would_train_unequal_replicas_is_refused():
    rank = dist.get_rank()
    model, plan = replicated(gpt2(), "bf16", micro_steps=2)
    optimizer = torch.optim.AdamW(model.parameters())
    with micro_step(model, is_last=False):
        loss_of(model, rank).backward()
    with pytest.raises(OSDPError, match=r"optimizer\.step\(\) came while gradients of unit"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # there are no gradients to wait for
    with pytest.raises(OSDPError, match="create_graph=True"):
        loss_of(model, rank).backward(create_graph=True)
    with pytest.raises(OSDPError, match="is under a plan"):
        apply_plan(model, plan, find_units(model), meshes=Meshes("cpu"))
    model.zero_grad()
    optimizer.step()  # ends what was left of backwards that raised
    penalty = model.transformer.h[-1].mlp.c_fc.weight.square().sum()  # of the model's own weight, before the call
    with pytest.raises(UnreducedGradientError, match=r"'transformer\.h\.3' got a gradient after its gradients"):
        (loss_of(model, rank) + penalty).backward()


@pytest.mark.on_ranks(2, shared=True)
def test_copies_and_work_between_steps_see_plain_weights():
    rank = dist.get_rank()
    model, _ = replicated(gpt2(), "bf16")
    loss_of(model, rank).backward()
    copied = copy.deepcopy(model)
    assert replicas_of(copied) is None
    loss_of(copied, rank).backward()  # on this rank alone, in float32
    with hf_osdp.full_parameters(model):
        with pytest.raises(OSDPError, match="was called within"):
            loss_of(model, rank)
        for parameter in model.parameters():
            parameter.data.fill_(float(rank + 1))
    assert all((parameter == 1).all() for parameter in model.parameters()), "rank 0's changes"
    with hf_osdp.full_parameters(model, write_back=False):
        for parameter in model.parameters():
            parameter.data.zero_()
    assert all((parameter == 1).all() for parameter in model.parameters())
    if rank == 0:
        torch.testing.assert_close(loss_of(copied, 0), loss_of(gpt2(), 0))
    dist.barrier()
