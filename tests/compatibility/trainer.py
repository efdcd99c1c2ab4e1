"""Trainings under transformers' Trainer that need code of their own; the others are in rows.yaml."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from . import losses
from .data import classes, sentences, tokenizer, tokens
from .models import gpt2, llama
from .row import Figures
from .side import Side, logged, sums, trained

EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}
MEAN = {"average_tokens_across_devices": False}
"""For models whose loss ignores the number of items; stock DDP would multiply it by the number of processes."""


def fit(side: Side, **options: Any) -> Figures:
    return trained(side, **options)


def with_loss(side: Side, *, loss: str, model: Any = "llama", **options: Any) -> Figures:
    function = getattr(losses, loss)

    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            value = function(model, self.accelerator.unwrap_model(model, keep_torch_compile=False), inputs)
            return (value, None) if return_outputs else value

    return trained(side, model, base=OwnLoss, **options)


def sequence_to_sequence(side: Side, **options: Any) -> Figures:
    return trained(side, base=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments, **options)


def model_init(side: Side) -> Figures:
    return trained(side, None, given={"model_init": lambda: gpt2()})


# ------------------------------------------------------------------------------------------------------- optimizers


def _by(side: Side, model: Any, optimizer: Any, scheduler: Any = None) -> Figures:
    return trained(side, model, given={"optimizers": (optimizer, scheduler)})


def optimizer_and_scheduler(side: Side) -> Figures:
    model = gpt2()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.2, "lr": 3e-3}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)
    return _by(side, model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))


def parameters_in_another_order(side: Side) -> Figures:
    model = gpt2()
    return _by(side, model, torch.optim.AdamW([*model.parameters()][::-1], lr=1e-2, eps=1e-5))


def optimizer_class(side: Side) -> Figures:
    return trained(side, given={"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 5e-3, "eps": 1e-5})})


def create_optimizer(side: Side) -> Figures:
    class OwnOptimizer(transformers.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                parameters = (self.model if model is None else model).parameters()
                self.optimizer = torch.optim.RMSprop(parameters, lr=1e-3, eps=1e-4)
            return self.optimizer

    return trained(side, base=OwnOptimizer)


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


def not_element_wise(side: Side) -> Figures:
    model = gpt2()
    return _by(side, model, Muon(model.parameters()))


def foreach(side: Side) -> Figures:
    model = gpt2()
    return _by(side, model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5, foreach=True))


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


def evaluated_around(side: Side) -> Figures:
    """Evaluate before and after training; the reference is one process, because two stock processes that evaluate
    first then train without reducing gradients.
    """
    trainer = side.trainer()(model=gpt2(), args=side.arguments(), train_dataset=tokens(), eval_dataset=tokens(8))
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    return logged(trainer)


def evaluated_alone(side: Side) -> Figures:
    trainer = side.trainer()(model=gpt2(), args=side.arguments(), eval_dataset=tokens(8))
    trainer.evaluate()
    return logged(trainer)


def early_stopping(side: Side) -> Figures:
    each = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    given = {"callbacks": [EarlyStoppingCallback(1, 0.5)]}
    return trained(side, evaluated=tokens(8), given=given, load_best_model_at_end=True, **each)


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


def late_training_data(side: Side) -> Figures:
    trainer = side.trainer()(model=gpt2(), args=side.arguments())
    trainer.train_dataset = tokens()
    trainer.train()
    return logged(trainer)


def trained_twice(side: Side) -> Figures:
    trainer = side.trainer()(model=gpt2(), args=side.arguments(), train_dataset=tokens())
    trainer.train()
    first = logged(trainer)
    trainer.train()
    return [*first, *logged(trainer)]


class Evaluating(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = control.should_log = True


class Halving(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] /= 2


def called_back(side: Side, callback: str, **options: Any) -> Figures:
    kind = {"evaluating": Evaluating, "halving": Halving}[callback]
    return trained(side, given={"callbacks": [kind()]}, **options)


class Averaging(TrainerCallback):
    def __init__(self, model: Any) -> None:
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.average.update_parameters(model)
        if state.global_step == 2:
            with torch.no_grad():
                for parameter, mean in zip(model.parameters(), self.average.module.parameters(), strict=True):
                    parameter.copy_(mean)


def averaged(side: Side) -> Figures:
    model = llama()
    callback = Averaging(model)

    def then(side: Side, trainer: Any) -> dict[str, float]:
        return sums(dict(callback.average.module.named_parameters()))

    return trained(side, model, given={"callbacks": [callback]}, then=then)


def averaged_by_trl(side: Side) -> Figures:
    from trl import BEMACallback

    callback = BEMACallback(update_freq=1)

    def then(side: Side, trainer: Any) -> dict[str, float]:
        return sums(dict(callback.running_model.named_parameters()))

    return trained(side, "llama", given={"callbacks": [callback]}, then=then)


def own_loader(side: Side) -> Figures:
    class OwnLoader(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(self.train_dataset, batch_size=self.args.train_batch_size, shuffle=False)
            return self.accelerator.prepare(loader)

    return trained(side, base=OwnLoader)


def own_step(side: Side) -> Figures:
    class OwnStep(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    return trained(side, base=OwnStep)


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


def outputs_held(side: Side) -> Figures:
    class Holding(transformers.Trainer):
        def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, self.held = super().compute_loss(*args, return_outputs=True, **kwargs)
            return (loss, self.held) if return_outputs else loss

    return trained(side, base=Holding)
