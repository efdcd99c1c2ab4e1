"""Tiny models, without dropout by default."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from tests.helpers import quantized
from tests.helpers.architectures import tiny_config

VOCABULARY = 100
_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": VOCABULARY}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tiny(name: str, **changes: Any) -> nn.Module:
    """Return a tiny model of this class in float32, with the same weights at each call."""
    config = tiny_config(name, **changes)
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config)


def gpt2(**changes: Any) -> nn.Module:
    """Return a GPT-2, whose embedding is tied to the head."""
    return tiny("GPT2LMHeadModel", **{"initializer_range": 0.1, **changes})


def llama(*, tied: bool = False, **changes: Any) -> nn.Module:
    """Return a Llama with an untied head, unless `tied`."""
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
    """Return a model of a class for which tests have no tiny sizes."""
    torch.manual_seed(0)
    return cls(config)


def clip() -> nn.Module:
    """Return a CLIP model: two towers and a scale without dimensions."""
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "projection_dim": 16,
    }
    config = transformers.CLIPConfig(
        text_config={
            **tower,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "bos_token_id": 0,
            "eos_token_id": VOCABULARY - 1,
        },
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    return made(transformers.CLIPModel, config)


def deberta() -> nn.Module:
    """Return a DeBERTa classifier, whose pooler and loss branch on values."""
    config = transformers.DebertaV2Config(
        **_TEXT,
        **_NO_DROPOUT,
        num_hidden_layers=2,
        max_position_embeddings=64,
        num_labels=3,
        pooler_dropout=0.0,
        pooler_hidden_size=32,
    )
    return made(transformers.DebertaV2ForSequenceClassification, config)


def wav2vec2() -> nn.Module:
    """Return a Wav2Vec2 model with CTC loss, without time masking, which is random."""
    config = transformers.Wav2Vec2Config(
        **{**_TEXT, "vocab_size": 32}, num_hidden_layers=2, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8),
        num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0,
        ctc_loss_reduction="mean", ctc_zero_infinity=True, pad_token_id=0,
    )  # fmt: skip
    return made(transformers.Wav2Vec2ForCTC, config)


def mamba() -> nn.Module:
    """Return a Mamba model, which has no attention."""
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=8, use_mambapy=False
    )
    return made(transformers.MambaForCausalLM, config)


def recurrent_gemma() -> nn.Module:
    """Return a RecurrentGemma model, which keeps state on its modules."""
    config = transformers.RecurrentGemmaConfig(
        **_TEXT,
        num_hidden_layers=3,
        num_key_value_heads=1,
        lru_width=32,
        attention_window_size=16,
        block_types=["recurrent", "attention"],
    )
    return made(transformers.RecurrentGemmaForCausalLM, config)


class OneSample(nn.Module):
    """Runs a batch of one sample, and no other."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = 8) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of predicting the tokens themselves."""
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
        """Return the logits, and the loss if there are labels."""
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
