"""Tiny models, without dropout by default."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import nn

from tests.helpers import quantized
from tests.helpers.architectures import OTHERS, tiny_config

from .losses import shifted

VOCABULARY = 100


def tiny(name: str, **changes: Any) -> nn.Module:
    """Return a tiny model of this class in float32, with the same weights at each call."""
    config = tiny_config(name, **changes)
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config)


def gpt2(**changes: Any) -> nn.Module:
    return tiny("GPT2LMHeadModel", **{"initializer_range": 0.1, **changes})


def llama(*, tied: bool = False, **changes: Any) -> nn.Module:
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return tiny("LlamaForCausalLM", **{**special, "tie_word_embeddings": tied, "initializer_range": 0.1, **changes})


def in_4_bits() -> nn.Module:
    """Return a Llama whose linear layers bitsandbytes quantized to NF4, with double quantization."""
    return quantized.in_4_bits(llama())


def in_8_bits() -> nn.Module:
    """Return a Llama whose linear layers bitsandbytes quantized to 8 bits (LLM.int8)."""
    import bitsandbytes as bnb

    model = llama()
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and linear is not model.get_output_embeddings():
            layer = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
            layer.load_state_dict(linear.state_dict())
            model.set_submodule(name, layer.to("cpu").requires_grad_(False))
    model.is_loaded_in_8bit = True
    return model


def in_float8() -> nn.Module:
    """Return a Llama that multiplies in float8, by torchao; emulated, since only GPUs multiply so."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(llama(), config=Float8LinearConfig(emulate=True))


def of(name: str, *, like: str = "", **sizes: Any) -> nn.Module:
    """Return a model of the sizes of another class, which is `like` it, or of its own among OTHERS, and of these."""
    cls = getattr(transformers, name)
    config = tiny_config(like, **sizes) if like else cls.config_class(**{**OTHERS[name], **sizes})
    torch.manual_seed(0)
    return cls(config)


def frozen(kind: str, pattern: str) -> nn.Module:
    """Return a model without gradients for parameters whose name the pattern finds."""
    model = {"gpt2": gpt2, "llama": llama}[kind]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(pattern, name))
    return model


def gpt2_resized() -> nn.Module:
    model = gpt2()
    model.resize_token_embeddings(113, mean_resizing=False)
    return model


def gpt2_in(dtype: str) -> nn.Module:
    return gpt2().to(getattr(torch, dtype))


def llama_with_temperature() -> nn.Module:
    model = llama()
    model.temperature = nn.Parameter(torch.tensor(1.5))
    return model


def compiled() -> nn.Module:
    return torch.compile(llama())


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Plain(nn.Module):
    """A model that is not from transformers, with repeated blocks and its own loss."""

    def __init__(self, *, blocks: int = 3, width: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return self.through(self.blocks, input_ids, labels)

    def through(self, blocks: Any, input_ids: torch.Tensor, labels: torch.Tensor | None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for block in blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class OneSample(Plain):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        (ids,), (targets,) = input_ids, labels
        return super().forward(ids[None], targets[None])


class Tasks(Plain):
    """A model with a block of its own for each task."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.own = nn.ModuleList(Block() for _ in range(2))

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, task: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        own = self.own[0 if task is None else int(task[0])]
        return self.through((*self.blocks, own), input_ids, labels)


class Holding(nn.Module):
    """A model in another, in float64, because batch norm of two samples amplifies rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.norm, self.head = gpt2().transformer, nn.BatchNorm1d(32), nn.Linear(32, 1)
        self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        value = self.head(self.norm(self.backbone(input_ids=input_ids).last_hidden_state.mean(1)))
        return {"loss": value.pow(2).mean(), "logits": value}


class WithOwnParameters(nn.Module):
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
        logits = nn.functional.linear(hidden, self.inner.lm_head.weight) * self.temperature
        return {"loss": shifted(logits, labels), "logits": logits}
