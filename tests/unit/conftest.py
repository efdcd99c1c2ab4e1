"""Tiny configurations of many architectures, built without the hub."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

_BERT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
_LLAMA = {**_BERT, "num_key_value_heads": 1, "head_dim": 16}
_BART = {
    "encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 100, "pad_token_id": 0,
}  # fmt: skip
_ARGUMENTS = {
    "GPT2LMHeadModel": {
        "n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": _BERT,
    "RobertaForMaskedLM": {**_BERT, "max_position_embeddings": 66},
    "DistilBertForMaskedLM": {"n_layers": 2, "dim": 32, "n_heads": 2, "hidden_dim": 64, "vocab_size": 100},
    "T5ForConditionalGeneration": {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16,
                                   "vocab_size": 100},
    "BartForConditionalGeneration": _BART,
    "OPTForCausalLM": {
        "num_hidden_layers": 2, "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 2, "vocab_size": 100,
        "word_embed_proj_dim": 32,
    },
    "LlamaForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "GemmaForCausalLM": _LLAMA,
    "ViTForImageClassification": {**{k: v for k, v in _BERT.items() if k != "vocab_size"}, "image_size": 32,
                                  "patch_size": 8},
    "WhisperForConditionalGeneration": {**_BART, "max_source_positions": 30, "max_target_positions": 40,
                                        "num_mel_bins": 8},
    "MixtralForCausalLM": {**_LLAMA, "num_local_experts": 4},
    "AlbertForMaskedLM": {**_BERT, "embedding_size": 16},
}  # fmt: skip


@pytest.fixture
def configuration():
    """From a model class's name to its tiny configuration; keyword arguments change it."""
    transformers = pytest.importorskip("transformers")

    def make(name: str, **changes):
        config_class = getattr(transformers, name).config_class
        return config_class(**{**_ARGUMENTS[name], **changes})

    return make


@pytest.fixture
def meta_model(configuration):
    """From a model class's name to a tiny model on the meta device."""
    transformers = pytest.importorskip("transformers")

    def make(name: str, **changes):
        with torch.device("meta"):
            return getattr(transformers, name)._from_config(configuration(name, **changes))

    return make


@pytest.fixture
def real_model(configuration):
    """From a model class's name to a tiny model with weights."""
    transformers = pytest.importorskip("transformers")

    def make(name: str, **changes):
        torch.manual_seed(0)
        return getattr(transformers, name)(configuration(name, **changes))

    return make
