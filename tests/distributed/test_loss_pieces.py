"""The loss in pieces under mixed plans trains as one process does with whole logits, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import TrainingArguments

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.loss_pieces import heads_in_pieces, loss_in_pieces
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.split import ModelSplit
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.sharding.apply import apply_plan, verify_applied
from hf_osdp.sharding.gradients import clip_grad_norm_
from hf_osdp.sharding.optimizer import parameter_names, rebind_parameters
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step
from tests.helpers.layouts import mixed_plan, plan_of
from tests.helpers.models import SEQUENCE_LENGTH, tiny_batch, tiny_model
from tests.helpers.training import Trained, assert_trained_alike

WORLD, STEPS, LAYERS, MAX_NORM = 2, 3, 2, 0.5


def loss_of_logits(logits, labels, vocab_size, **_):
    """transformers' own goes through float32."""
    return F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1))


def model_of(name: str) -> nn.Module:
    model = tiny_model(name, layers=LAYERS)
    if name != "bert":
        model.loss_function = loss_of_logits
    return model


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], *, reads: bool) -> torch.Tensor:
    """The model's own loss; with `reads`, a penalty on its logits as well."""
    out = model(**batch)
    return out.loss + 0.01 * (out.logits.square().mean() if reads else 0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, *, reads: bool) -> Trained:
    steps, losses, norms = plan.accumulation_steps, [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in range(steps):
            with micro_step(model, is_last=part == steps - 1, plan=plan):
                loss = loss_of(model, tiny_batch(step, part=part * WORLD + dist.get_rank(), parts=WORLD * steps), reads=reads)
                (loss / steps).backward()
            total += loss.detach() / steps
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD)
    return Trained(losses=tuple(losses), norms=tuple(norms), parameters=full_state_dict(model))


def train_alone(name: str, *, reads: bool) -> Trained:
    """The reference: torch alone, one process, whole logits."""
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, tiny_batch(step), reads=reads)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses=tuple(losses), norms=tuple(norms), parameters=model.state_dict())


@pytest.mark.parametrize(
    ("name", "layout", "options", "reads"),
    [
        ("gpt2", "mixed", {"accumulation_steps": 2}, False),
        pytest.param("gpt2", "everything", {"accumulation_steps": 2, "reduce_every_micro_step": False}, False, marks=pytest.mark.slow),
        ("llama", "zero3", {}, True),
        ("gpt2", "compiled", {}, False),
        pytest.param("bert", "mixed", {"accumulation_steps": 2}, False, marks=pytest.mark.slow),
        ("bert", "zero3", {}, True),
    ],
)
@pytest.mark.on_ranks(WORLD)
def test_loss_in_pieces_trains_as_one_process(name, layout, options, reads):
    model = model_of(name)
    loss_in_pieces(model, 5)
    units = find_units(model)
    plan = plan_of(units, WORLD, layout, **options)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    verify_applied(model, plan, units)
    whole = tiny_model(name, layers=LAYERS)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    rebind_parameters(optimizer, parameter_names(whole), model)
    tolerance = 1e-9 if layout == "compiled" else 1e-12
    assert_trained_alike(train(model, optimizer, plan, reads=reads), lambda: train_alone(name, reads=reads), tolerance)


@pytest.mark.on_ranks(WORLD, init=False)
def test_trainer_logs_and_evaluates_as_with_whole_logits(tmp_path):
    """With micro-steps, labels that do not count, and metrics that read logits in evaluation; the Trainer's loss is in float32."""
    ids = tiny_batch(0)["input_ids"].repeat(4, 1)
    data = [{"input_ids": row, "labels": row.where(row > turn, -100)} for turn, row in enumerate(ids)]
    found = []
    for pieces in (1, 5):
        model = tiny_model("llama", layers=LAYERS)
        plan = mixed_plan(model, WORLD, sequence_length=SEQUENCE_LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=True)
        args = TrainingArguments(
            str(tmp_path / str(pieces)), per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1,
            use_cpu=True, report_to=[], seed=1, save_strategy="no", max_steps=3,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=args, train_dataset=data, eval_dataset=data[:6],
            osdp=OSDPConfig(plan=replace(plan, split=ModelSplit(loss_pieces=pieces))),
            compute_metrics=lambda given: {"largest": float(given.predictions.max())},
        )  # fmt: skip
        trainer.train()
        metrics = trainer.evaluate()
        assert bool(list(heads_in_pieces(trainer.model))) == (pieces > 1)
        logged = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
        found.append([*logged, metrics["eval_loss"], metrics["eval_largest"]])
    assert len(found[0]) == 8 and found[1] == pytest.approx(found[0], rel=2e-6)
