"""Trainers whose data comes later or whose model runs one sample only; what scripts see in folder and callbacks."""

from __future__ import annotations

import io

import pytest
import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainingArguments

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
        given["osdp"] = {"memory_limit": "1GiB", "hardware": "cpu", "compare": False, **given.get("osdp", {})}
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


def test_plan_for_evaluation_trains_with_micro_batch_of_arguments_only(tmp_path):
    trainer = made(tmp_path, eval_dataset=rows(2), osdp={"micro_batch_size": 1})
    trainer.evaluate()
    trainer.train_dataset = rows()
    with pytest.raises(ValueError, match="planned to evaluate, since it had no train_dataset, with 1 samples at once"):
        trainer.train()


class Pickles(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        torch.save(model, io.BytesIO())


def test_each_training_is_measured_and_its_model_can_be_pickled(tmp_path):
    trainer = made(tmp_path, train_dataset=rows(), callbacks=[Pickles()])
    trainer.train()
    first = trainer.accelerator.measured
    trainer.train()
    assert trainer.accelerator.measured is not first and first.steps == trainer.accelerator.measured.steps == 1


class OneSample(nn.Module):
    """Runs a batch of one sample, and no other."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids, labels=None):
        hidden = self.table(input_ids).reshape(LENGTH, 8)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels.reshape(LENGTH)), "logits": logits[None]}


def test_model_for_one_sample_is_planned_with_micro_batch_one(tmp_path):
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = made(tmp_path, model=OneSample(), arguments=one, train_dataset=rows())
    trainer.train()
    assert (trainer.plan.micro_batch_size, trainer.plan.accumulation_steps, trainer.state.global_step) == (1, 2, 1)


def test_scripts_find_only_their_own_callbacks_and_no_report(tmp_path):
    trainer = made(tmp_path / "out", train_dataset=rows(), osdp={"report": False})
    stock = made(tmp_path / "stock", transformers.Trainer, train_dataset=rows())
    kinds = [[type(one) for one in each.callback_handler.callbacks] for each in (trainer, stock)]
    assert kinds[0] == kinds[1] and type(trainer.callback_handler) is type(stock.callback_handler)
    trainer.train()
    assert not (tmp_path / "out" / "osdp_report.json").exists()
    with pytest.raises(ValueError, match=r"No valid checkpoint found in output directory \("):
        trainer.train(resume_from_checkpoint=True)
