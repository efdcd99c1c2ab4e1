"""Rows: optimizers and schedules of the Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .data import tokens
from .models import gpt2
from .row import Figures, Oracle, Verdict, row
from .side import Side, trained

_GROUP = "Trainer: optimizers and schedules"
_DAILY = ("adagrad", "adafactor")


def _train(side: Side, **options: Any) -> Figures:
    return trained(side, gpt2(), tokens(), **options)


for _name in (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_8bit",
    "adamw_8bit",
    "lion_32bit",
    "ademamix",
    "sgd",
    "rmsprop",
    "adagrad",
    "adafactor",
):
    row(f"optim={_name}", _GROUP, daily=_name in _DAILY)(partial(_train, optim=_name))
for _name in (
    "paged_adamw_8bit", "galore_adamw", "lomo", "schedule_free_adamw", "grokadamw",
    "stable_adamw", "apollo_adamw",
):  # fmt: skip
    _options = {"optim_target_modules": ["attn"]} if _name.startswith(("galore", "apollo")) else {}
    row(f"optim={_name}", _GROUP, expected=Verdict.REFUSED, daily=_name in _DAILY)(
        partial(_train, optim=_name, **_options)
    )
row("optim=sgd, optim_args=momentum", _GROUP)(partial(_train, optim="sgd", optim_args="momentum=0.9,nesterov=True"))
row("weight_decay=0", _GROUP)(partial(_train, weight_decay=0.0))

for _name, _options in {
    "cosine": {"warmup_steps": 2},
    "constant_with_warmup": {"warmup_steps": 2},
    "polynomial": {"lr_scheduler_kwargs": {"power": 2.0}},
    "inverse_sqrt": {"warmup_steps": 1},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "warmup_stable_decay": {"warmup_steps": 1, "lr_scheduler_kwargs": {"num_decay_steps": 2}},
}.items():
    row(f"lr_scheduler_type={_name}", _GROUP)(partial(_train, lr_scheduler_type=_name, **_options))


@row("lr_scheduler_type=reduce_lr_on_plateau", _GROUP)
def _plateau(side: Side) -> Figures:
    return trained(
        side, gpt2(), tokens(), given={"eval_dataset": tokens(8)}, lr_scheduler_type="reduce_lr_on_plateau",
        eval_strategy="steps",
        eval_steps=1, lr_scheduler_kwargs={"patience": 0, "threshold": 0.5}, metric_for_best_model="eval_loss",
    )  # fmt: skip


@row("warmup_steps as a share", _GROUP)
def _share(side: Side) -> Figures:
    return _train(side, warmup_steps=0.5)


@row("optimizers=(optimizer, scheduler)", _GROUP, daily=True)
def _given(side: Side) -> Figures:
    model = gpt2()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.2, "lr": 3e-3},
        {"params": [p for p in model.parameters() if p.dim() <= 1]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return trained(side, model, tokens(), given={"optimizers": (optimizer, scheduler)})


@row("optimizers=(optimizer, None), parameters in another order", _GROUP)
def _reversed_order(side: Side) -> Figures:
    model = gpt2()
    return trained(
        side,
        model,
        tokens(),
        given={"optimizers": (torch.optim.AdamW([*model.parameters()][::-1], lr=1e-2, eps=1e-5), None)},
    )


@row("optimizer_cls_and_kwargs", _GROUP)
def _class_given(side: Side) -> Figures:
    return trained(
        side, gpt2(), tokens(), given={"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 5e-3, "eps": 1e-5})}
    )


@row("create_optimizer overridden", _GROUP)
def _overridden(side: Side) -> Figures:
    import transformers

    class OwnOptimizer(transformers.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.RMSprop(
                    (self.model if model is None else model).parameters(), lr=1e-3, eps=1e-4
                )
            return self.optimizer

    return trained(side, gpt2(), tokens(), base=OwnOptimizer)


class Muon(torch.optim.Optimizer):
    """An optimizer that is not element-wise and needs whole matrices."""

    def __init__(self, parameters: Any, lr: float = 1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Normalise each matrix's gradient by its largest row."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


@row("an optimizer that is not element-wise", _GROUP)
def _muon(side: Side) -> Figures:
    model = gpt2()
    return trained(side, model, tokens(), given={"optimizers": (Muon(model.parameters()), None)})


@row("optimizers=(torch.optim.Adam with foreach, None)", _GROUP, oracle=Oracle.DDP)
def _foreach(side: Side) -> Figures:
    model = gpt2()
    return trained(
        side,
        model,
        tokens(),
        given={"optimizers": (torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5, foreach=True), None)},
    )
