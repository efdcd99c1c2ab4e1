"""Rows: losses, and weights that are read without a call of their module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax, mse_loss

from .data import tokens
from .models import gpt2, llama
from .row import Figures, Oracle, Verdict, row
from .side import Side, trained

_GROUP = "Losses, and weights read without a call"


def _lost(name: str, loss: Any, make: Any = llama, **about: Any) -> None:
    """Register a row whose Trainer computes its loss by `loss`, which also receives the model as the user made it."""
    row(name, _GROUP, **about)(partial(_train, loss=loss, make=make))


def _train(side: Side, *, loss: Any, make: Any, **options: Any) -> Figures:
    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            value = loss(model, self.accelerator.unwrap_model(model, keep_torch_compile=False), inputs)
            return (value, None) if return_outputs else value

    return trained(side, make(), tokens(), base=OwnLoss, **options)


def _shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _usual(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    return _shifted(model(input_ids=inputs["input_ids"]).logits, inputs["labels"])


def _head_read(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    """Return a loss that reads the head's weight and also calls the head."""
    hidden = model(input_ids=inputs["input_ids"], output_hidden_states=True).hidden_states[-1]
    return _shifted(hidden @ inner.get_output_embeddings().weight.T, inputs["labels"])


def _backbone_then_head_read(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    """Return a loss that calls only the backbone and reads the head's weight."""
    hidden = inner.base_model(input_ids=inputs["input_ids"]).last_hidden_state
    return _shifted(linear(hidden, inner.get_output_embeddings().weight), inputs["labels"])


def _fused(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    """Return a fused loss, which never has all logits in memory."""
    hidden = model(input_ids=inputs["input_ids"], output_hidden_states=True, logits_to_keep=1).hidden_states[-1]
    flat, labels = hidden[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    return nn.functional.linear_cross_entropy(flat, inner.get_output_embeddings().weight, labels)


def _penalised(model: Any, inner: Any, inputs: Any, *, name: str) -> torch.Tensor:
    return _usual(model, inner, inputs) + 0.05 * inner.get_parameter(name).pow(2).sum()


def _all_penalised(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    return _usual(model, inner, inputs) + 0.01 * sum(parameter.pow(2).sum() for parameter in inner.parameters())


def _embedded_outside(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    """Return a loss that calls the embedding before the model."""
    embedded = inner.get_input_embeddings()(inputs["input_ids"])
    return _shifted(model(inputs_embeds=embedded).logits, inputs["labels"])


def _head_called_twice(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    outputs = model(input_ids=inputs["input_ids"], output_hidden_states=True)
    early = inner.get_output_embeddings()(outputs.hidden_states[1])
    return _shifted(outputs.logits, inputs["labels"]) + 0.5 * _shifted(early, inputs["labels"])


def _model_called_twice(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    other = inputs["input_ids"].flip(0)
    return _usual(model, inner, inputs) + 0.5 * _shifted(model(input_ids=other).logits, inputs["labels"].flip(0))


def _distilled(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    """Return a self-distillation loss: one pass in evaluation mode without gradients, then one with gradients."""
    model.eval()
    with torch.no_grad():
        teacher = model(input_ids=inputs["input_ids"]).logits
    model.train()
    student = model(input_ids=inputs["input_ids"]).logits
    return _shifted(student, inputs["labels"]) + kl_div(
        log_softmax(student[:, :-1], -1), log_softmax(teacher[:, 1:], -1), log_target=True
    )


def _gradient_penalty(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    """Return a loss that needs gradients of gradients."""
    embedded = inner.get_input_embeddings()(inputs["input_ids"])
    loss = _shifted(model(inputs_embeds=embedded).logits, inputs["labels"])
    (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + slope.pow(2).sum()


def _eager_llama(**changes: Any) -> nn.Module:
    return llama(attn_implementation="eager", **changes)


_tied = partial(llama, tied=True)
_lost("compute_loss overridden", _usual)
_lost("the head's weight read, untied", _head_read)
_lost("the head's weight read, untied, other layouts", _head_read, shift=1)
_lost("the head's weight read, tied", _head_read, make=_tied)
_lost("the head's weight read, tied, other layouts", _head_read, make=_tied, shift=1)
_lost("the backbone called, the head's weight read", _backbone_then_head_read, oracle=Oracle.ALONE)
_lost("the backbone called, the head's weight read, tied", _backbone_then_head_read, make=_tied, oracle=Oracle.ALONE)
_lost("linear_cross_entropy of the head's weight", _fused)
for _shift in (0, 1, 2):
    _lost(
        f"a block's weight read, layouts {_shift}",
        partial(_penalised, name="model.layers.0.mlp.up_proj.weight"),
        shift=_shift,
    )
    _lost(
        f"the embedding's weight read, layouts {_shift}",
        partial(_penalised, name="model.embed_tokens.weight"),
        shift=_shift,
    )
_lost("a norm's weight read", partial(_penalised, name="model.norm.weight"))
_lost("all weights read", _all_penalised, daily=True, expected=Verdict.REFUSED)
_lost("the embedding called by the loss", _embedded_outside)
_lost("the embedding called by the loss, tied", _embedded_outside, make=_tied)
_lost("the head called twice", _head_called_twice)
_lost("the model called twice", _model_called_twice)
_lost("the model teaches itself", _distilled)
_lost("gradient penalty", _gradient_penalty, make=_eager_llama, expected=Verdict.REFUSED)


@row("compute_loss_func", _GROUP)
def _loss_func(side: Side) -> Figures:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return (
            cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            / num_items_in_batch
        )

    return trained(side, gpt2(), tokens(), given={"compute_loss_func": loss})


@row("outputs held until the next step", _GROUP)
def _held(side: Side) -> Figures:
    class Holding(transformers.Trainer):
        def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, self.held = super().compute_loss(*args, return_outputs=True, **kwargs)
            return (loss, self.held) if return_outputs else loss

    return trained(side, gpt2(), tokens(), base=Holding)


class _WithOwnParameters(nn.Module):
    """A module around a model, with a temperature parameter, a projection whose weight is read, and optionally an
    unused layer.
    """

    def __init__(self, *, unused: bool):
        super().__init__()
        self.inner = llama()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.projection = nn.Parameter(torch.eye(32) + 0.01)
        self.unused = nn.Linear(3, 3) if unused else None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.inner.model(input_ids=input_ids).last_hidden_state @ self.projection
        logits = linear(hidden, self.inner.lm_head.weight) * self.temperature
        return {"loss": _shifted(logits, labels), "logits": logits}


@row("forward reads the head's weight and parameters of its own", _GROUP)
def _own_parameters(side: Side) -> Figures:
    return trained(side, _WithOwnParameters(unused=False), tokens())


@row("a layer that no forward uses", _GROUP)
def _unused(side: Side) -> Figures:
    return trained(side, _WithOwnParameters(unused=True), tokens(), ddp_find_unused_parameters=True)


@row("a parameter that only the loss uses", _GROUP, oracle=Oracle.ALONE)
def _loss_parameter(side: Side) -> Figures:
    def make() -> nn.Module:
        model = llama()
        model.temperature = nn.Parameter(torch.tensor(1.5))
        return model

    def loss(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
        return _shifted(model(input_ids=inputs["input_ids"]).logits * inner.temperature, inputs["labels"])

    return _train(side, loss=loss, make=make)


@row("only some blocks trained by a loss of the middle", _GROUP)
def _middle(side: Side) -> Figures:
    """Train by a loss in which blocks after the first get no gradient."""

    def loss(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
        hidden = model(input_ids=inputs["input_ids"], output_hidden_states=True).hidden_states[1]
        return mse_loss(hidden, torch.ones_like(hidden))

    return _train(side, loss=loss, make=llama, ddp_find_unused_parameters=True)
