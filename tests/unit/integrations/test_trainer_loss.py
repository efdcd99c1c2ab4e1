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
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    default_data_collator,
)

import hf_osdp
from hf_osdp import InfeasibleError, OSDPConfig, with_osdp
from hf_osdp.integrations.trainer_facts import job_of_trainer
from tests.helpers.trainers import small_arguments, token_rows

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES["vocab_size"] = 64
CONFIG = OSDPConfig(hardware="cpu", operator_splitting=False)


def rows(count=2, **options):
    return token_rows(count, 8, **options)


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


class Divides(OwnMean):
    loss_is_scaled_for_ga = True

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) / self.args.gradient_accumulation_steps


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
    """That those which change train as in stock: tests/compatibility, "micro-batches left to the planner"."""
    args = small_arguments(tmp_path, gradient_accumulation_steps=2, **options)
    cls = with_osdp(base or transformers.Trainer)
    trainer = cls(model=make(), args=args, osdp=CONFIG, **{"train_dataset": rows(), **given})
    _, rule = job_of_trainer(trainer)
    assert (rule.size, rule.chosen) == (2, 2 if reason else None)
    assert reason is None or (reason in caplog.text and "micro-batches stay at 2 samples" in caplog.text)


def trainer_of(tmp_path, model, data=None, **osdp):
    args, osdp = small_arguments(tmp_path), OSDPConfig(hardware="cpu", **osdp)
    return hf_osdp.Trainer(model=model, args=args, train_dataset=data or rows(), osdp=osdp)


def test_infeasible_error_says_why_micro_batches_are_no_smaller(tmp_path):
    trainer = trainer_of(tmp_path, llama(Mean), operator_splitting=False, memory_limit="64KiB")
    with pytest.raises(InfeasibleError, match=f"The loss of Mean {WHOLE}, so micro-batches stay at 2 samples"):
        trainer.plan  # noqa: B018


def test_micro_batch_size_that_would_multiply_loss_parts_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, mixtral(output_router_logits=True), micro_batch_size=1)
    with pytest.raises(ValueError, match="so micro_batch_size=1 would train something else than the 2 samples"):
        trainer.train()


def test_steps_are_not_cut_by_length_where_micro_batches_may_train_differently(tmp_path, caplog):
    data = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows()]
    trainer = trainer_of(tmp_path, llama(Mean), data, micro_batch_size=1, batch_by_tokens=True)
    assert trainer.plan.micro_batch_size == 1 and trainer._run.budget is None
    assert f"batch_by_tokens=True has no effect: The loss of Mean {WHOLE}" in caplog.text
