"""The loss in chunks under mixed plans trains as one process does with whole logits, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import TrainingArguments

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.split.apply import losses_of
from hf_osdp.modeling.split.loss_chunks import chunk_loss
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.split import ModelSplit
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.apply import apply_plan
from tests.helpers.layouts import mixed_plan, plan_of
from tests.helpers.models import SEQUENCE_LENGTH, tiny_batch, tiny_model
from tests.helpers.read_back import verify_applied
from tests.helpers.training import assert_trained_alike, train_sharded, train_whole

WORLD, LAYERS = 2, 2


def loss_of_logits(logits, labels, vocab_size, **_):
    """transformers' own goes through float32."""
    return F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1))


def model_of(name: str) -> nn.Module:
    model = tiny_model(name, layers=LAYERS)
    if name != "bert":
        model.loss_function = loss_of_logits
    return model


def loss_and_penalty(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, and a penalty on its logits."""
    out = model(**batch)
    return out.loss + 0.01 * out.logits.square().mean()


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


EVERYDAY = [
    ("gpt2", "mixed", {"accumulation_steps": 2}, own_loss),
    ("llama", "zero3", {}, loss_and_penalty),
    ("bert", "zero3", {}, loss_and_penalty),
]
SLOW = [
    ("gpt2", "compiled", {}, own_loss),
    ("gpt2", "everything", {"accumulation_steps": 2, "reduce_every_micro_step": False}, own_loss),
    ("bert", "mixed", {"accumulation_steps": 2}, own_loss),
]


@pytest.mark.parametrize("cases", [EVERYDAY, pytest.param(SLOW, marks=pytest.mark.slow)])
@pytest.mark.on_ranks(WORLD, shared=True)
def test_loss_chunks_trains_as_one_process(cases):
    meshes = Meshes("cpu")
    for name, layout, options, loss_of in cases:
        model = model_of(name)
        chunk_loss(model, 5)
        units = find_units(model)
        plan = plan_of(units, WORLD, layout, **options)
        apply_plan(model, plan, units, meshes=meshes)
        verify_applied(model, plan, units)
        trained = train_sharded(
            model, plan, loss_of=loss_of, steps=3, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        )
        alone = partial(train_whole, model_of(name), loss_of=loss_of, steps=3, lr=1e-2)
        assert_trained_alike(trained, alone, 1e-9 if layout == "compiled" else 1e-12)


@pytest.mark.slow
@pytest.mark.on_ranks(WORLD, shared=True)
def test_trainer_logs_and_evaluates_as_with_whole_logits(tmp_path):
    """With micro-steps, labels that do not count, and metrics that read logits; the loss is in float32."""
    ids = tiny_batch(0)["input_ids"].repeat(4, 1)
    data = [{"input_ids": row, "labels": row.where(row > turn, -100)} for turn, row in enumerate(ids)]
    found = []
    for chunks in (1, 5):
        model = tiny_model("llama", layers=LAYERS)
        plan = mixed_plan(
            model, WORLD, sequence_length=SEQUENCE_LENGTH, micro_batch_size=2, accumulation_steps=2, reduce=True
        )
        args = TrainingArguments(
            str(tmp_path / str(chunks)), per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-2, logging_steps=1,
            use_cpu=True, report_to=[], seed=1, save_strategy="no", max_steps=3,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=args, train_dataset=data, eval_dataset=data[:6],
            osdp=OSDPConfig(plan=replace(plan, split=ModelSplit(loss_chunks=chunks))),
            compute_metrics=lambda given: {"largest": float(given.predictions.max())},
        )  # fmt: skip
        trainer.train()
        metrics = trainer.evaluate()
        assert bool(list(losses_of(trainer.model))) == (chunks > 1)
        logged = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
        found.append([*logged, metrics["eval_loss"], metrics["eval_largest"]])
    assert len(found[0]) == 8 and found[1] == pytest.approx(found[0], rel=2e-6)
