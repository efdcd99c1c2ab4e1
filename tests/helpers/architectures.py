"""Tiny models of many architectures, and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import UnitDescription
from hf_osdp.tracing.describe import describe

from .training import Batches

TOKENS = 12
SAMPLES = 4
"""Samples of one optimizer step, over all ranks."""

_TEXT = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100,
}  # fmt: skip
_BERT = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA = {**_TEXT, "num_key_value_heads": 1, "head_dim": 16}
_BART = {
    "encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 100, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "dropout": 0.0,
}  # fmt: skip
_VISION = {**_BERT, "image_size": 32, "patch_size": 8, "num_labels": 5}
del _VISION["vocab_size"]
TINY: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64, "bos_token_id": 0,
        "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": {**_BERT, "num_labels": 3},
    "RobertaForMaskedLM": {**_BERT, "max_position_embeddings": 66},
    "DistilBertForMaskedLM": {
        "n_layers": 2, "dim": 32, "n_heads": 2, "hidden_dim": 64, "vocab_size": 100, "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "T5ForConditionalGeneration": {
        "num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16, "vocab_size": 100, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": {**_BART, "decoder_start_token_id": 2},
    "OPTForCausalLM": {
        "num_hidden_layers": 2, "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 2, "vocab_size": 100,
        "word_embed_proj_dim": 32, "dropout": 0.0,
    },
    **{f"{family}ForCausalLM": _LLAMA for family in (
        "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3",
    )},
    "Phi3ForCausalLM": {**{k: v for k, v in _LLAMA.items() if k != "head_dim"}, "pad_token_id": 0, "resid_pdrop": 0.0},
    "GPTNeoXForCausalLM": _TEXT,
    "BloomForCausalLM": {"n_layer": 2, "hidden_size": 32, "n_head": 2, "vocab_size": 100},
    "FalconForCausalLM": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
    "MixtralForCausalLM": {**_LLAMA, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "ViTForImageClassification": _VISION,
    "SwinForImageClassification": {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
        "num_labels": 5, "drop_path_rate": 0.0,
    },
    "WhisperForConditionalGeneration": {
        **_BART, "max_source_positions": 30, "max_target_positions": 40, "num_mel_bins": 8,
        "decoder_start_token_id": 2,
    },
    "AlbertForMaskedLM": {**_BERT, "embedding_size": 16, "classifier_dropout_prob": 0.0},
    "ElectraForMaskedLM": {**_BERT, "embedding_size": 32},
    "DebertaV2ForMaskedLM": {**_BERT, "max_position_embeddings": 64},
    "ResNetForImageClassification": {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic", "num_labels": 5,
    },
}  # fmt: skip
"""Class of the model → sizes that make it tiny, without dropout."""
BLOCK_CLASSES = {"AlbertForMaskedLM": ("AlbertLayer",)}
"""Where blocks are not found by themselves."""


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of a tiny model."""
    return getattr(transformers, name).config_class(**{**TINY[name], **changes})


def tiny_architecture(name: str, **changes: Any) -> nn.Module:
    """The same weights at each call, in float64."""
    torch.manual_seed(0)
    config = tiny_config(name, **changes)
    model = getattr(transformers, name)._from_config(config, experts_implementation="eager")  # others have no float64
    return model.to(torch.float64).train()


@contextmanager
def no_float32() -> Iterator[None]:
    """Where Gemma's norm asks for float32, in which sums depend on their order in the 8th digit, it gets float64."""
    stock = torch.Tensor.float  # positions stay as they are
    torch.Tensor.float = lambda tensor: tensor.double() if tensor.is_floating_point() else stock(tensor)
    try:
        yield
    finally:
        torch.Tensor.float = stock


def batch_of(model: nn.Module, step: int, *, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """Part `part` of `parts` of the samples of a step, with random content."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = SAMPLES // parts

    def filled(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if name == "attention_mask":
            return value[:size]
        if value.is_floating_point():
            value = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        else:
            classes = getattr(model.config, "vocab_size", 100) if value.dim() > 1 else model.config.num_labels
            value = torch.randint(0, classes, value.shape, generator=generator)
        return value[part * size : (part + 1) * size]

    return {name: filled(name, value) for name, value in training_batch(model, TOKENS)(SAMPLES).items()}


def loss_of(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Mean cross-entropy in float64: the losses inside transformers go through float32."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def units_of(model: nn.Module) -> tuple[UnitDescription, ...]:
    """The model's units as described; a trace, which takes seconds, tells only which of them run several times."""
    classes = BLOCK_CLASSES.get(type(model).__name__)
    if classes is None:
        return find_units(model)
    return describe(model, sequence_length=TOKENS, block_classes=classes, recomputation=False).units


def batches_of(model: nn.Module) -> Batches:
    """Return batches, of which the first part alone moves batch norm's running statistics: rank 0's are saved."""

    def batch(step: int, *, part: int = 0, parts: int = 1) -> dict[str, Any]:
        for module in model.modules():
            if hasattr(module, "track_running_stats"):
                module.track_running_stats = part == 0
        return batch_of(model, step, part=part, parts=parts)

    return batch
