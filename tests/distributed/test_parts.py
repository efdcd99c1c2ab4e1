"""Parts of a step on 4 ranks: scaling against plain torch, order, read-back, whole states."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, PlanError, PlanMismatchError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import GatherSpan, UnitDescription
from hf_osdp.planner.plan import UnitDecision
from hf_osdp.sharding.apply import apply_plan, bottom_up, effective
from hf_osdp.sharding.gradients import OSDPGradScaler, clip_grad_norm_, local
from hf_osdp.sharding.optimizer_steps import step_on_shards
from hf_osdp.sharding.state import broadcast_parameters, full_state_dict, load_full_state_dict
from tests.helpers.checkpointed import worst
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.read_back import read_back, verify_applied
from tests.helpers.training import MAX_NORM

WORLD_SIZE = 4
BLOCK = "transformer.h.{}.mlp.c_fc.weight"
on_ranks = pytest.mark.on_ranks(WORLD_SIZE, shared=True)


def sharded(meshes: Meshes, layout: str, *, model: torch.nn.Module | None = None):
    """A model, its units and the plan that was applied."""
    model = model or tiny_model("gpt2")
    units = find_units(model)
    plan = plan_of(units, meshes.world_size, layout)
    apply_plan(model, plan, units, meshes=meshes)
    return model, units, plan


def my_batch(step: int = 0) -> dict[str, torch.Tensor]:
    return tiny_batch(step, part=dist.get_rank(), parts=dist.get_world_size())


# ---- scaling


def overflow(model: torch.nn.Module, step: int) -> None:
    """An inf (or NaN) in one rank's shard: of a fully sharded unit, then of a group-sharded one."""
    block, rank, value = {1: (2, 3, math.inf), 3: (1, 1, math.nan)}.get(step, (0, -1, 0.0))
    if dist.get_rank() == rank:
        local(model.get_parameter(BLOCK.format(block)).grad).view(-1)[0] = value


@on_ranks
def test_scaler_skips_the_same_steps_on_every_rank():
    """Before the second and fourth, one rank's shard overflows in a unit of another mesh than the first gradient's."""
    model, alone = sharded(Meshes("cpu"), "mixed")[0], tiny_model("gpt2")
    # The last parameters are the root's, sharded in pairs: torch's own scaler would tell only the other rank of the
    # pair.
    optimizer, other = (
        torch.optim.AdamW(list(each.parameters())[::-1], lr=1e-3, fused=True) for each in (model, alone)
    )
    step_on_shards(optimizer, model)
    scaler = OSDPGradScaler(device="cpu", init_scale=1024.0, growth_interval=100)
    scales = []
    for step in range(5):
        scaler.scale(tiny_loss(model, my_batch(step))).backward()
        overflow(model, step)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if step % 2 == 0:
            tiny_loss(alone, tiny_batch(step)).backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
            other.step()
            other.zero_grad()
        state = full_state_dict(model)
        assert dist.get_rank() or worst(state, alone.state_dict()) < 1e-12, step
    assert scales == [1024, 512, 512, 256, 256]


def test_scaler_refuses_float16_gradients():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones(2, dtype=torch.float16)
    scaler = OSDPGradScaler(device="cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="float16 cannot be unscaled"):
        scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))


# ---- order, read-back


def unit(*names: str, span: GatherSpan = GatherSpan.USE) -> UnitDescription:
    return UnitDescription(fqn="+".join(names), module_names=names, class_name="", span=span, parameters=())


def test_bottom_up_puts_a_unit_after_those_inside_it():
    names = ("", "h.1", "h.1.mlp", "h.10", "wte+h.1.mlp.fc", "h", "h.1.attn.q", "h.10.mlp")
    modules = {"": nn.Module()}
    for name in ("wte", "h", "h.1", "h.1.mlp", "h.1.mlp.fc", "h.1.attn", "h.1.attn.q", "h.10", "h.10.mlp"):
        parent, _, leaf = name.rpartition(".")
        modules[name] = nn.Module()
        modules[parent].add_module(leaf, modules[name])
    modules["h.1"].add_module("shared", modules["h.10.mlp"])
    order = [one.fqn for one in bottom_up([unit(*name.split("+")) for name in names], modules)]
    assert order[-1] == "" and sorted(order) == sorted(names)
    pairs = {"h.1.mlp": "h.1", "wte+h.1.mlp.fc": "h.1.mlp", "h.1.attn.q": "h.1", "h.1": "h", "h.10": "h"}
    pairs |= {"h.10.mlp": "h.1"}
    assert all(order.index(inner) < order.index(outer) for inner, outer in pairs.items())


def test_units_in_use_for_the_whole_step_are_kept():
    decision = UnitDecision(fqn="x", shard_size=2, reshard_after_forward=True)
    assert effective(decision, unit("x")) == decision
    assert effective(decision, unit("x", span=GatherSpan.STEP)) == replace(decision, reshard_after_forward=False)


def test_one_process_is_not_sharded_and_has_no_precision_policy():
    model = tiny_model("gpt2")
    units = find_units(model)
    plan = plan_of(units, 1, "mixed")
    with pytest.raises(ValueError, match="process group"):
        apply_plan(model, plan, units, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="torchrun"):
        Meshes("cpu")
    assert apply_plan(model, plan, units) is model
    assert not any("FSDP" in type(module).__name__ for module in model.modules())


@on_ranks
def test_changes_after_the_plan_are_found():
    """`verify_applied`, which every case runs, can fail."""
    meshes = Meshes("cpu")
    model, units, plan = sharded(meshes, "mixed", model=tiny_model("bert"))
    assert {one.shard_size for one in read_back(model, units)} == {1, 2, 4}
    with pytest.raises(PlanMismatchError, match=r"but the plan says '.*on host"):
        verify_applied(model, replace(plan, units=tuple(replace(u, on_host=True) for u in plan.units)), units)
    pairs = zip(units, plan.units, strict=True)
    freed = next(
        unit.fqn for unit, decision in pairs
        if unit.span is GatherSpan.USE and decision.reshard_after_forward and decision.shard_size > 1
    )  # fmt: skip
    model.get_submodule(freed).set_reshard_after_forward(False)
    with pytest.raises(PlanMismatchError, match=rf"Unit '{freed}' runs as .*keep.*\(1 of "):
        verify_applied(model, plan, units)
    with pytest.raises(PlanMismatchError, match="the first difference is"):
        read_back(model, (replace(units[1], parameters=units[1].parameters[1:]),))
    staged, units, _ = sharded(meshes, "two_stage")
    assert {one.stage_size for one in read_back(staged, units)} == {2}
    staged.set_custom_all_gather(DefaultAllGather())
    with pytest.raises(PlanMismatchError, match="gathers with DefaultAllGather and reduces"):
        read_back(staged, units)


@on_ranks
def test_meshes_are_by_shard_size():
    meshes = Meshes("cpu")
    assert {size: tuple(meshes.mesh(size).mesh.shape) for size in (1, 2, 4)} == {1: (4, 1), 2: (2, 2), 4: (4,)}
    assert meshes.mesh(2).mesh_dim_names == ("replicate", "shard") and meshes.mesh(2) is meshes.mesh(2)
    with pytest.raises(ValueError, match=r"^shard_size=3 does not divide the world size 4; use 1, 2, 4\.$"):
        meshes.mesh(3)


@on_ranks
def test_plan_that_cannot_be_applied_is_refused_before_sharding():
    meshes, fresh = Meshes("cpu"), tiny_model("gpt2")
    model, units, plan = sharded(meshes, "zero3")
    for error, said, refused, its_plan in (
        (OSDPError, "sharded by FSDP2 already", model, plan),
        (PlanError, "The plan is for 8 processes, but 4 are running.", fresh, replace(plan, world_size=8)),
        (PlanError, "fingerprint", fresh, replace(plan, model_fingerprint="0")),
    ):
        with pytest.raises(error, match=said):
            apply_plan(refused, its_plan, units, meshes=meshes)
    assert not any("FSDP" in type(module).__name__ for module in fresh.modules())


# ---- state


@on_ranks
def test_full_state_is_a_copy_with_ties_and_loads_into_another_layout():
    meshes, plain = Meshes("cpu"), tiny_model("bert")
    model, _, _ = sharded(meshes, "mixed", model=tiny_model("bert"))
    state = full_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ties = ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight")
    if dist.get_rank() == 0:
        assert worst(state, plain.state_dict()) == 0, "a later step changed the copies"
        assert len({state[name].data_ptr() for name in ties}) == 1
    other, _, _ = sharded(meshes, "zero2", model=tiny_model("bert", seed=9))
    load_full_state_dict(other, state)
    again = full_state_dict(other)
    assert not again if dist.get_rank() else worst(again, state) == 0
    without = {name: value for name, value in state.items() if "LayerNorm" not in name}
    odd = {name: torch.zeros(2, 2) for name in state}
    for said, wrong in (("missing .*, 0 unexpected", without), (r"has shape \(2, 2\), but the model.s has", odd)):
        with pytest.raises(RuntimeError, match=said):
            load_full_state_dict(other, wrong)


@on_ranks
def test_unequal_initial_weights_become_those_of_rank_0():
    rank, plain = dist.get_rank(), tiny_model("gpt2", seed=0)
    model, _, _ = sharded(Meshes("cpu"), "replicate", model=tiny_model("gpt2", seed=rank))
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], p) for name, p in plain.named_parameters())
    odd = torch.nn.Linear(3, 2).double()
    odd.register_buffer("flag", torch.tensor(rank == 0))
    odd.register_buffer("count", torch.tensor([rank], dtype=torch.int16))
    odd.weight.data = odd.weight.data.t().contiguous().t().mul(rank)
    broadcast_parameters(odd)
    assert odd.flag and odd.count == 0 and not odd.weight.any()
    with pytest.raises(PlanMismatchError, match=r"the hash of the model's tensors is .* on rank 3"):
        broadcast_parameters(torch.nn.Linear(2 + rank // 3, 2))


@on_ranks
def test_tensor_on_meta_on_one_rank_is_not_broadcast():
    model = torch.nn.ModuleDict({"new": torch.nn.Linear(2, 2), "old": torch.nn.Linear(2, 2)})
    torch.nn.init.constant_(model["old"].weight, dist.get_rank() + 1)
    if dist.get_rank():
        model["new"].to("meta")
    broadcast_parameters(model)
    assert model["old"].weight.eq(1.0).all() and model["new"].weight.is_meta == (dist.get_rank() > 0)
