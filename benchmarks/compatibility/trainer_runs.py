"""Rows: other uses of a Trainer: evaluation, checkpoints, callbacks, subclasses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
from trl import BEMACallback

from .data import classes, masked, padded, sentences, tokenizer, tokens, uneven_tokens
from .models import gpt2, llama, tiny
from .row import Figures, Oracle, Verdict, row
from .side import Side, logged, mean_over_ranks, trained

_GROUP = "Trainer: evaluation, checkpoints, subclasses"
_MEAN = {"average_tokens_across_devices": False}
"""Options for models whose loss ignores the number of items; see the row about them in the options."""
_EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}


def _accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


@row("eval_strategy=steps, metrics", _GROUP)
def _metrics(side: Side) -> Figures:
    return trained(
        side,
        tiny("BertForSequenceClassification"),
        classes(),
        given={"eval_dataset": classes(9), "compute_metrics": _accuracy},
        **_MEAN,
        **_EVALUATION,
    )


@row("evaluation on several datasets, uneven samples", _GROUP)
def _several(side: Side) -> Figures:
    given = {"eval_dataset": {"one": uneven_tokens(8), "two": uneven_tokens(5)}, "data_collator": padded}
    return trained(side, gpt2(), uneven_tokens(), given=given, **_EVALUATION)


@row("batch_eval_metrics, eval_accumulation_steps, preprocess_logits_for_metrics", _GROUP)
def _batch_metrics(side: Side) -> Figures:
    sums = {"right": 0.0, "all": 0.0}

    def metric(prediction: Any, compute_result: bool) -> dict[str, float]:
        sums["right"] += float((prediction.predictions == prediction.label_ids).sum())
        sums["all"] += prediction.label_ids.numel()
        return {"accuracy": sums["right"] / sums["all"]} if compute_result else {}

    given = {
        "eval_dataset": classes(8), "compute_metrics": metric,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }  # fmt: skip
    options = {"batch_eval_metrics": True, "eval_accumulation_steps": 1, **_MEAN}
    return trained(side, tiny("BertForSequenceClassification"), classes(), given=given, **options, **_EVALUATION)


@row("eval_on_start", _GROUP)
def _on_start(side: Side) -> Figures:
    return trained(side, gpt2(), tokens(), given={"eval_dataset": tokens(8)}, eval_on_start=True, **_EVALUATION)


@row("evaluate before and after training", _GROUP, oracle=Oracle.ALONE)
def _around(side: Side) -> Figures:
    """Compare with one process, because two stock processes that evaluate first then train without reducing
    gradients.
    """
    trainer = side.trainer()(model=gpt2(), args=side.arguments(), train_dataset=tokens(), eval_dataset=tokens(8))
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    return logged(trainer)


@row("bf16_full_eval", _GROUP, expected=Verdict.REFUSED)
def _low_evaluation(side: Side) -> Figures:
    return trained(
        side,
        gpt2(),
        tokens(),
        then=lambda trainer: {"eval_loss": trainer.evaluate(tokens(8))["eval_loss"]},
        bf16_full_eval=True,
    )


@row("predict after training", _GROUP)
def _predict(side: Side) -> Figures:
    def then(trainer: Any) -> dict[str, float]:
        return {"sum": float(np.abs(trainer.predict(tokens(8)).predictions).sum())}

    return trained(side, gpt2(), tokens(), then=then)


@row("evaluate, without training", _GROUP)
def _evaluate_alone(side: Side) -> Figures:
    trainer = side.trainer()(model=gpt2(), args=side.arguments(), eval_dataset=tokens(8))
    trainer.evaluate()
    return logged(trainer)


@row("generate after training, on every process", _GROUP)
def _generate(side: Side) -> Figures:
    def then(trainer: Any) -> dict[str, float]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        return {f"token {place}": float(token) for place, token in enumerate(ids[0])}

    return trained(side, llama(), tokens(), then=then)


@row("Seq2SeqTrainer with predict_with_generate", _GROUP)
def _seq2seq(side: Side) -> Figures:
    def then(trainer: Any) -> dict[str, float]:
        return {"sum": float(trainer.predict(tokens(4)).predictions.sum())}

    options = {"predict_with_generate": True, "generation_max_length": 6, **_MEAN, **_EVALUATION}
    return trained(
        side, tiny("T5ForConditionalGeneration"), tokens(), base=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments,
        given={"eval_dataset": tokens(8)}, then=then, **options,
    )  # fmt: skip


@row("load_best_model_at_end, save_total_limit", _GROUP)
def _best(side: Side) -> Figures:
    def then(trainer: Any) -> dict[str, float]:
        return {"loss of the best": trainer.evaluate()["eval_loss"], "best": trainer.state.best_metric}

    options = {
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        **_EVALUATION,
    }
    return trained(side, gpt2(), tokens(), given={"eval_dataset": tokens(8)}, then=then, learning_rate=0.5, **options)


@row("early stopping", _GROUP)
def _early(side: Side) -> Figures:
    options = {
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    given = {"eval_dataset": tokens(8), "callbacks": [EarlyStoppingCallback(1, 0.5)]}
    return trained(side, gpt2(), tokens(), given=given, **options)


def _resumed(side: Side, **options: Any) -> Figures:
    options = {"save_strategy": "steps", "save_steps": 2, **options}
    first = side.trainer()(model=gpt2(), args=side.arguments(**options), train_dataset=tokens())
    first.train()
    second = side.trainer()(model=gpt2(initializer_range=0.3), args=side.arguments(**options), train_dataset=tokens())
    second.train(resume_from_checkpoint=str(side.folder / "checkpoint-2"))
    return [*logged(first), *logged(second)]


@row("resume_from_checkpoint", _GROUP)
def _resume(side: Side) -> Figures:
    return _resumed(side)


@row("made without data, which comes with predict and evaluate", _GROUP)
def _late_data(side: Side) -> Figures:
    trainer = side.trainer()(model=gpt2(), args=side.arguments())
    figures = [trainer.predict(tokens(8)).metrics, trainer.evaluate(tokens(4))]
    return [{name: value for name, value in each.items() if name.endswith("_loss")} for each in figures]


@row("made without data, with train_dataset set before train", _GROUP)
def _late_training_data(side: Side) -> Figures:
    trainer = side.trainer()(model=gpt2(), args=side.arguments())
    trainer.train_dataset = tokens()
    trainer.train()
    return logged(trainer)


@row("resume_from_checkpoint, accumulation, cosine", _GROUP)
def _resume_accumulating(side: Side) -> Figures:
    return _resumed(side, gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=1)


@row("resume_from_checkpoint, ignore_data_skip", _GROUP)
def _resume_unskipped(side: Side) -> Figures:
    return _resumed(side, ignore_data_skip=True)


@row("save_only_model, loaded by from_pretrained", _GROUP)
def _reloaded(side: Side) -> Figures:
    def then(trainer: Any) -> dict[str, float]:
        dist.barrier()
        model = type(gpt2()).from_pretrained(side.folder / "checkpoint-4")
        return _sums(model.state_dict())

    return trained(side, gpt2(), tokens(), then=then, save_strategy="steps", save_steps=4, save_only_model=True)


def _sums(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value.detach().double().abs().sum()) for name, value in state.items()}


@row("trained twice in a row", _GROUP)
def _twice(side: Side) -> Figures:
    trainer = side.trainer()(model=gpt2(), args=side.arguments(), train_dataset=tokens())
    trainer.train()
    first = logged(trainer)
    trainer.train()
    return [*first, *logged(trainer)]


class _Evaluating(TrainerCallback):
    """Request an evaluation and a log after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request them."""
        control.should_evaluate = control.should_log = True


@row("a callback that asks for evaluations", _GROUP)
def _callback(side: Side) -> Figures:
    return trained(side, gpt2(), tokens(), given={"eval_dataset": tokens(8), "callbacks": [_Evaluating()]})


class _Freezing(TrainerCallback):
    """Change the learning rate directly."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Halve it."""
        for group in optimizer.param_groups:
            group["lr"] /= 2


class _Averaging(TrainerCallback):
    """Average weights in a whole copy, and continue from the average."""

    def __init__(self, model: Any) -> None:
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.average.update_parameters(model)
        if state.global_step == 2:
            with torch.no_grad():
                for parameter, mean in zip(model.parameters(), self.average.module.parameters(), strict=True):
                    parameter.copy_(mean)


@row("a callback that averages weights in a whole copy", _GROUP)
def _averaged(side: Side) -> Figures:
    model = llama()
    callback = _Averaging(model)
    return trained(
        side,
        model,
        tokens(),
        given={"callbacks": [callback]},
        then=lambda trainer: _sums(dict(callback.average.module.named_parameters())),
    )


@row("TRL's BEMACallback", _GROUP)
def _bema(side: Side) -> Figures:
    callback = BEMACallback(update_freq=1)
    return trained(
        side,
        llama(),
        tokens(),
        given={"callbacks": [callback]},
        then=lambda trainer: _sums(dict(callback.running_model.named_parameters())),
    )


@row("a callback that changes the optimizer", _GROUP)
def _changing(side: Side) -> Figures:
    return trained(side, gpt2(), tokens(), given={"callbacks": [_Freezing()]}, lr_scheduler_type="constant")


@row("get_train_dataloader overridden", _GROUP)
def _own_loader(side: Side) -> Figures:
    class OwnLoader(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(
                DataLoader(self.train_dataset, batch_size=self.args.train_batch_size, shuffle=False)
            )

    return trained(side, gpt2(), tokens(), base=OwnLoader)


@row("training_step overridden", _GROUP)
def _own_step(side: Side) -> Figures:
    class OwnStep(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    return trained(side, gpt2(), tokens(), base=OwnStep)


@row("DataCollatorForLanguageModeling, random masks", _GROUP, daily=True)
def _random_masks(side: Side) -> Figures:
    """Train with random masks; figures are equal only if nothing else draws from the random state or uses the
    collator.
    """
    words = tokenizer()
    words.add_special_tokens({"mask_token": "<mask>"})
    samples = [dict(words(text)) for text in sentences(words=10)]
    collator = transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.4, seed=3)
    return trained(
        side, tiny("BertForMaskedLM"), samples, given={"data_collator": collator, "processing_class": words}, **_MEAN
    )


@row("text tokenised in the collator", _GROUP)
def _text(side: Side) -> Figures:
    words = tokenizer()

    def collate(samples: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        batch = dict(words([sample["text"] for sample in samples], padding=True, return_tensors="pt"))
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
            "labels": batch["input_ids"].clone(),
        }

    samples = [{"text": text} for text in sentences()]
    return trained(side, gpt2(), samples, given={"data_collator": collate}, remove_unused_columns=False)


@row("uneven evaluation of a masked model", _GROUP, oracle=Oracle.DDP)
def _masked(side: Side) -> Figures:
    def then(trainer: Any) -> dict[str, float]:
        return {"eval": mean_over_ranks(trainer.evaluate(masked(7))["eval_loss"])}

    return trained(side, tiny("BertForMaskedLM"), masked(), then=then, **_MEAN)


@row("save_model, then from_pretrained", _GROUP)
def _saved(side: Side) -> Figures:
    def then(trainer: Any) -> dict[str, float]:
        trainer.save_model(str(Path(side.folder, "final")))
        dist.barrier()
        return _sums(type(gpt2()).from_pretrained(Path(side.folder, "final")).state_dict())

    return trained(side, gpt2(), tokens(), then=then)
