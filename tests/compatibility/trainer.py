"""Trainings under transformers' Trainer that need code of their own; the others are in rows.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from . import losses
from .data import classes, sentences, tokenizer, tokens
from .models import gpt2, llama
from .row import Figures
from .side import Side, logged, made, sums, trained

EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}
MEAN = {"average_tokens_across_devices": False}
"""For models whose loss ignores the number of items; stock DDP would multiply it by the number of processes."""


def fit(
    side: Side, *, base: str = "Trainer", arguments: str = "TrainingArguments",
    callbacks: Mapping[str, Mapping[str, Any]] | None = None, **options: Any,
) -> Figures:  # fmt: skip
    """Train under a Trainer; classes are named, those of callbacks with their arguments."""
    given = {"callbacks": [_named(name)(**own) for name, own in callbacks.items()]} if callbacks else {}
    return trained(side, base=_named(base), arguments=_named(arguments), given=given, **options)


def _named(name: str) -> Any:
    """Return a class of this file or of transformers."""
    return globals().get(name) or getattr(transformers, name)


def with_loss(side: Side, *, loss: str, model: Any = "llama", **options: Any) -> Figures:
    function = getattr(losses, loss)

    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            value = function(model, self.accelerator.unwrap_model(model, keep_torch_compile=False), inputs)
            return (value, None) if return_outputs else value

    return trained(side, model, base=OwnLoss, **options)


def model_init(side: Side) -> Figures:
    return trained(side, None, given={"model_init": gpt2})


def in_turn(
    side: Side, *, acts: Sequence[str], data: Any = None, evaluated: Any = None, late_data: Any = None
) -> Figures:
    """Call methods of one trainer in turn, and compare what is logged after each."""
    given = {"train_dataset": made(data), "eval_dataset": made(evaluated)}
    trainer, figures = side.trainer()(model=gpt2(), args=side.arguments(), **given), []
    if late_data is not None:
        trainer.train_dataset = made(late_data)
    for act in acts:
        getattr(trainer, act)()
        figures += logged(trainer)
    return figures


# ------------------------------------------------------------------------------------------------------- optimizers


def by_optimizer(side: Side, kind: str, *, schedules: bool = False) -> Figures:
    """Train with an optimizer that the user made of the model's parameters."""
    model = gpt2()
    optimizer = OPTIMIZERS[kind](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if schedules else None
    return trained(side, model, given={"optimizers": (optimizer, schedule)})


def optimizer_class(side: Side) -> Figures:
    return trained(side, given={"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 5e-3, "eps": 1e-5})})


class OwnOptimizer(transformers.Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            parameters = (self.model if model is None else model).parameters()
            self.optimizer = torch.optim.RMSprop(parameters, lr=1e-3, eps=1e-4)
        return self.optimizer


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


def _grouped(model: Any) -> torch.optim.Optimizer:
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2, "lr": 3e-3}, {"params": others}], lr=1e-2, eps=1e-5
    )


OPTIMIZERS = {
    "groups": _grouped,
    "another order": lambda model: torch.optim.AdamW([*model.parameters()][::-1], lr=1e-2, eps=1e-5),
    "not element-wise": lambda model: Muon(model.parameters()),
    "foreach": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5, foreach=True),
}


# --------------------------------------------------------------------------------------------------- other uses


def metrics(side: Side) -> Figures:
    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}

    given = {"compute_metrics": accuracy}
    bert = "BertForSequenceClassification"
    return trained(side, bert, "classes", evaluated=classes(9), given=given, **MEAN, **EVALUATION)


def batch_metrics(side: Side) -> Figures:
    counts = {"right": 0.0, "all": 0.0}

    def metric(prediction: Any, compute_result: bool) -> dict[str, float]:
        counts["right"] += float((prediction.predictions == prediction.label_ids).sum())
        counts["all"] += prediction.label_ids.numel()
        return {"accuracy": counts["right"] / counts["all"]} if compute_result else {}

    given = {
        "compute_metrics": metric, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }  # fmt: skip
    options = {"batch_eval_metrics": True, "eval_accumulation_steps": 1, **MEAN, **EVALUATION}
    return trained(side, "BertForSequenceClassification", "classes", evaluated=classes(8), given=given, **options)


def resumed(side: Side, **options: Any) -> Figures:
    """Train, then continue from the checkpoint of the second step with other weights."""
    options = {"save_strategy": "steps", "save_steps": 2, **options}
    first = side.trainer()(model=gpt2(), args=side.arguments(**options), train_dataset=tokens())
    first.train()
    second = side.trainer()(model=gpt2(initializer_range=0.3), args=side.arguments(**options), train_dataset=tokens())
    second.train(resume_from_checkpoint=str(side.folder / "checkpoint-2"))
    return [*logged(first), *logged(second)]


def late_evaluations(side: Side) -> Figures:
    trainer = side.trainer()(model=gpt2(), args=side.arguments())
    figures = [trainer.predict(tokens(8)).metrics, trainer.evaluate(tokens(4))]
    return [{name: value for name, value in each.items() if name.endswith("_loss")} for each in figures]


class Evaluating(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = control.should_log = True


class Halving(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] /= 2


class ClippingEach(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        norms = {parameter: parameter.grad.norm().item() for parameter in model.parameters()}
        for parameter, norm in norms.items():
            if norm > 0.1:
                parameter.grad.mul_(0.1 / norm)


class Averaging(TrainerCallback):
    def __init__(self, model: Any) -> None:
        self.running = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    @property
    def running_model(self) -> Any:
        return self.running.module

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.running.update_parameters(model)
        if state.global_step == 2:
            with torch.no_grad():
                for parameter, mean in zip(model.parameters(), self.running_model.parameters(), strict=True):
                    parameter.copy_(mean)


def averaged(side: Side, *, by_trl: bool = False) -> Figures:
    from trl import BEMACallback

    model = llama()
    callback = BEMACallback(update_freq=1) if by_trl else Averaging(model)

    def then(side: Side, trainer: Any) -> dict[str, float]:
        return sums(dict(callback.running_model.named_parameters()))

    return trained(side, model, given={"callbacks": [callback]}, then=then)


class OwnLoader(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, batch_size=self.args.train_batch_size, shuffle=False)
        return self.accelerator.prepare(loader)


class OwnStep(transformers.Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class HoldsOutputs(transformers.Trainer):
    def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, self.held = super().compute_loss(*args, return_outputs=True, **kwargs)
        return (loss, self.held) if return_outputs else loss


def random_masks(side: Side) -> Figures:
    """Train with random masks; figures are equal only if nothing else draws from the random state or uses the
    collator.
    """
    words = tokenizer()
    words.add_special_tokens({"mask_token": "<mask>"})
    samples = [dict(words(text)) for text in sentences(words=10)]
    collator = transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.4, seed=3)
    given = {"data_collator": collator, "processing_class": words}
    return trained(side, "BertForMaskedLM", samples, given=given, **MEAN)


def loss_function(side: Side) -> Figures:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch

    return trained(side, given={"compute_loss_func": loss})
