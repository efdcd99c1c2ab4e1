"""Micro-batches of a run: left to the planner where the loss is a share of the step's, else as the arguments say."""

from __future__ import annotations

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    TrainingArguments,
    default_data_collator,
)

import hf_osdp
from hf_osdp import InfeasibleError, OSDPConfig, with_osdp
from tests.helpers.sampling import slow_but

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES["vocab_size"] = 64
CONFIG = OSDPConfig(hardware="cpu", operator_splitting=False)
LIMIT = "1536KiB"  # less than 16 samples of 32 tokens need, and more than 4


def arguments(tmp_path, **options):
    given = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    return TrainingArguments(output_dir=str(tmp_path / "out"), **{**given, **options})


def rows(count=2, length=8, label=None):
    made = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 60, (length,), generator=made) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone() if label is None else label(row)} for row in ids]


def llama(cls=LlamaForCausalLM, **options):
    torch.manual_seed(0)
    return cls(LlamaConfig(**SIZES, max_position_embeddings=64, pad_token_id=0, **options)).double()


def mixtral(**options):
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, **options))


class Mean(LlamaForCausalLM):
    """Accepts the number of items, and returns the mean of its micro-batch."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        return super().forward(input_ids=input_ids, labels=labels)


class OwnMean(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).logits.pow(2).mean()


class OwnSum(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).logits.pow(2).sum() / num_items_in_batch


class Divides(transformers.Trainer):
    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).logits.pow(2).mean() / self.args.gradient_accumulation_steps


def divided(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


BERT = BertConfig(**SIZES, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
WHOLE = "is not divided by num_items_in_batch"


class OwnStep(transformers.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class Between(transformers.TrainerCallback):
    def on_substep_end(self, *args, **kwargs):
        pass


class Noted(transformers.Trainer):
    """Takes a note from each batch, which cannot be cut with it."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {k: v for k, v in inputs.items() if k != "note"}, *args, **kwargs)


def with_note(rows):
    return {**default_data_collator(rows), "note": "text"}


with_note.__module__ = "trl.a_module"  # a package whose collators mix nothing
NOTED = {"data_collator": with_note}


def mixing(rows):
    """As mixup does."""
    batch = with_note(rows)
    return {**batch, "input_ids": torch.maximum(batch["input_ids"], batch["input_ids"].flip(0))}


ENDS = {
    "dataloader_drop_last": True, "average_tokens_across_devices": False,
    "accelerator_config": {"even_batches": False},
}  # fmt: skip
ONE_LABEL = {"train_dataset": rows(label=lambda row: torch.tensor(1))}


@pytest.mark.parametrize(("make", "base", "options", "given", "reason"), [
    (llama, None, {}, {}, None),
    (lambda: get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"])), None, {}, {}, None),
    (llama, None, {}, {"compute_loss_func": divided}, None),
    (llama, OwnSum, {}, {}, None),
    (lambda: llama(Mean), None, {}, {}, f"The loss of Mean {WHOLE}"),
    (lambda: BertForSequenceClassification(BERT), None, {}, ONE_LABEL, None),
    (llama, None, {}, {"compute_loss_func": lambda outputs, *_, **__: outputs.logits.mean()},
     f"The loss of compute_loss_func {WHOLE}"),
    (llama, OwnMean, {}, {}, f"The loss of OwnMean.compute_loss {WHOLE}"),
    (llama, OwnStep, {}, {}, "OwnStep.training_step runs for each micro-batch"),
    (llama, None, {}, {"callbacks": [Between()]}, "Between.on_substep_end runs for each micro-batch"),
    (llama, Divides, {}, {}, "It is not known whether the loss of Divides.compute_loss is divided"),
    (lambda: mixtral(output_router_logits=True), None, {}, {},
     "The loss of MixtralForCausalLM is not a sum over samples"),
    (llama, None, ENDS, {}, None),
    (llama, Noted, {}, NOTED, None),
    (llama, Noted, {}, {"data_collator": mixing}, "mixing makes batches that cannot be cut, and may mix"),
    (llama, Noted, {"dataloader_drop_last": True}, NOTED, "dataloader_drop_last=True"),
    (llama, Noted, {"average_tokens_across_devices": False}, NOTED, "average_tokens_across_devices=False"),
    (llama, Noted, {"accelerator_config": {"even_batches": False}}, NOTED, "even_batches=False"),
    (llama, Noted, {"dataloader_drop_last": True}, {**NOTED, "train_dataset": Dataset.from_list(rows(8))}, None),
    (llama, Noted, {"dataloader_drop_last": True, "max_steps": 1}, {**NOTED, "train_dataset": rows(5)}, None),
    (lambda: BertForSequenceClassification(BERT), Noted, {}, {**ONE_LABEL, **NOTED},
     f"The loss of Noted.compute_loss {WHOLE}"),
])  # fmt: skip
def test_micro_batches_stay_unless_their_losses_add_up(tmp_path, caplog, make, base, options, given, reason):
    args = arguments(tmp_path, gradient_accumulation_steps=2, **options)
    cls = with_osdp(base or transformers.Trainer)
    trainer = cls(model=make(), args=args, osdp=CONFIG, **{"train_dataset": rows(), **given})
    assert (trainer.plan.accumulation_steps == 2) is (reason is not None)
    assert reason is None or (reason in caplog.text and "micro-batches stay at 2 samples" in caplog.text)


def trained(tmp_path, make, data, osdp, **options):
    args = arguments(tmp_path, **{"max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, **options})
    trainer = hf_osdp.Trainer(model=make(), args=args, train_dataset=data, osdp=osdp)
    trainer.train()
    return trainer


def assert_equal(trainer, stock):
    """Losses, which a Trainer adds up in float32, and gradient norms of both steps."""
    for name, tolerance in (("loss", 3e-7), ("grad_norm", 1e-9)):
        found, wanted = ([entry[name] for entry in of.state.log_history if name in entry] for of in (trainer, stock))
        assert len(wanted) == 2 and found == pytest.approx(wanted, rel=tolerance)


def distilbert():
    torch.manual_seed(0)
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
    return DistilBertForMaskedLM(DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0)).double()


def classifier(labels, kind):
    return lambda: llama(LlamaForSequenceClassification, num_labels=labels, problem_type=kind)


CASES = {
    "regression": (classifier(1, "regression"), rows(32, 32, lambda row: row.double().mean() / 30)),
    "multi-label": (classifier(4, "multi_label_classification"),
                    rows(32, 32, lambda row: (row[:4] > 30).double())),
    "masked": (distilbert, rows(32, 32, lambda row: torch.where(row % 2 == 0, row, -100))),
    "experts": (lambda: mixtral(output_router_logits=True), rows(32, 32)),
}  # fmt: skip
OF_SAMPLES = ("regression", "multi-label")
"""Losses that are means over samples."""


@pytest.mark.parametrize("name", slow_but(CASES, daily=("masked",)))
def test_training_equals_stock_or_is_refused_by_kind_of_loss(tmp_path, name):
    make, data = CASES[name]
    options, osdp = {"per_device_train_batch_size": 16}, {"hardware": "cpu"}
    try:
        trainer = trained(tmp_path, make, data, {**osdp, "memory_limit": LIMIT}, **options)
    except InfeasibleError as error:
        assert "so micro-batches stay at 16 samples" in str(error) and "\n" not in str(error)
        trainer = trained(tmp_path, make, data, osdp, **options)
    assert (trainer.plan.micro_batch_size < 16) is (name in OF_SAMPLES)
    assert_equal(trainer, trained(tmp_path, make, data, False, **options))


@pytest.mark.parametrize(
    ("name", "accumulation"),
    slow_but([("regression", 1), ("multi-label", 2)], daily=[("multi-label", 2)]),
)
def test_set_micro_batch_size_averages_means_of_samples(tmp_path, name, accumulation):
    make, data = CASES[name]
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": accumulation}
    trainer = trained(tmp_path, make, data, {"micro_batch_size": 2, "hardware": "cpu"}, **options)
    assert trainer.plan.micro_batch_size == 2
    stock = trained(tmp_path, make, data, False, **options)
    assert_equal(trainer, stock)
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(stock.evaluate(data)["eval_loss"], rel=1e-6)


def test_micro_batch_size_that_would_multiply_loss_parts_is_refused(tmp_path):
    osdp = OSDPConfig(hardware="cpu", micro_batch_size=1)
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match="so micro_batch_size=1 would train something else than the 2 samples"):
        hf_osdp.Trainer(model=mixtral(output_router_logits=True), args=args, train_dataset=rows(), osdp=osdp).train()


def test_steps_are_not_cut_by_length_where_micro_batches_may_train_differently(tmp_path, caplog):
    osdp = OSDPConfig(hardware="cpu", micro_batch_size=1, batch_by_tokens=True)
    data = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows()]
    trainer = hf_osdp.Trainer(model=llama(Mean), args=arguments(tmp_path), train_dataset=data, osdp=osdp)
    assert trainer.plan.micro_batch_size == 1 and trainer._run.budget is None
    assert f"batch_by_tokens=True has no effect: The loss of Mean {WHOLE}" in caplog.text
