"""Trainers whose data comes later or whose model runs one sample only; what scripts see in folder and callbacks."""

from __future__ import annotations

import io

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import prune
from transformers import TrainerCallback, TrainingArguments

from hf_osdp.errors import PlanError
from hf_osdp.integrations.trainer import Trainer
from tests.helpers.models import tiny_model

LENGTH = 12


def rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 61, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def made(folder, kind=Trainer, model=None, *, arguments=None, **given):
    small = {"use_cpu": True, "report_to": "none", "max_steps": 1, "save_strategy": "no"}
    args = TrainingArguments(str(folder), **{**small, "per_device_train_batch_size": 2, **(arguments or {})})
    if kind is Trainer:
        given["osdp"] = {"memory_limit": "1GiB", "hardware": "cpu", **given.get("osdp", {})}
    return kind(model=tiny_model("gpt2", layers=1) if model is None else model, args=args, **given)


def test_without_data_the_plan_is_made_when_data_comes(tmp_path):
    trainer, stock = made(tmp_path), made(tmp_path, transformers.Trainer)
    assert trainer.plan is None and trainer.model is not None
    predicted = trainer.predict(rows(3))
    assert trainer.plan is not None and trainer.plan.sequence_length == LENGTH
    assert (predicted.predictions == stock.predict(rows(3)).predictions).all()
    later = made(tmp_path)
    later.train_dataset = rows()
    later.train()
    assert later.plan.global_batch_size == 2 and later.state.global_step == 1
    with pytest.raises(ValueError, match=r"training requires a train_dataset"):
        made(tmp_path).train()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([], "The dataset has no rows"),
        ([{"input_ids": row["input_ids"]} for row in rows()], "Batches have input_ids and none of labels"),
        ([{"input_ids": [1] * n, "labels": [1] * n} for n in (3, 5)], "Rows of the dataset make no batch .ValueError"),
    ],
)
def test_data_that_makes_no_batch_is_refused_before_planning(tmp_path, data, line):
    given = {"train_dataset": data, "data_collator": transformers.default_data_collator}
    with pytest.raises(ValueError, match=line):
        made(tmp_path, **given).train()


def test_plan_for_evaluation_trains_with_micro_batch_of_arguments_only(tmp_path):
    trainer = made(tmp_path, eval_dataset=rows(2), osdp={"micro_batch_size": 1})
    trainer.evaluate()
    trainer.train_dataset = rows()
    with pytest.raises(ValueError, match="planned to evaluate, since it had no train_dataset, with 1 samples at once"):
        trainer.train()


def test_pruned_model_whose_modules_hold_weights_with_a_history_trains_as_in_stock(tmp_path):
    def loss(kind):
        model = tiny_model("llama", layers=2)
        for layer in model.model.layers:
            prune.l1_unstructured(layer.mlp.down_proj, "weight", amount=0.5)
        trainer = made(tmp_path, kind, model, train_dataset=rows(), arguments={"max_steps": 3, "logging_steps": 1})
        trainer.train()
        return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]

    assert loss(Trainer) == loss(transformers.Trainer)


class Pickles(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        torch.save(model, io.BytesIO())


def test_each_training_is_measured_and_its_model_can_be_pickled(tmp_path):
    trainer = made(tmp_path, train_dataset=rows(), callbacks=[Pickles()])
    trainer.train()
    first = trainer.accelerator.measured
    trainer.train()
    assert trainer.accelerator.measured is not first and first.steps == trainer.accelerator.measured.steps == 1


class Line(nn.Module):
    """No transformers model, with a `config` of its own."""

    def __init__(self, config):
        super().__init__()
        self.config, self.line = config, nn.Linear(1, 1, dtype=torch.float64)
        nn.init.ones_(self.line.weight), nn.init.zeros_(self.line.bias)

    def forward(self, x, labels):
        found = self.line(x[:, None])[:, 0]
        return nn.functional.mse_loss(found, labels), found


def test_model_whose_config_is_none_trains_as_stock(tmp_path):
    points = [{"x": x, "labels": 2 * x + 3} for x in torch.linspace(0, 1, 8, dtype=torch.float64)]
    trained = []
    for kind in (Trainer, transformers.Trainer):
        trainer = made(tmp_path, kind, Line(None), train_dataset=points, arguments={"max_steps": 3})
        trained += [trainer.train().training_loss, [p.item() for p in trainer.model.parameters()]]
    assert trained[:2] == trained[2:]


def freeze(model):
    model.transformer.h.requires_grad_(False)


def resize(model):
    model.resize_token_embeddings(70)


CHANGES = {
    r"transformer.wte.weight is float64 \[70, 20\], but was float64 \[61, 20\]": resize,
    r"transformer.h.0.* is float64 \[.*\], frozen, but was float64 \[.*\];": freeze,
    r"transformer.* is float32 \[.*\], but was float64 \[.*\];": lambda model: model.float(),
    r"transformer.* is absent, but was float64": lambda model: peft.get_peft_model(model, peft.LoraConfig()),
}


@pytest.mark.parametrize("line", CHANGES)
def test_model_that_changes_after_its_plan_was_made_is_refused(tmp_path, line):
    trainer = made(tmp_path, train_dataset=rows())
    assert trainer.plan is not None
    trainer.model = trainer.model_wrapped = CHANGES[line](trainer.model) or trainer.model
    with pytest.raises(PlanError, match=f"^The model has changed since it was planned: {line}"):
        trainer.train()


def test_model_that_changes_between_trainings_is_refused(tmp_path):
    trainer = made(tmp_path, train_dataset=rows())
    trainer.train()
    trainer.train()
    freeze(trainer.model)
    with pytest.raises(PlanError, match=r"is float64 \[.*\], frozen, but was"):
        trainer.train()
