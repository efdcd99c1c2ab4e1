"""Blocks that are recomputed, compiled or in slices: what shows on ranks alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hf_osdp.distributed.fsdp_internals import parameter_groups
from hf_osdp.modeling import selective
from hf_osdp.modeling.parts import LinearSlice
from hf_osdp.modeling.units import find_units
from hf_osdp.modeling.wrapping import recompute
from hf_osdp.planner.description import Recomputation
from hf_osdp.planner.placement import Activations
from hf_osdp.sharding.apply import apply_plan
from tests.helpers.checkpointed import whole
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import loop_of

from .cases.layouts import OPERATORS, sliced

SAVED = ("addmm#0", "addmm#1", "sigmoid#0")


class Block(nn.Module):
    """Two products, the second in a unit of its own, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.first(x).relu(), 0.5)
        return nn.functional.dropout(self.inner(hidden).sigmoid(), 0.5) * x


def gradients_of(block: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    block(block(x)).square().sum().backward()
    found = {name: whole(p.grad) for name, p in block.named_parameters()}
    return {**found, "x": x.grad}


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.on_ranks(2, shared=True)
def test_unit_inside_recomputed_block_leaves_gradients_and_saved_operators(frees):
    """A unit that stays gathered is gathered in the first run of a block alone."""
    taken, take = [], selective._Output.take
    torch.manual_seed(0)
    plain = Block().double()
    block, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (2,))
    recompute(block, Recomputation(saved_calls=SAVED))
    fully_shard(block.inner, mesh=mesh, reshard_after_forward=frees)
    fully_shard(block, mesh=mesh)
    with patch.object(selective._Output, "take", lambda self, call: taken.append(call) or take(self, call)):
        wanted, found = gradients_of(plain), gradients_of(block)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert sorted(taken) == sorted(2 * SAVED), "each is handed out in both runs"


@pytest.mark.slow  # code is generated
@pytest.mark.on_ranks(2, timeout_s=280)
def test_compiled_blocks_train_on_varying_lengths_and_compile_twice():
    """The first length is compiled as it is, the second for all lengths."""
    losses: dict[str, list[float]] = {}
    norms: dict[str, list[torch.Tensor]] = {}
    for layout in ("compiled", "mixed"):
        model, compilations = tiny_model("gpt2", layers=1), []
        units = find_units(model)
        plan = plan_of(units, dist.get_world_size(), layout)
        plan = replace(plan, units=tuple(replace(unit, activations=Activations.SAVE) for unit in plan.units))
        apply_plan(model, plan, units)
        losses[layout] = []
        for step, length in enumerate((12, 7, 9, 12, 5)):
            rows = tiny_batch(step, part=dist.get_rank(), parts=dist.get_world_size())
            loss = tiny_loss(model, {name: value[:, :length] for name, value in rows.items()})
            loss.backward()
            losses[layout].append(loss.item())
            norms[layout] = [whole(parameter.grad).norm() for parameter in model.parameters()]
            compilations.append(counters["stats"]["unique_graphs"])
        if layout == "compiled":
            first, second, *later = compilations
            assert first > 0 and second == 2 * first and set(later) == {second}
    for found in (losses, norms):  # norms of the sums over all steps
        torch.testing.assert_close(found["compiled"], found["mixed"], rtol=1e-10, atol=1e-14)


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, int]]:
    """Most bytes that slices show unsharded at once, and most of them."""
    slices = [module for module in model.modules() if isinstance(module, LinearSlice)]
    groups = [group for module in slices for group in parameter_groups(module)]
    seen, wait = {"bytes": 0, "slices": 0}, FSDPParamGroup.wait_for_unshard

    def watch(group: FSDPParamGroup) -> None:
        wait(group)
        shown = [p.unsharded_param for g in groups if g.is_unsharded for p in g.fsdp_params]
        seen["bytes"] = max(seen["bytes"], sum(p.numel() * p.itemsize for p in shown))
        seen["slices"] = max(seen["slices"], sum(g.is_unsharded for g in groups))

    FSDPParamGroup.wait_for_unshard = watch
    try:
        yield seen
    finally:
        FSDPParamGroup.wait_for_unshard = wait


@pytest.mark.on_ranks(2, shared=True)
def test_one_slice_is_gathered_at_once():
    """In forward and backward, with every unit freed after use."""
    for name, slices in (("gpt2", 4), ("llama", 2)):
        case = sliced(name, slices, layout="zero3")
        whole = [case.model().get_submodule(fqn) for fqn in OPERATORS[name]]
        largest = max(sum(p.numel() * p.itemsize for p in operator.parameters()) for operator in whole)
        loop, _ = loop_of(case)
        with watched(loop.model) as seen:
            loop.step(0)
        assert seen["slices"] == 1
        assert largest / slices <= seen["bytes"] < largest / slices * 1.1  # the first slices have one row more
