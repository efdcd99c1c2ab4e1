"""Trainers whose data comes later or whose model runs one sample only; what scripts see in folder and callbacks."""

from __future__ import annotations

import io

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import prune
from transformers import TrainerCallback

from hf_osdp.errors import PlanError
from hf_osdp.integrations.trainer import Trainer
from tests.helpers.models import tiny_model
from tests.helpers.trainers import small_trainer, token_rows


def test_without_data_the_plan_is_made_when_data_comes(tmp_path):
    trainer, stock = small_trainer(tmp_path), small_trainer(tmp_path, transformers.Trainer)
    assert trainer.plan is None and trainer.model is not None
    predicted = trainer.predict(token_rows(3))
    assert trainer.plan is not None and trainer.plan.sequence_length == 12
    assert (predicted.predictions == stock.predict(token_rows(3)).predictions).all()
    later = small_trainer(tmp_path)
    later.train_dataset = token_rows()
    later.train()
    assert later.plan.global_batch_size == 2 and later.state.global_step == 1
    with pytest.raises(ValueError, match=r"training requires a train_dataset"):
        small_trainer(tmp_path).train()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([], "The dataset has no rows"),
        ([{"input_ids": row["input_ids"]} for row in token_rows()], "Batches have input_ids and none of labels"),
        ([{"input_ids": [1] * n, "labels": [1] * n} for n in (3, 5)], "Rows of the dataset make no batch .ValueError"),
    ],
    ids=["no rows", "no labels", "two lengths"],
)
def test_data_that_makes_no_batch_is_refused_before_planning(tmp_path, data, line):
    given = {"train_dataset": data, "data_collator": transformers.default_data_collator}
    with pytest.raises(ValueError, match=line):
        small_trainer(tmp_path, **given).train()


def test_plan_for_evaluation_trains_with_micro_batch_of_arguments_only(tmp_path):
    trainer = small_trainer(tmp_path, eval_dataset=token_rows(2), osdp={"micro_batch_size": 1})
    trainer.evaluate()
    trainer.train_dataset = token_rows()
    with pytest.raises(ValueError, match="planned to evaluate, since it had no train_dataset, with 1 samples at once"):
        trainer.train()


class Line(nn.Module):
    """No transformers model, with a `config` of its own."""

    def __init__(self):
        super().__init__()
        self.config, self.line = None, nn.Linear(1, 1, dtype=torch.float64)
        nn.init.ones_(self.line.weight), nn.init.zeros_(self.line.bias)

    def forward(self, x, labels):
        found = self.line(x[:, None])[:, 0]
        return nn.functional.mse_loss(found, labels), found


def pruned():
    model = tiny_model("llama", layers=1)
    for layer in model.model.layers:
        prune.l1_unstructured(layer.mlp.down_proj, "weight", amount=0.5)
    return model


POINTS = [{"x": x, "labels": 2 * x + 3} for x in torch.linspace(0, 1, 8, dtype=torch.float64)]


@pytest.mark.parametrize(("make", "data"), [(pruned, token_rows()), (Line, POINTS)], ids=["pruned", "no config"])
def test_model_that_is_unlike_those_of_transformers_trains_as_in_stock(tmp_path, make, data):
    """Modules of the pruned one hold weights with a history."""
    steps = {"max_steps": 3, "logging_steps": 1}

    def trained(kind):
        trainer = small_trainer(tmp_path, kind, make(), train_dataset=data, arguments=steps)
        trainer.train()
        lines = [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]
        return lines, [parameter.tolist() for parameter in trainer.model.parameters()]

    assert trained(Trainer) == trained(transformers.Trainer)


class Pickles(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        torch.save(model, io.BytesIO())


def test_each_training_is_measured_and_its_model_can_be_pickled_but_not_changed(tmp_path):
    trainer = small_trainer(tmp_path, train_dataset=token_rows(), callbacks=[Pickles()])
    trainer.train()
    first = trainer.accelerator.measured
    trainer.train()
    assert trainer.accelerator.measured is not first and first.steps == trainer.accelerator.measured.steps == 1
    trainer.model.transformer.h.requires_grad_(False)
    with pytest.raises(PlanError, match=r"is float64 \[.*\], frozen, but was"):
        trainer.train()


CHANGES = {
    r"transformer.wte.weight is float64 \[70, 20\], but was float64 \[61, 20\]":
        lambda model: model.resize_token_embeddings(70) and model,
    r"transformer.* is float32 \[.*\], but was float64 \[.*\];": lambda model: model.float(),
    r"transformer.* is absent, but was float64": lambda model: peft.get_peft_model(model, peft.LoraConfig()),
}  # fmt: skip


@pytest.mark.parametrize("line", CHANGES, ids=["resized", "cast", "adapted"])
def test_model_that_changes_after_its_plan_was_made_is_refused(tmp_path, line):
    trainer = small_trainer(tmp_path, train_dataset=token_rows())
    assert trainer.plan is not None
    trainer.model = trainer.model_wrapped = CHANGES[line](trainer.model)
    with pytest.raises(PlanError, match=f"^The model has changed since it was planned: {line}"):
        trainer.train()
