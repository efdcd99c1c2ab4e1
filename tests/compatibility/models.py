"""Tiny models, without dropout by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from tests.helpers import quantized
from tests.helpers.architectures import tiny_config

from .losses import shifted

VOCABULARY = 100
SIZES = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
"""Fields of configurations, by class of model."""


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


def made(cls: type[nn.Module], config: Any) -> nn.Module:
    torch.manual_seed(0)
    return cls(config)


def of(name: str, **sizes: Any) -> nn.Module:
    """Return a model for which tests have no tiny sizes: those of models.yaml, and these."""
    cls = getattr(transformers, name)
    return made(cls, cls.config_class(**{**SIZES[name], **sizes}))


def llama_of(kind: str, **changes: Any) -> nn.Module:
    return made(getattr(transformers, f"LlamaFor{kind}"), tiny_config("LlamaForCausalLM", **changes))


def llama_scored(problem_type: str, num_labels: int) -> nn.Module:
    changes = {"pad_token_id": 0, "initializer_range": 0.1}
    return llama_of("SequenceClassification", problem_type=problem_type, num_labels=num_labels, **changes)


def gpt2_classifier() -> nn.Module:
    config = tiny_config("GPT2LMHeadModel", num_labels=3, pad_token_id=0)
    return made(transformers.GPT2ForSequenceClassification, config)


def reward_model() -> nn.Module:
    config = llama().config
    config.num_labels = 1
    return made(transformers.LlamaForSequenceClassification, config)


def wav2vec2_dropping_layers() -> nn.Module:
    model = of("Wav2Vec2ForCTC")
    model.config.layerdrop = 0.4
    return model


def llava(pixels: int, image_tokens: int) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=pixels, patch_size=8), text_config=text,
        image_token_id=VOCABULARY - 1, vision_feature_layer=-1, image_seq_length=image_tokens,
    )  # fmt: skip
    return made(transformers.LlavaForConditionalGeneration, config)


def llama_attending(kind: str) -> nn.Module:
    model = llama()
    model.set_attn_implementation(kind)
    return model


def gpt2_partly_frozen() -> nn.Module:
    model = gpt2()
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    return model


def llama_with_its_head_trained() -> nn.Module:
    model = llama().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


def llama_with_frozen_attention() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.requires_grad_(False)
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


def tasks() -> nn.Module:
    torch.manual_seed(0)
    return Tasks()


def holding() -> nn.Module:
    """Return a `Holding` in float64, because batch norm of two samples amplifies rounding."""
    return Holding().double()


class OneSample(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY, width: int = 8) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        (ids,), (targets,) = input_ids, labels
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return {"loss": nn.functional.cross_entropy(self.head(hidden), targets)}


class Plain(nn.Module):
    """A model that is not from transformers, with repeated blocks and its own loss."""

    def __init__(self, *, blocks: int = 3, width: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(blocks)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = gpt2().transformer
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 1)

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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.own = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, task: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for block in (*self.blocks, self.own[0 if task is None else int(task[0])]):
            hidden = block(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}
