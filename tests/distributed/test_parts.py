"""Parts of a step against plain torch on 4 ranks: clipping, scaling, optimizers, state, order, read-back."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, PlanError, PlanMismatchError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import GatherSpan, UnitDescription
from hf_osdp.planner.plan import UnitDecision
from hf_osdp.sharding.apply import apply_plan, bottom_up, effective
from hf_osdp.sharding.gradients import OSDPGradScaler, clip_grad_norm_
from hf_osdp.sharding.optimizer_steps import parameter_names, rebind_parameters, release_parameters
from hf_osdp.sharding.state import broadcast_parameters, full_state_dict, load_full_state_dict
from tests.helpers.checkpointed import worst
from tests.helpers.layouts import plan_of
from tests.helpers.models import MODELS, tiny_batch, tiny_loss, tiny_model
from tests.helpers.read_back import read_back, verify_applied
from tests.helpers.sampling import slow_but
from tests.helpers.training import MAX_NORM

WORLD_SIZE = 4
NORM_TYPES = (1.0, 2.0, math.inf)
ADAMW = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
BLOCK = "transformer.h.{}.mlp.c_fc.weight"
on_ranks = pytest.mark.on_ranks(WORLD_SIZE, shared=True)


def sharded(meshes: Meshes, layout: str, *, model: torch.nn.Module | None = None, on_host: bool = False):
    """A model, its units and the plan that was applied."""
    model = model or tiny_model("gpt2")
    units = find_units(model)
    plan = plan_of(units, meshes.world_size, layout)
    plan = replace(plan, units=tuple(replace(unit, on_host=on_host) for unit in plan.units))
    apply_plan(model, plan, units, meshes=meshes)
    return model, units, plan


def my_batch(step: int = 0) -> dict[str, torch.Tensor]:
    return tiny_batch(step, part=dist.get_rank(), parts=dist.get_world_size())


# ---- clipping


@functools.cache
def clipped_alone(norm_type: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = tiny_model("bert")
    tiny_loss(model, tiny_batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
    return norm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@on_ranks
def test_clipping_equals_torch_on_whole_gradients():
    meshes = Meshes("cpu")
    models = {layout: sharded(meshes, layout, model=tiny_model("bert"))[0] for layout in ("mixed", "zero3")}
    for (layout, model), norm_type in itertools.product(models.items(), NORM_TYPES):
        model.zero_grad()
        tiny_loss(model, my_batch()).backward()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
        wanted, grads = clipped_alone(norm_type)
        assert norm.shape == () and norm.dtype == torch.float64 and torch.allclose(norm, wanted, rtol=1e-13, atol=0), (
            layout,
            norm_type,
        )
        assert (
            worst({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}, grads)
            < 1e-14
        )


# ---- scaling


def scaled_alone(options: dict[str, bool], unscale: bool) -> dict[str, torch.Tensor]:
    """The steps without scaling in one process, the overflowing ones left out."""
    model = tiny_model("gpt2")
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-3, **options)
    for step in (0, 2, 4):
        optimizer.zero_grad()
        tiny_loss(model, tiny_batch(step)).backward()
        if unscale:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model.state_dict()


def overflow(model: torch.nn.Module, step: int) -> None:
    """An inf (or NaN) in one rank's shard: of a fully sharded unit, then of a group-sharded one."""
    block, rank, value = {1: (2, 3, math.inf), 3: (1, 1, math.nan)}.get(step, (0, -1, 0.0))
    if dist.get_rank() == rank:
        model.get_parameter(BLOCK.format(block)).grad._local_tensor.view(-1)[0] = value


def scaled(meshes: Meshes, name: str, unscale: bool) -> tuple[list[float], list[bool], dict[str, torch.Tensor]]:
    """Scale after each step, whether weights moved in it, and whole weights."""
    model, _, _ = sharded(meshes, "mixed")
    # The last parameters are the root's, sharded in pairs: torch's own scaler would tell only the other rank of the
    # pair.
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-3, **ADAMW[name])
    scaler = OSDPGradScaler(device="cpu", init_scale=1024.0, growth_interval=100)
    scales, moved = [], []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(tiny_loss(model, my_batch(step))).backward()
        overflow(model, step)
        before = [p._local_tensor.clone() for p in model.parameters()]
        if unscale:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(a, p._local_tensor) for a, p in zip(before, model.parameters(), strict=True)))
    return scales, moved, full_state_dict(model)


@pytest.mark.parametrize(
    ("name", "unscale"),
    slow_but([("plain", True), ("foreach", False), ("fused", True)], daily=[("foreach", False), ("fused", True)]),
)
@on_ranks
def test_scaler_skips_the_same_steps_on_every_rank(name, unscale):
    """Before the second and fourth, one rank's shard overflows in a unit of another mesh than the first gradient's."""
    scales, moved, state = scaled(Meshes("cpu"), name, unscale)
    assert scales == [1024, 512, 512, 256, 256] and moved == [True, False, True, False, True]
    assert dist.get_rank() or worst(state, scaled_alone(ADAMW[name], unscale)) < 1e-12


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
    units = (
        unit(""), unit("h.1"), unit("h.1.mlp"), unit("h.10"), unit("wte", "h.1.mlp.fc"), unit("h"), unit("h.1.attn.q"),
    )  # fmt: skip
    order = [u.fqn for u in bottom_up(units)]
    assert order[-1] == "" and sorted(order) == sorted(u.fqn for u in units)
    for inner, outer in [
        ("h.1.mlp", "h.1"),
        ("wte+h.1.mlp.fc", "h.1.mlp"),
        ("h.1.attn.q", "h.1"),
        ("h.1", "h"),
        ("h.10", "h"),
    ]:
        assert order.index(inner) < order.index(outer)
    assert all(bottom_up(find_units(tiny_model(name)))[-1].fqn == "" for name in MODELS)


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
    assert apply_plan(model, plan, units) is model
    assert not any("FSDP" in type(module).__name__ for module in model.modules())
    verify_applied(model, plan, units)


@on_ranks
def test_layout_reads_back_as_planned_and_changes_are_found():
    meshes = Meshes("cpu")
    model, units, plan = sharded(meshes, "mixed", model=tiny_model("bert"))
    verify_applied(model, plan, units)
    read = read_back(model, units)
    assert {one.shard_size for one in read} == {1, 2, 4}
    assert {one.reshard_after_forward for one in read} == {
        True,
        False,
    }
    for one, planned, described in zip(read, plan.units, units, strict=True):
        kept = not planned.reshard_after_forward or described.span is not GatherSpan.USE
        assert (
            one.shard_size, one.stage_size, one.reshard_after_forward,
        ) == (planned.shard_size, planned.stage_size, not kept)  # fmt: skip
    with pytest.raises(PlanMismatchError, match="units differ"):
        verify_applied(model, plan_of(units, WORLD_SIZE, "zero3"), units)
    tampered = next(
        one.fqn for one in units if one.span is GatherSpan.USE and plan.decision(one.fqn).reshard_after_forward
    )
    model.get_submodule(tampered).set_reshard_after_forward(False)
    with pytest.raises(PlanMismatchError, match=rf"Unit '{tampered}' runs as .*keep.*\(1 of "):
        verify_applied(model, plan, units)
    with pytest.raises(PlanMismatchError, match="0 FSDP2 parameter groups"):
        verify_applied(tiny_model("bert"), plan, units)
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


def test_meshes_need_a_process_group():
    with pytest.raises(ValueError, match="torchrun"):
        Meshes("cpu")


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


# ---- optimizers, state


@on_ranks
def test_optimizer_made_before_sharding_keeps_its_groups():
    model = tiny_model("gpt2")
    decay, rest = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": decay, "weight_decay": 0.25}, {"params": rest, "lr": 0.5, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    names = parameter_names(model)
    before = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    release_parameters(optimizer, names)
    sharded(Meshes("cpu"), "mixed", model=model)
    rebind_parameters(optimizer, names, model)
    new = parameter_names(model)
    assert [[new[p] for p in group["params"]] for group in optimizer.param_groups] == before
    tiny_loss(model, my_batch()).backward()
    start = full_state_dict(model)
    optimizer.step()
    scheduler.step()
    end = full_state_dict(model)
    assert not [name for name in start if torch.equal(start[name], end[name])]
    groups = [tuple(group[key] for key in ("lr", "weight_decay", "initial_lr")) for group in optimizer.param_groups]
    assert groups == [(5e-4, 0.25, 1e-3), (0.25, 0.0, 0.5)]
    with pytest.raises(OSDPError, match="has taken steps"):
        rebind_parameters(optimizer, names, model)


@on_ranks
def test_full_state_equals_plain_model_and_loads_into_another_layout():
    meshes, plain = Meshes("cpu"), tiny_model("bert")
    model, _, _ = sharded(meshes, "mixed", model=tiny_model("bert"))
    state = full_state_dict(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tiny_loss(model, my_batch()).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        assert worst(state, plain.state_dict()) == 0, "a later step changed the copies"
        tiny_model("bert", seed=9).load_state_dict(state, strict=True)
        assert (
            state["cls.predictions.decoder.weight"].data_ptr()
            == state["bert.embeddings.word_embeddings.weight"].data_ptr()
        )
    other, _, _ = sharded(meshes, "zero2", model=tiny_model("bert", seed=9))
    load_full_state_dict(other, state)
    again = full_state_dict(other)
    assert not again if dist.get_rank() else worst(again, state) == 0


@on_ranks
def test_unequal_initial_weights_become_those_of_rank_0():
    rank, plain = dist.get_rank(), tiny_model("gpt2", seed=0)
    model, _, _ = sharded(Meshes("cpu"), "replicate", model=tiny_model("gpt2", seed=rank))
    local = {name: p._local_tensor for name, p in model.named_parameters()}
    assert all(torch.equal(local[name], p) for name, p in plain.named_parameters())
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


def freeze(model: torch.nn.Module) -> torch.nn.Module:
    """Whole blocks, one with a single trainable bias, and the embedding that is shared with the head."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            name.startswith(("transformer.h.2", "transformer.ln_f")) or name == "transformer.h.1.mlp.c_fc.bias"
        )
    return model


def one_step(model: torch.nn.Module, batch: dict[str, torch.Tensor], clip: Any, max_norm: float) -> float:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    tiny_loss(model, batch).backward()
    norm = clip(model.parameters(), max_norm).item()
    optimizer.step()
    return norm


@pytest.mark.parametrize("change", [freeze, None], ids=["frozen parameters", "every unit on the host"])
@on_ranks
def test_step_is_that_of_one_process(change):
    alone, model = (change(tiny_model("gpt2")) if change else tiny_model("gpt2") for _ in range(2))
    wanted = one_step(alone, tiny_batch(0), torch.nn.utils.clip_grad_norm_, 0.01)
    model, units, plan = sharded(Meshes("cpu"), "mixed", model=model, on_host=change is None)
    verify_applied(model, plan, units)
    assert abs(one_step(model, my_batch(), clip_grad_norm_, 0.01) - wanted) < 1e-13
    state = full_state_dict(model)
    assert dist.get_rank() or worst(state, alone.state_dict()) < 1e-12
