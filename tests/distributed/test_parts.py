"""The parts of a step, each against plain torch: norm and clipping, loss scaling, optimizers, state, read-back."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, PlanError, PlanMismatchError
from hf_osdp.modeling.units import find_units
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import OSDPGradScaler, clip_grad_norm_
from hf_osdp.sharding.optimizer import parameter_names, rebind_parameters, release_parameters
from hf_osdp.sharding.state import broadcast_parameters, full_state_dict, load_full_state_dict
from hf_osdp.sharding.verify import read_back, verify_applied
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import MAX_NORM

WORLD_SIZE = 4
NORM_TYPES = (1.0, 2.0, math.inf)
ADAMW = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
BLOCK = "transformer.h.{}.mlp.c_fc.weight"


@functools.cache
def outcome(world_size: int = WORLD_SIZE) -> list[dict[str, Any]]:
    """What each rank found, by case; one start of the ranks for all of them."""
    return run_ranks(run_cases, world_size, timeout_s=200)


def run_cases() -> dict[str, Any]:
    meshes = Meshes("cpu")
    cases = {
        **{f"clip-{p}-{layout}": functools.partial(clip_case, meshes, layout, p) for layout in ("mixed", "zero3") for p in NORM_TYPES},
        **{
            f"scaler-{name}-{unscale}": functools.partial(scaler_case, meshes, options, unscale)
            for name, options in ADAMW.items() for unscale in (True, False)
        },
        "verify": functools.partial(verify_case, meshes),
        "rebind": functools.partial(rebind_case, meshes),
        "full state": functools.partial(full_state_case, meshes),
        "unequal weights": functools.partial(unequal_case, meshes),
        "meta": meta_case,
        "refusals": functools.partial(refusals_case, meshes),
        "mesh": functools.partial(mesh_case, meshes),
        "frozen": functools.partial(frozen_case, meshes),
        "offload": functools.partial(offload_case, meshes),
    }  # fmt: skip
    return {name: case() for name, case in cases.items()}


def sharded(meshes: Meshes, layout: str, *, model_name: str = "gpt2", seed: int = 0):
    """A model, its units and the plan that was applied."""
    model = tiny_model(model_name, seed=seed)
    units = find_units(model)
    plan = plan_of(units, meshes.world_size, layout)
    apply_plan(model, plan, units, meshes=meshes)
    return model, units, plan


def my_batch(step: int = 0) -> dict[str, torch.Tensor]:
    return tiny_batch(step, part=dist.get_rank(), parts=dist.get_world_size())


def message_of(error: type[Exception], fn) -> str:
    try:
        fn()
    except error as caught:
        return str(caught)
    return "nothing was raised"


# ------------------------------------------------------------------------------------------------------------ clipping


def clip_case(meshes: Meshes, layout: str, norm_type: float) -> dict[str, Any]:
    model, _, _ = sharded(meshes, layout, model_name="bert")
    tiny_loss(model, my_batch()).backward()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
    return {"norm": norm, "grads": {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}}


@functools.cache
def clipped_alone(norm_type: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = tiny_model("bert")
    tiny_loss(model, tiny_batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
    return norm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", ["mixed", "zero3"])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_clipping_equals_torch_on_whole_gradients(norm_type, layout):
    norm, grads = clipped_alone(norm_type)
    for found in outcome():
        case = found[f"clip-{norm_type}-{layout}"]
        assert case["norm"].shape == () and case["norm"].dtype == torch.float64
        assert torch.allclose(case["norm"], norm, rtol=1e-13, atol=0)
        assert case["grads"].keys() == grads.keys()
        assert max((case["grads"][name] - grads[name]).abs().max().item() for name in grads) < 1e-14


def test_plain_tensors_are_clipped_in_one_process():
    for norm_type in NORM_TYPES:
        model = tiny_model("bert")
        tiny_loss(model, tiny_batch(0)).backward()
        norm, grads = clipped_alone(norm_type)
        assert torch.allclose(clip_grad_norm_(model.parameters(), MAX_NORM, norm_type), norm, rtol=1e-13, atol=0)
        assert all(torch.allclose(p.grad, grads[name], rtol=1e-13) for name, p in model.named_parameters() if p.grad is not None)


def test_no_gradients_have_norm_zero_and_a_norm_type_must_be_positive():
    assert clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0).item() == 0
    with pytest.raises(ValueError, match="norm_type=0 must be positive"):
        clip_grad_norm_([], 1.0, 0)


# ------------------------------------------------------------------------------------------------------------- scaling


def scaler_case(meshes: Meshes, options: dict[str, bool], unscale: bool) -> list[dict[str, Any]]:
    """Five steps; before the second and fourth, one rank's shard overflows in a unit of another mesh than the first gradient's."""
    model, _, _ = sharded(meshes, "mixed")
    # The last parameters are the root's, sharded in pairs: torch's own scaler would tell only the other rank of the pair.
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-3, **options)
    scaler = OSDPGradScaler(device="cpu", init_scale=1024.0, growth_interval=100)
    steps = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(tiny_loss(model, my_batch(step))).backward()
        overflow(model, step)
        before = full_state_dict(model)
        if unscale:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        after = full_state_dict(model)
        moved = [any(not torch.equal(before[name], after[name]) for name in before)]
        dist.broadcast_object_list(moved)
        steps.append({"scale": scaler.get_scale(), "moved": moved[0], "local": local_sum(model)})
    return [*steps, {"parameters": full_state_dict(model)}]


def overflow(model: torch.nn.Module, step: int) -> None:
    """An inf (or NaN) in one rank's shard: of a fully sharded unit, then of a group-sharded one."""
    block, rank, value = {1: (2, 3, math.inf), 3: (1, 1, math.nan)}.get(step, (0, -1, 0.0))
    if dist.get_rank() == rank:
        model.get_parameter(BLOCK.format(block)).grad._local_tensor.view(-1)[0] = value


def local_sum(model: torch.nn.Module) -> float:
    return sum(p._local_tensor.abs().sum().item() for p in model.parameters())


@functools.cache
def scaled_alone(name: str, unscale: bool) -> dict[str, torch.Tensor]:
    """The same without scaling in one process, the overflowing steps left out."""
    model = tiny_model("gpt2")
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-3, **ADAMW[name])
    for step in (0, 2, 4):
        optimizer.zero_grad()
        tiny_loss(model, tiny_batch(step)).backward()
        if unscale:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("name", ADAMW)
def test_every_rank_skips_the_same_steps(name, unscale):
    for found in outcome():
        steps = found[f"scaler-{name}-{unscale}"][:5]
        assert [step["scale"] for step in steps] == [1024, 512, 512, 256, 256]
        assert [step["moved"] for step in steps] == [True, False, True, False, True]
        sums = [step["local"] for step in steps]
        assert [a == b for a, b in itertools.pairwise(sums)] == [True, False, True, False]
    parameters, alone = outcome()[0][f"scaler-{name}-{unscale}"][5]["parameters"], scaled_alone(name, unscale)
    assert max((parameters[key] - alone[key]).abs().max().item() for key in alone) < 1e-12


def test_the_scaler_refuses_float16_gradients():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones(2, dtype=torch.float16)
    scaler = OSDPGradScaler(device="cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="float16 cannot be unscaled"):
        scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))


# ----------------------------------------------------------------------------------------------------------- read-back


def verify_case(meshes: Meshes) -> dict[str, Any]:
    model, units, plan = sharded(meshes, "mixed", model_name="bert")
    found = {"read": read_back(model, units), "plan": plan.units, "spans": [unit.span.value for unit in units]}
    verify_applied(model, plan, units)
    other = plan_of(units, meshes.world_size, "zero3")
    found["other plan"] = message_of(PlanMismatchError, lambda: verify_applied(model, other, units))
    tampered = next(unit for unit in units if unit.span.value == "use" and plan.decision(unit.fqn).reshard_after_forward)
    model.get_submodule(tampered.fqn).set_reshard_after_forward(False)
    found["tampered"] = tampered.fqn, message_of(PlanMismatchError, lambda: verify_applied(model, plan, units))
    found["unsharded"] = message_of(PlanMismatchError, lambda: verify_applied(tiny_model("bert"), plan, units))
    moved = replace(units[1], parameters=units[1].parameters[1:])
    found["other parameters"] = message_of(PlanMismatchError, lambda: read_back(model, (moved,)))
    staged, units, _ = sharded(meshes, "two_stage")
    found["stages"] = [unit.stage_size for unit in read_back(staged, units)]
    staged.set_custom_all_gather(DefaultAllGather())
    found["half"] = message_of(PlanMismatchError, lambda: read_back(staged, units))
    return found


def test_the_layout_reads_back_as_planned():
    for found in outcome():
        case = found["verify"]
        kinds = {(unit.shard_size, unit.reshard_after_forward) for unit in case["read"]}
        assert {1, 2, 4} == {size for size, _ in kinds} and {True, False} == {reshard for _, reshard in kinds}
        for read, planned, span in zip(case["read"], case["plan"], case["spans"], strict=True):
            assert (read.shard_size, read.stage_size) == (planned.shard_size, planned.stage_size)
            assert read.reshard_after_forward == (planned.reshard_after_forward and span == "use")


def test_a_changed_layout_is_found():
    for found in outcome():
        case = found["verify"]
        fqn, message = case["tampered"]
        assert f"Unit {fqn!r} runs as" in message and "keep" in message and "(1 of " in message
        assert "units differ" in case["other plan"]
        assert "0 FSDP2 parameter groups" in case["unsharded"]
        assert "first odd one" in case["other parameters"]
        assert set(case["stages"]) == {2}
        assert "gathers by DefaultAllGather and reduces by TwoStageReduceScatter, which no plan has" in case["half"]


def mesh_case(meshes: Meshes) -> dict[str, Any]:
    return {
        "shapes": {size: tuple(meshes.mesh(size).mesh.shape) for size in (1, 2, 4)},
        "names": meshes.mesh(2).mesh_dim_names,
        "same": meshes.mesh(2) is meshes.mesh(2),
        "error": message_of(ValueError, lambda: meshes.mesh(3)),
    }


def test_meshes():
    case = outcome()[0]["mesh"]
    assert case["shapes"] == {1: (4, 1), 2: (2, 2), 4: (4,)}
    assert case["names"] == ("replicate", "shard") and case["same"]
    assert case["error"] == "shard_size=3 does not divide the world size 4; use 1, 2, 4."


def test_meshes_need_a_process_group():
    with pytest.raises(ValueError, match="torchrun"):
        Meshes("cpu")


def refusals_case(meshes: Meshes) -> dict[str, str]:
    model, units, plan = sharded(meshes, "zero3")
    fresh = tiny_model("gpt2")
    strange = (*units[:-1], replace(units[-1], module_names=("nowhere",)))
    strange_plan = plan_of(strange, meshes.world_size, "zero3")
    return {
        "twice": message_of(OSDPError, lambda: apply_plan(model, plan, units, meshes=meshes)),
        "world": message_of(PlanError, lambda: apply_plan(fresh, replace(plan, world_size=8), units, meshes=meshes)),
        "model": message_of(PlanError, lambda: apply_plan(fresh, replace(plan, model_fingerprint="0"), units, meshes=meshes)),
        "module": message_of(PlanError, lambda: apply_plan(fresh, strange_plan, strange, meshes=meshes)),
        "untouched": str(any("FSDP" in type(module).__name__ for module in fresh.modules())),
    }


def test_what_cannot_be_applied_is_refused_before_anything_is_sharded():
    case = outcome()[0]["refusals"]
    assert "sharded by FSDP2 already" in case["twice"]
    assert "The plan is for 8 processes, but 4 are running." in case["world"]
    assert "fingerprint" in case["model"]
    assert "module 'nowhere'" in case["module"]
    assert case["untouched"] == "False"


# --------------------------------------------------------------------------------------------------- optimizers, state


def rebind_case(meshes: Meshes) -> dict[str, Any]:
    model = tiny_model("gpt2")
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.25}, {"params": rest, "lr": 0.5, "weight_decay": 0.0}], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    names = parameter_names(model)
    before = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    release_parameters(optimizer, names)
    units = find_units(model)
    apply_plan(model, plan_of(units, meshes.world_size, "mixed"), units, meshes=meshes)
    rebind_parameters(optimizer, names, model)
    new = parameter_names(model)
    after = [[new[p] for p in group["params"]] for group in optimizer.param_groups]
    tiny_loss(model, my_batch()).backward()
    start = full_state_dict(model)
    optimizer.step()
    scheduler.step()
    end = full_state_dict(model)
    return {
        "before": before, "after": after, "moved": sum(not torch.equal(start[name], end[name]) for name in start), "tensors": len(start),
        "groups": [{key: group[key] for key in ("lr", "weight_decay", "initial_lr")} for group in optimizer.param_groups],
        "with state": message_of(OSDPError, lambda: rebind_parameters(optimizer, names, model)),
    }  # fmt: skip


def test_an_optimizer_made_before_sharding_keeps_its_groups():
    case = outcome()[0]["rebind"]
    assert case["before"] == case["after"]
    assert case["groups"] == [{"lr": 5e-4, "weight_decay": 0.25, "initial_lr": 1e-3}, {"lr": 0.25, "weight_decay": 0.0, "initial_lr": 0.5}]
    assert case["moved"] == case["tensors"]
    assert "has taken steps" in case["with state"]


def full_state_case(meshes: Meshes) -> dict[str, Any]:
    model, _, _ = sharded(meshes, "mixed", model_name="bert")
    state = full_state_dict(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tiny_loss(model, my_batch()).backward()
    optimizer.step()
    other, _, _ = sharded(meshes, "zero2", model_name="bert", seed=9)
    load_full_state_dict(other, state)
    again = full_state_dict(other)
    return {"state": state, "equal": all(torch.equal(state[name], again[name]) for name in state), "size": len(again)}


def test_the_full_state_is_that_of_the_plain_model():
    cases = [found["full state"] for found in outcome()]
    state, plain = cases[0]["state"], tiny_model("bert")
    assert [case["size"] for case in cases] == [len(plain.state_dict()), 0, 0, 0]
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items()), "a later step changed the copies"
    assert cases[0]["equal"]
    other = tiny_model("bert", seed=9)
    other.load_state_dict(state, strict=True)
    assert state["cls.predictions.decoder.weight"].data_ptr() == state["bert.embeddings.word_embeddings.weight"].data_ptr()


def unequal_case(meshes: Meshes) -> dict[str, Any]:
    model, _, _ = sharded(meshes, "replicate", seed=dist.get_rank())
    odd = torch.nn.Linear(3, 2).double()
    odd.register_buffer("flag", torch.tensor(dist.get_rank() == 0))
    odd.register_buffer("count", torch.tensor([dist.get_rank()], dtype=torch.int16))
    odd.weight.data = odd.weight.data.t().contiguous().t().mul(dist.get_rank())
    broadcast_parameters(odd)
    other = torch.nn.Linear(2 + dist.get_rank() // 3, 2)
    return {
        "local": {name: p._local_tensor.detach() for name, p in model.named_parameters()},
        "odd": [odd.flag, odd.count, odd.weight.detach().abs().sum()],
        "other": message_of(PlanMismatchError, lambda: broadcast_parameters(other)),
    }


def test_unequal_initial_weights_become_those_of_rank_0():
    plain = tiny_model("gpt2", seed=0)
    for found in outcome():
        case = found["unequal weights"]
        assert all(torch.equal(case["local"][name], p) for name, p in plain.named_parameters())
        assert [t.item() for t in case["odd"]] == [True, 0, 0.0]
        assert "the hash of the model's tensors is " in case["other"] and " on rank 3" in case["other"]


def meta_case() -> dict[str, Any]:
    """A tensor that is on meta on one rank only is left out on all."""
    model = torch.nn.ModuleDict({"new": torch.nn.Linear(2, 2), "old": torch.nn.Linear(2, 2)})
    torch.nn.init.constant_(model["old"].weight, dist.get_rank() + 1)
    if dist.get_rank():
        model["new"].to("meta")
    broadcast_parameters(model)
    return {"old": model["old"].weight.detach().unique().tolist(), "meta": model["new"].weight.is_meta}


def test_parameters_on_meta_are_not_broadcast():
    assert [found["meta"] for found in outcome()] == [{"old": [1.0], "meta": rank > 0} for rank in range(WORLD_SIZE)]


def freeze(model: torch.nn.Module) -> torch.nn.Module:
    """Whole blocks, one with a single trainable bias, and the embedding that is shared with the head."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("transformer.h.2", "transformer.ln_f")) or name == "transformer.h.1.mlp.c_fc.bias")
    return model


def frozen_case(meshes: Meshes) -> dict[str, Any]:
    model = freeze(tiny_model("gpt2"))
    units = find_units(model)
    plan = plan_of(units, meshes.world_size, "mixed")
    apply_plan(model, plan, units, meshes=meshes)
    verify_applied(model, plan, units)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    tiny_loss(model, my_batch()).backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return {"norm": norm.item(), "state": full_state_dict(model)}


def test_frozen_parameters_stay_and_the_others_train():
    model = freeze(tiny_model("gpt2"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    tiny_loss(model, tiny_batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
    optimizer.step()
    case = outcome()[0]["frozen"]
    assert abs(case["norm"] - norm) < 1e-13
    assert max((case["state"][name] - value).abs().max().item() for name, value in model.state_dict().items()) < 1e-12


def offload_case(meshes: Meshes) -> dict[str, Any]:
    model = tiny_model("gpt2")
    units = find_units(model)
    plan = plan_of(units, meshes.world_size, "mixed")
    plan = replace(plan, units=tuple(replace(unit, on_host=True) for unit in plan.units))
    apply_plan(model, plan, units, meshes=meshes)
    verify_applied(model, plan, units)
    tiny_loss(model, my_batch()).backward()
    return {"norm": clip_grad_norm_(model.parameters(), 1.0).item()}


def test_offloaded_units_give_the_same_gradients():
    model = tiny_model("gpt2")
    tiny_loss(model, tiny_batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert all(abs(found["offload"]["norm"] - norm) < 1e-13 for found in outcome())
