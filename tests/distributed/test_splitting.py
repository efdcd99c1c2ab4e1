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

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.split.apply_split import split_operators
from hf_osdp.modeling.split.names import slice_names
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import clip_grad_norm_
from hf_osdp.sharding.host_offload import parameter_groups
from hf_osdp.sharding.optimizer import parameter_names, rebind_parameters
from hf_osdp.sharding.state import full_optimizer_state_dict, full_state_dict, load_full_optimizer_state_dict, load_full_state_dict
from hf_osdp.sharding.steps import micro_step
from hf_osdp.sharding.verify import verify_applied
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.mixed import mixed_plan
from tests.helpers.models import SEQUENCE_LENGTH, tiny_batch, tiny_model
from tests.helpers.training import wrap_blocks

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
    name: str,
    slices: int,
    layout: str,
    *,
    seed: int = 0,
    accumulation_steps: int = 1,
    reduce: bool = True,
    checkpointing: bool = False,
) -> tuple[nn.Module, Plan]:
    model = split_model(name, slices, seed=seed)
    if checkpointing:
        wrap_blocks(model)
    units = find_units(model)
    plan = plan_of(units, WORLD, layout, accumulation_steps=accumulation_steps, reduce_every_micro_step=reduce)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    verify_applied(model, plan, units)
    return model, plan


def optimizer_for(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Made from the whole model, as users do, and bound to the slices afterwards."""
    whole = tiny_model(name, layers=LAYERS)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    rebind_parameters(optimizer, parameter_names(whole), model)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, steps: range) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of optimizer steps; the loss is that of the head in slices."""
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
    return losses, norms


def train_alone(name: str, steps: range) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The reference: torch alone, one process, whole operators."""
    model = tiny_model(name, layers=LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        batch = tiny_batch(step)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


# ------------------------------------------------------------------------------------------------------- what the ranks do

CASES = {
    "gpt2-mixed-3": {"name": "gpt2", "slices": 3, "layout": "mixed"},
    "gpt2-mixed-2-accumulate-reduce": {"name": "gpt2", "slices": 2, "layout": "mixed", "accumulation_steps": 2},
    "gpt2-zero3-4-accumulate-hold": {"name": "gpt2", "slices": 4, "layout": "zero3", "accumulation_steps": 2, "reduce": False},
    "gpt2-zero3-2-checkpointing": {"name": "gpt2", "slices": 2, "layout": "zero3", "checkpointing": True},
    "llama-mixed-4": {"name": "llama", "slices": 4, "layout": "mixed"},
}
RESUMED = (1, 2, 4)


def equality() -> dict[str, Any]:
    found = {}
    for case, options in CASES.items():
        model, plan = sharded(**options)
        found[case] = (*train(model, optimizer_for(model, options["name"]), plan, range(STEPS)), full_state_dict(model))
    return found


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


def peaks() -> dict[tuple[str, int], dict[str, int]]:
    """One step with every unit freed after use; of GPT-2 each slice of the vocabulary is used twice."""
    found = {}
    for name in OPERATORS:
        for slices in (2, 4):
            model, plan = sharded(name, slices, "zero3")
            with watched(model) as seen:
                train(model, optimizer_for(model, name), plan, range(1))
            found[name, slices] = seen
    return found


def full_states() -> dict[int, Any]:
    """Four slices, saved whole, then in any number of slices and another layout."""
    model, plan = sharded("gpt2", 4, "mixed")
    optimizer = optimizer_for(model, "gpt2")
    train(model, optimizer, plan, range(2))
    weights, state = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    found = {"shapes": {name: tuple(own["exp_avg"].shape) for name, own in state.get("state", {}).items()}}
    for slices in RESUMED[1:]:
        other, plan = sharded("gpt2", slices, "zero3", seed=3)
        optimizer = optimizer_for(other, "gpt2")
        load_full_state_dict(other, weights)
        load_full_optimizer_state_dict(other, optimizer, state)
        train(other, optimizer, plan, range(2, 4))
        found[slices] = full_state_dict(other)
    wrong = {**weights, "lm_head.weight": torch.zeros(3, 3)} if dist.get_rank() == 0 else {}
    with pytest.raises(RuntimeError, match=r"'lm_head\.weight' has shape"):  # on every rank
        load_full_state_dict(other, wrong)
    return found


def accelerate_states(folder: str, layout: str) -> dict[int, float]:
    """save_state in four slices, load_state in others: how far the next two steps are from those of the first."""
    from hf_osdp.integrations.accelerator import OSDPAccelerator
    from hf_osdp.integrations.plugin import OSDPPlugin
    from hf_osdp.planning.config import OSDPConfig

    def start(slices: int, seed: int):
        accelerator = OSDPAccelerator(fsdp_plugin=OSDPPlugin(osdp=OSDPConfig(), state_dict_type=layout))
        model, _ = sharded("gpt2", slices, "mixed" if seed == 0 else "zero3", seed=seed)
        return accelerator, *accelerator.prepare(model, optimizer_for(model, "gpt2"))

    accelerator, model, optimizer = start(4, 0)
    train_whole(accelerator, model, optimizer, range(2))
    accelerator.save_state(folder)
    want, found = train_whole(accelerator, model, optimizer, range(2, 4)), {}
    for slices in RESUMED:
        accelerator, model, optimizer = start(slices, 3)
        accelerator.load_state(folder)
        got = train_whole(accelerator, model, optimizer, range(2, 4))
        found[slices] = max(abs(a - b) for a, b in zip(got, want, strict=True))
    return found


def train_whole(accelerator: Any, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
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


def all_of_it(folder: str) -> dict[str, Any]:
    found = {"equality": equality(), "peaks": peaks(), "full": full_states()}
    found |= {layout: accelerate_states(f"{folder}/{layout}", layout) for layout in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")}
    return found if dist.get_rank() == 0 else {}


# ------------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    return run_ranks(all_of_it, WORLD, str(tmp_path_factory.mktemp("states")))[0]


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert set(a) == set(b)
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(results, case):
    losses, norms, weights = results["equality"][case]
    want_losses, want_norms, want = train_alone(CASES[case]["name"], range(STEPS))
    assert max(abs(a - b) for a, b in zip(losses, want_losses, strict=True)) < 1e-12
    assert max(abs(a - b) for a, b in zip(norms, want_norms, strict=True)) < 1e-12
    assert worst(weights, want) < 1e-12


@pytest.mark.parametrize("name", OPERATORS)
def test_one_slice_is_gathered_at_once(results, name):
    """In forward and backward, also where lookup and head both use a slice."""
    model = tiny_model(name, layers=LAYERS)
    operators = [list(model.get_submodule(fqn).parameters()) for fqn in OPERATORS[name]]
    largest = max(sum(p.numel() * p.itemsize for p in operator) for operator in operators)
    for slices in (2, 4):
        seen = results["peaks"][name, slices]
        assert seen["slices"] == 1
        assert largest / slices <= seen["bytes"] < largest / slices * 1.1  # the first slices of 61 rows have one more


def test_full_states_do_not_show_the_slices(results):
    _, _, want = train_alone("gpt2", range(4))
    whole = {name: tuple(parameter.shape) for name, parameter in tiny_model("gpt2", layers=LAYERS).named_parameters()}
    assert results["full"]["shapes"] == whole
    for slices in RESUMED[1:]:
        assert worst(results["full"][slices], want) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_saved_states_go_on_in_any_number_of_slices(results, layout):
    assert max(results[layout][slices] for slices in RESUMED) < 1e-12


def trainer_resumes(folder: str) -> list[list[float]]:
    """What the Trainer logs from the third step on: in four slices, and resumed in two."""
    from transformers import TrainingArguments

    from hf_osdp.integrations.trainer import Trainer
    from hf_osdp.planning.config import OSDPConfig

    data = [{"input_ids": ids, "labels": ids} for ids in tiny_batch(0)["input_ids"].repeat(4, 1)]
    options = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    found = []
    for slices, checkpoint in ((4, None), (2, f"{folder}/checkpoint-2")):
        model = split_model("gpt2", slices, seed=slices)
        plan = mixed_plan(model, WORLD, sequence_length=SEQUENCE_LENGTH, micro_batch_size=4, accumulation_steps=1, reduce=True)
        args = TrainingArguments(
            folder, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, use_cpu=True, report_to=[], seed=1, **options
        )
        trainer = Trainer(model=model, args=args, train_dataset=data, osdp=OSDPConfig(plan=plan))
        trainer.train(resume_from_checkpoint=checkpoint)
        logged = [entry for entry in trainer.state.log_history if entry["step"] > 2]
        found.append([entry[key] for entry in logged for key in ("loss", "grad_norm") if key in entry])
    return found


@pytest.mark.slow
def test_the_trainer_resumes_in_another_number_of_slices(tmp_path):
    want, got = run_ranks(trainer_resumes, WORLD, str(tmp_path), init=False)[0]
    assert len(want) == 4
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 1e-12
