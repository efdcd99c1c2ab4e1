"""Losses that a user may write: `loss(model, inner, inputs)`, where `inner` is the model as the user made it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax, mse_loss


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def usual(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    return shifted(model(input_ids=inputs["input_ids"]).logits, inputs["labels"])


def _hidden(model: Any, inputs: Any, place: int, **options: Any) -> torch.Tensor:
    return model(input_ids=inputs["input_ids"], output_hidden_states=True, **options).hidden_states[place]


def head_read(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    return shifted(_hidden(model, inputs, -1) @ inner.get_output_embeddings().weight.T, inputs["labels"])


def backbone_then_head_read(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    hidden = inner.base_model(input_ids=inputs["input_ids"]).last_hidden_state
    return shifted(linear(hidden, inner.get_output_embeddings().weight), inputs["labels"])


def fused(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    hidden = _hidden(model, inputs, -1, logits_to_keep=1)
    flat, labels = hidden[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    return nn.functional.linear_cross_entropy(flat, inner.get_output_embeddings().weight, labels)


def block_penalised(model: Any, inner: Any, inputs: Any, name: str = "model.layers.0.mlp.up_proj.weight") -> Any:
    return usual(model, inner, inputs) + 0.05 * inner.get_parameter(name).pow(2).sum()


def embedding_penalised(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    return block_penalised(model, inner, inputs, "model.embed_tokens.weight")


def norm_penalised(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    return block_penalised(model, inner, inputs, "model.norm.weight")


def all_penalised(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    return usual(model, inner, inputs) + 0.01 * sum(parameter.pow(2).sum() for parameter in inner.parameters())


def embedded_outside(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    embedded = inner.get_input_embeddings()(inputs["input_ids"])
    return shifted(model(inputs_embeds=embedded).logits, inputs["labels"])


def head_called_twice(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    """Return a loss with a second use of the head, on hidden states of the middle."""
    outputs = model(input_ids=inputs["input_ids"], output_hidden_states=True)
    early = inner.get_output_embeddings()(outputs.hidden_states[1])
    return shifted(outputs.logits, inputs["labels"]) + 0.5 * shifted(early, inputs["labels"])


def model_called_twice(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    other = inputs["input_ids"].flip(0)
    return usual(model, inner, inputs) + 0.5 * shifted(model(input_ids=other).logits, inputs["labels"].flip(0))


def distilled(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    """Return a self-distillation loss: one pass in evaluation mode without gradients, then one with gradients."""
    model.eval()
    with torch.no_grad():
        teacher = model(input_ids=inputs["input_ids"]).logits
    model.train()
    student = model(input_ids=inputs["input_ids"]).logits
    return shifted(student, inputs["labels"]) + kl_div(
        log_softmax(student[:, :-1], -1), log_softmax(teacher[:, 1:], -1), log_target=True
    )


def gradient_penalty(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    embedded = inner.get_input_embeddings()(inputs["input_ids"])
    loss = shifted(model(inputs_embeds=embedded).logits, inputs["labels"])
    (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + slope.pow(2).sum()


def tempered(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    return shifted(model(input_ids=inputs["input_ids"]).logits * inner.temperature, inputs["labels"])


def of_the_middle(model: Any, inner: Any, inputs: Any) -> torch.Tensor:
    hidden = _hidden(model, inputs, 1)
    return mse_loss(hidden, torch.ones_like(hidden))
