"""Losses that models have not divided by the items of a batch."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

from hf_osdp import Trainer
from hf_osdp.integrations.trainer_loss import ignores_item_count

BERT = BertConfig(
    vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
)  # fmt: skip
T5 = T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
GPT2 = GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=16)


@pytest.mark.parametrize(
    ("model", "ignores"),
    [
        (BertForSequenceClassification(BERT), True), (BertForMaskedLM(BERT), True), (T5ForConditionalGeneration(T5), True),
        (GPT2LMHeadModel(GPT2), False), (torch.nn.Linear(2, 2), False),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_models_that_give_a_mean_whatever_they_are_told(model, ignores):
    assert ignores_item_count(model) is ignores


def first_step(folder, micro_batch_size: int) -> tuple[float, float]:
    """Loss and gradient norm of one step of 8 samples."""
    torch.manual_seed(0)
    data = [{"input_ids": torch.randint(61, (8,)), "labels": torch.tensor(index % 3)} for index in range(8)]
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, max_steps=1, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    osdp = {"micro_batch_size": micro_batch_size, "sequence_length": 8, "hardware": "cpu", "compare": False}
    trainer = Trainer(model=BertForSequenceClassification(BERT), args=args, train_dataset=data, osdp=osdp)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    return logged["loss"], logged["grad_norm"]


def test_the_plans_micro_batch_does_not_change_the_gradient(tmp_path):
    assert first_step(tmp_path, 2) == pytest.approx(first_step(tmp_path, 8), rel=1e-3)
