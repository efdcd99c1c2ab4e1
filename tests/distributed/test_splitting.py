"""Operators in slices under mixed plans: training, fewer gathered bytes, checkpoints without slices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hf_osdp.checkpoint.states import load_model, load_optimizer, save_model, save_optimizer
from hf_osdp.distributed.fsdp_internals import parameter_groups
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.parts import part_names
from hf_osdp.modeling.split.deferred_logits import DeferredLogits
from hf_osdp.modeling.split.names import is_split
from hf_osdp.modeling.split.operators import split_operators
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.optimizer_steps import parameter_names, rebind_parameters
from hf_osdp.sharding.state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from tests.helpers.checkpointed import worst
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model
from tests.helpers.read_back import verify_applied
from tests.helpers.training import Trained, assert_trained_alike, train_sharded, train_whole, wrap_blocks

STEPS, LAYERS, WORLD = 3, 2, 2
OPERATORS = {
    "gpt2": (
        "lm_head",
        "transformer.h.0.mlp.c_fc",
        "transformer.h.0.mlp.c_proj",
        "transformer.h.1.attn.c_attn",
    ),  # lm_head: tied
    "llama": ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"),
}


def split_model(name: str, slices: int, *, seed: int = 0) -> nn.Module:
    model = tiny_model(name, seed=seed, layers=LAYERS)
    if slices > 1:
        split_operators(model, [OperatorSplit(fqn=fqn, slices=slices) for fqn in OPERATORS[name]])
    return model


def sharded(
    name: str, slices: int, layout: str, *, seed: int = 0, checkpointing: bool = False, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Plan]:
    """A model in slices under a plan; its optimizer is made from the whole model and bound afterwards."""
    model = split_model(name, slices, seed=seed)
    if checkpointing:
        wrap_blocks(model)
    units = find_units(model)
    plan = plan_of(units, WORLD, layout, **options)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    verify_applied(model, plan, units)
    whole = tiny_model(name, layers=LAYERS)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, fused=True)
    rebind_parameters(optimizer, parameter_names(whole), model)
    return model, optimizer, plan


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a head in slices, or of whole logits in their dtype: transformers' own is in float32."""
    if is_split(model):
        out = model(**batch)
        assert isinstance(out.logits, DeferredLogits)
        return out.loss
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, steps: range = range(STEPS)) -> Trained:
    return train_sharded(model, plan, loss_of=loss_of, optimizer=optimizer, steps=steps)


def train_alone(name: str, steps: int = STEPS) -> Trained:
    """The reference: torch alone, one process, whole operators."""
    return train_whole(tiny_model(name, layers=LAYERS), loss_of=loss_of, steps=steps, lr=1e-2)


@pytest.mark.on_ranks(WORLD, shared=True)
def test_operators_in_slices_train_as_one_process():
    for name, slices, layout, options in (
        ("gpt2", 3, "mixed", {}),
        ("gpt2", 2, "mixed", {"accumulation_steps": 2}),
        ("gpt2", 4, "zero3", {"accumulation_steps": 2, "reduce_every_micro_step": False}),
        ("gpt2", 2, "zero3", {"checkpointing": True}),
        ("llama", 4, "mixed", {}),
    ):
        assert_trained_alike(train(*sharded(name, slices, layout, **options)), lambda name=name: train_alone(name))


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, int]]:
    """Most bytes that slices show unsharded at once, and most of them."""
    groups = [group for name in part_names(model) for group in parameter_groups(model.get_submodule(name))]
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


@pytest.mark.on_ranks(WORLD, shared=True)
def test_one_slice_is_gathered_at_once():
    """In forward and backward, with every unit freed after use; GPT-2's lookup and head share the slices."""
    for name, slices in (("gpt2", 4), ("llama", 2)):
        whole = tiny_model(name, layers=LAYERS)
        largest = max(
            sum(p.numel() * p.itemsize for p in whole.get_submodule(fqn).parameters()) for fqn in OPERATORS[name]
        )
        model, optimizer, plan = sharded(name, slices, "zero3")
        with watched(model) as seen:
            train(model, optimizer, plan, range(1))
        assert seen["slices"] == 1
        assert largest / slices <= seen["bytes"] < largest / slices * 1.1  # the first slices of 61 rows have one more


@pytest.mark.on_ranks(WORLD, shared=True)
def test_full_states_do_not_show_the_slices():
    """Four slices, saved whole, then two in another layout."""
    model, optimizer, plan = sharded("gpt2", 4, "mixed")
    train(model, optimizer, plan, range(2))
    weights, state = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        whole = {name: parameter.shape for name, parameter in tiny_model("gpt2", layers=LAYERS).named_parameters()}
        assert {name: own["exp_avg"].shape for name, own in state["state"].items()} == whole
    other, optimizer, plan = sharded("gpt2", 2, "zero3", seed=3)
    load_full_state_dict(other, weights)
    load_full_optimizer_state_dict(other, optimizer, state)
    got = train(other, optimizer, plan, range(2, 4)).parameters
    assert dist.get_rank() or worst(got, train_alone("gpt2", 4).parameters) < 1e-12
    wrong = {**weights, "lm_head.weight": torch.zeros(3, 3)} if dist.get_rank() == 0 else {}
    with pytest.raises(RuntimeError, match=r"'lm_head\.weight' has shape"):  # on every rank
        load_full_state_dict(other, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.on_ranks(WORLD)
def test_saved_states_go_on_in_any_number_of_slices(is_sharded, tmp_path):
    model, optimizer, plan = sharded("gpt2", 4, "mixed")
    train(model, optimizer, plan, range(2))
    save_model(tmp_path, model, sharded=is_sharded)
    save_optimizer(tmp_path, model, optimizer, sharded=is_sharded)
    dist.barrier()
    for slices in (1, 2, 4):
        other, optimizer, plan = sharded("gpt2", slices, "zero3", seed=3)
        load_model(tmp_path, other)
        load_optimizer(tmp_path, other, optimizer)
        got = train(other, optimizer, plan, range(2, 4)).parameters
        assert dist.get_rank() or worst(got, train_alone("gpt2", 4).parameters) < 1e-12
