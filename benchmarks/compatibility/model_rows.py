"""Rows: architectures under the Trainer, each with its own loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from tests.helpers.architectures import tiny_config

from . import models
from .data import captions, classes, images, masked, padded, speech, tokens, uneven_tokens, waves, with_return_loss
from .models import Plain, gpt2, in_float8, llama, tiny
from .row import Figures, Verdict, row
from .side import Side, trained

_GROUP = "Models"
_CAUSAL = (
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "OPTForCausalLM", "Phi3ForCausalLM", "GPTNeoXForCausalLM", "BloomForCausalLM", "FalconForCausalLM",
)  # fmt: skip
_MASKED = (
    "BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "AlbertForMaskedLM", "ElectraForMaskedLM",
    "DebertaV2ForMaskedLM",
)  # fmt: skip
_SPARE = {"ddp_find_unused_parameters": True}
"""Options for models in which some parameters get no gradient, such as an expert without tokens; DDP needs this
option.
"""

_MEAN = {"average_tokens_across_devices": False}
"""Options for models whose loss ignores the number of items; stock DDP would multiply it by the number of
processes.
"""


def _model(
    name: str,
    make: Any,
    data: Any,
    *,
    given: dict[str, Any] | None = None,
    about: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    def train(side: Side) -> Figures:
        return trained(side, make(), data(), given=given, **options)

    row(name, _GROUP, **(about or {}))(train)


_PADDED = {"data_collator": padded}
_model("GPT-2, padding", gpt2, uneven_tokens, given=_PADDED)
_model("Llama, tied", partial(llama, tied=True), uneven_tokens, given=_PADDED)
_model("Llama, untied", llama, uneven_tokens, given=_PADDED)
_model("Llama, untied, other layouts", llama, tokens, about={"shift": 1})
for _name in _CAUSAL:
    _model(_name, partial(tiny, _name), tokens)
for _name in _MASKED:
    _model(_name, partial(tiny, _name), masked, **_MEAN)
_model("MixtralForCausalLM", partial(tiny, "MixtralForCausalLM", output_router_logits=True), tokens, **_SPARE)
_model("Qwen3MoeForCausalLM", partial(tiny, "Qwen3MoeForCausalLM"), tokens, **_SPARE)
_model("MambaForCausalLM", models.mamba, tokens)
_model("RecurrentGemmaForCausalLM", models.recurrent_gemma, tokens)
_model("T5ForConditionalGeneration", partial(tiny, "T5ForConditionalGeneration"), tokens, **_MEAN)
_model("BartForConditionalGeneration", partial(tiny, "BartForConditionalGeneration"), tokens, **_MEAN)
_model("BertForSequenceClassification", partial(tiny, "BertForSequenceClassification"), classes, **_MEAN)
_model("DebertaV2ForSequenceClassification", models.deberta, classes, **_MEAN)
_model("GPT2ForSequenceClassification", lambda: models.made(*_gpt2_classifier()), classes, **_MEAN)
_model("ViTForImageClassification", partial(tiny, "ViTForImageClassification"), images, **_MEAN, about={"daily": True})
_model("SwinForImageClassification", partial(tiny, "SwinForImageClassification"), images, **_MEAN)
_model("ResNetForImageClassification", partial(tiny, "ResNetForImageClassification"), images, **_MEAN)
_model(
    "CLIPModel, contrastive loss",
    models.clip,
    captions,
    given={"data_collator": with_return_loss},
    **_MEAN,
    about={"daily": True},
)
_model("WhisperForConditionalGeneration", partial(tiny, "WhisperForConditionalGeneration"), speech, **_MEAN)
_model("Wav2Vec2ForCTC", models.wav2vec2, waves, **_MEAN)
_model("a plain nn.Module with blocks", Plain, tokens, about={"daily": True})
_model("a plain nn.Module without blocks", partial(Plain, blocks=0), tokens)
_model("a plain nn.Module that holds a model", lambda: _Holding().double(), tokens)


def _gpt2_classifier() -> tuple[type[nn.Module], Any]:
    return transformers.GPT2ForSequenceClassification, tiny_config("GPT2LMHeadModel", num_labels=3, pad_token_id=0)


class _Holding(nn.Module):
    """A module with a transformers model inside and its own head.

    Batch norm of two samples amplifies rounding, so train it in float64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backbone = gpt2().transformer
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        value = self.head(self.norm(self.backbone(input_ids=input_ids).last_hidden_state.mean(1)))
        return {"loss": value.pow(2).mean(), "logits": value}


def _scored(kind: str, count: int) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """Return a function that makes a Llama that predicts numbers or several labels, and its samples."""

    def make() -> nn.Module:
        changes = {"num_labels": count, "problem_type": kind, "pad_token_id": 0, "initializer_range": 0.1}
        return models.made(transformers.LlamaForSequenceClassification, tiny_config("LlamaForCausalLM", **changes))

    made = torch.Generator().manual_seed(4)
    targets = [torch.rand(count, generator=made) for _ in range(64)]
    if kind == "regression":
        return make, [{**sample, "labels": target[0]} for sample, target in zip(tokens(64), targets, strict=True)]
    return make, [{**sample, "labels": target.round()} for sample, target in zip(tokens(64), targets, strict=True)]


_SET, _FREE = {"config": {"micro_batch_size": 2}}, {"config": {"micro_batch_size": None}}
for _name, _kind, _count in (("regression", "regression", 1), ("several labels", "multi_label_classification", 4)):
    _make, _samples = _scored(_kind, _count)
    for _words, _about in (
        ("micro-batches that the user made smaller", _SET),
        ("micro-batches left to the planner", _FREE),
    ):
        _model(
            f"{_name}, {_words}", _make, lambda samples=_samples: samples, per_device_train_batch_size=8, about=_about
        )
_DISTILBERT = partial(tiny, "DistilBertForMaskedLM")
_EXPERTS = partial(tiny, "MixtralForCausalLM", output_router_logits=True)
_many = {"per_device_train_batch_size": 8}
_model(
    "DistilBertForMaskedLM, micro-batches left to the planner", _DISTILBERT, partial(masked, 64), **_many, about=_FREE
)
_model(
    "MixtralForCausalLM, router loss, micro-batches left to the planner",
    _EXPERTS,
    partial(tokens, 64),
    **_many,
    **_SPARE,
    about=_FREE,
)
_model(
    "MixtralForCausalLM, router loss, micro-batches that the user made smaller", _EXPERTS, partial(tokens, 64),
    **_many, **_SPARE,
    about={**_SET, "expected": Verdict.REFUSED},
)  # fmt: skip


@row("frozen embeddings and first block", _GROUP)
def _frozen(side: Side) -> Figures:
    model = gpt2()
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    return trained(side, model, tokens())


@row("only the head trained", _GROUP)
def _head_alone(side: Side) -> Figures:
    model = llama()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return trained(side, model, tokens())


@row("single weights of a block frozen", _GROUP)
def _partly(side: Side) -> Figures:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.requires_grad_(False)
    return trained(side, model, tokens())


@row("embeddings resized", _GROUP)
def _resized(side: Side) -> Figures:
    model = gpt2()
    model.resize_token_embeddings(113, mean_resizing=False)
    return trained(side, model, tokens(vocabulary=113))


@row("float64", _GROUP, loss_tolerance=1e-6, norm_tolerance=1e-6)
def _double(side: Side) -> Figures:
    return trained(side, gpt2().double(), tokens())


@row("bf16 weights, no mixed precision", _GROUP, loss_tolerance=2e-2, norm_tolerance=5e-2)
def _low(side: Side) -> Figures:
    return trained(side, gpt2().to(torch.bfloat16), tokens())


@row("float8 by torchao's convert_to_float8_training", _GROUP, expected=Verdict.REFUSED)
def _float8(side: Side) -> Figures:
    return trained(side, in_float8(), tokens())


@row("a head of 3 rows over 2 processes", _GROUP)
def _few_rows(side: Side) -> Figures:
    return trained(side, tiny("BertForSequenceClassification", num_labels=3), classes(), **_MEAN)
