"""Operators in slices under mixed plans: one process' training, fewer gathered bytes, checkpoints that do not show the slices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import TrainingArguments

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plugin import OSDPPlugin
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.split.apply_split import split_operators
from hf_osdp.modeling.split.names import slice_names
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.sharding.apply import apply_plan, verify_applied
from hf_osdp.sharding.environment import parameter_groups
from hf_osdp.sharding.gradients import clip_grad_norm_
from hf_osdp.sharding.optimizer import parameter_names, rebind_parameters
from hf_osdp.sharding.state import full_optimizer_state_dict, full_state_dict, load_full_optimizer_state_dict, load_full_state_dict
from hf_osdp.sharding.steps import micro_step
from tests.helpers.checkpointed import worst
from tests.helpers.layouts import mixed_plan, plan_of
from tests.helpers.models import SEQUENCE_LENGTH, tiny_batch, tiny_model
from tests.helpers.training import Trained, assert_trained_alike, wrap_blocks

STEPS, MAX_NORM, LAYERS, WORLD = 3, 0.5, 2, 2
OPERATORS = {
    "gpt2": ("lm_head", "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj", "transformer.h.1.attn.c_attn"),  # lm_head: tied
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
    """A model in slices under a plan; its optimizer is made from the whole model, as users do, and bound to the slices afterwards."""
    model = split_model(name, slices, seed=seed)
    if checkpointing:
        wrap_blocks(model)
    units = find_units(model)
    plan = plan_of(units, WORLD, layout, **options)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    verify_applied(model, plan, units)
    whole = tiny_model(name, layers=LAYERS)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    rebind_parameters(optimizer, parameter_names(whole), model)
    return model, optimizer, plan


def train(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, steps: range = range(STEPS)) -> Trained:
    """Train by the loss that the head in slices gives."""
    k, losses, norms = plan.accumulation_steps, [], []
    for step in steps:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in range(k):
            with micro_step(model, is_last=part == k - 1, plan=plan):
                out = model(**tiny_batch(step, part=part * WORLD + dist.get_rank(), parts=WORLD * k))
                assert out.logits is None
                (out.loss / k).backward()
            total += out.loss.detach() / k
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD)
    return Trained(losses=tuple(losses), norms=tuple(norms), parameters=full_state_dict(model))


def train_alone(name: str, steps: int = STEPS) -> Trained:
    """The reference: torch alone, one process, whole operators."""
    model = tiny_model(name, layers=LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        batch = tiny_batch(step)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses=tuple(losses), norms=tuple(norms), parameters=model.state_dict())


@pytest.mark.parametrize(
    ("name", "slices", "layout", "options"),
    [
        ("gpt2", 3, "mixed", {}),
        ("gpt2", 2, "mixed", {"accumulation_steps": 2}),
        ("gpt2", 4, "zero3", {"accumulation_steps": 2, "reduce_every_micro_step": False}),
        ("gpt2", 2, "zero3", {"checkpointing": True}),
        ("llama", 4, "mixed", {}),
    ],
)
@pytest.mark.on_ranks(WORLD)
def test_operators_in_slices_train_as_one_process(name, slices, layout, options):
    assert_trained_alike(train(*sharded(name, slices, layout, **options)), lambda: train_alone(name))


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, int]]:
    """Most bytes that slices show unsharded at once, and most of them."""
    groups = [group for name in slice_names(model) for group in parameter_groups(model.get_submodule(name))]
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


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.on_ranks(WORLD)
def test_one_slice_is_gathered_at_once(name):
    """In forward and backward, with every unit freed after use; of GPT-2, lookup and head both use each slice of the vocabulary."""
    whole = tiny_model(name, layers=LAYERS)
    largest = max(sum(p.numel() * p.itemsize for p in whole.get_submodule(fqn).parameters()) for fqn in OPERATORS[name])
    for slices in (2, 4):
        model, optimizer, plan = sharded(name, slices, "zero3")
        with watched(model) as seen:
            train(model, optimizer, plan, range(1))
        assert seen["slices"] == 1
        assert largest / slices <= seen["bytes"] < largest / slices * 1.1  # the first slices of 61 rows have one more


@pytest.mark.on_ranks(WORLD)
def test_full_states_do_not_show_the_slices():
    """Four slices, saved whole, then in any number of slices and another layout."""
    model, optimizer, plan = sharded("gpt2", 4, "mixed")
    train(model, optimizer, plan, range(2))
    weights, state = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        whole = {name: parameter.shape for name, parameter in tiny_model("gpt2", layers=LAYERS).named_parameters()}
        assert {name: own["exp_avg"].shape for name, own in state["state"].items()} == whole
    for slices in (2, 4):
        other, optimizer, plan = sharded("gpt2", slices, "zero3", seed=3)
        load_full_state_dict(other, weights)
        load_full_optimizer_state_dict(other, optimizer, state)
        got = train(other, optimizer, plan, range(2, 4)).parameters
        assert dist.get_rank() or worst(got, train_alone("gpt2", 4).parameters) < 1e-12
    wrong = {**weights, "lm_head.weight": torch.zeros(3, 3)} if dist.get_rank() == 0 else {}
    with pytest.raises(RuntimeError, match=r"'lm_head\.weight' has shape"):  # on every rank
        load_full_state_dict(other, wrong)


def train_prepared(accelerator: OSDPAccelerator, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Steps by logits, which whole and split models both give."""
    losses = []
    for step in steps:
        batch = tiny_batch(step, part=dist.get_rank(), parts=WORLD)
        loss = nn.functional.cross_entropy(model(input_ids=batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())
        accelerator.backward(loss)
        losses += [loss.item(), accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.on_ranks(WORLD)
def test_saved_states_go_on_in_any_number_of_slices(layout, tmp_path):
    def start(slices: int, seed: int):
        accelerator = OSDPAccelerator(fsdp_plugin=OSDPPlugin(osdp=OSDPConfig(), state_dict_type=layout))
        model, optimizer, _ = sharded("gpt2", slices, "mixed" if seed == 0 else "zero3", seed=seed)
        return accelerator, *accelerator.prepare(model, optimizer)

    accelerator, model, optimizer = start(4, 0)
    train_prepared(accelerator, model, optimizer, range(2))
    accelerator.save_state(tmp_path)
    want = train_prepared(accelerator, model, optimizer, range(2, 4))
    for slices in (1, 2, 4):
        accelerator, model, optimizer = start(slices, 3)
        accelerator.load_state(tmp_path)
        assert train_prepared(accelerator, model, optimizer, range(2, 4)) == pytest.approx(want, abs=1e-12)


@pytest.mark.slow
@pytest.mark.on_ranks(WORLD, init=False)
def test_trainer_resumes_in_another_number_of_slices(tmp_path):
    """What it logs from the third step on: in four slices, and resumed in two."""
    data = [{"input_ids": ids, "labels": ids} for ids in tiny_batch(0)["input_ids"].repeat(4, 1)]
    found = []
    for slices, checkpoint in ((4, None), (2, str(tmp_path / "checkpoint-2"))):
        model = split_model("gpt2", slices, seed=slices)
        plan = mixed_plan(model, WORLD, sequence_length=SEQUENCE_LENGTH, micro_batch_size=4, accumulation_steps=1, reduce=True)
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, use_cpu=True, report_to=[], seed=1,
            fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"}, save_strategy="steps", save_steps=2, max_steps=4,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=data, osdp=OSDPConfig(plan=plan))
        trainer.train(resume_from_checkpoint=checkpoint)
        logged = [entry for entry in trainer.state.log_history if entry["step"] > 2]
        found.append([entry[key] for entry in logged for key in ("loss", "grad_norm") if key in entry])
    assert len(found[0]) == 4 and found[1] == pytest.approx(found[0], abs=1e-12)
