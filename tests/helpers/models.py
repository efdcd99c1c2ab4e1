"""Tiny models of three families, in float64, with sizes that no world size divides, and their batches."""

from __future__ import annotations

import functools

import torch
from torch import nn

VOCABULARY = 61
SEQUENCE_LENGTH = 12
SAMPLES = 8
"""Samples of one optimizer step over all ranks and micro-steps."""

MODELS = ("gpt2", "bert", "llama")


def tiny_model(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, layers: int = 4, width: int = 20,
    scale: float = 1.0,
) -> nn.Module:  # fmt: skip
    """`gpt2`: embedding tied to the head; `bert`: a bias shared as well; `llama`: nothing tied.

    By a `scale` of 10 the loss falls soon.
    """
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    match name:
        case "gpt2":
            config = GPT2Config(
                n_layer=layers, n_embd=width, n_head=4, vocab_size=VOCABULARY, n_positions=16, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )  # fmt: skip
            model = GPT2LMHeadModel(config)
        case "bert":
            config = BertConfig(
                num_hidden_layers=layers, hidden_size=width, num_attention_heads=4, intermediate_size=36,
                vocab_size=VOCABULARY, max_position_embeddings=16, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )  # fmt: skip
            model = BertForMaskedLM(config)
        case "llama":
            config = LlamaConfig(
                num_hidden_layers=layers, hidden_size=width, num_attention_heads=2, num_key_value_heads=1,
                intermediate_size=36, vocab_size=VOCABULARY, max_position_embeddings=16, tie_word_embeddings=False,
            )  # fmt: skip
            model = with_own_norms(LlamaForCausalLM(config))
        case _:
            raise ValueError(f"tiny_model({name!r}) is not known; use one of {', '.join(MODELS)}.")
    for parameter in model.parameters():
        parameter.data.mul_(scale if parameter.ndim > 1 else 1.0)
    return model.to(dtype).train()


def with_own_norms(model: nn.Module) -> nn.Module:
    """Let Llama's norms compute in the dtype of their input."""
    for norm in (module for module in model.modules() if hasattr(module, "variance_epsilon")):
        norm.forward = functools.partial(_norm, norm)
    return model


def _norm(norm: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Llama's norm in its input's dtype: transformers' computes in float32, which compiled code rounds another way."""
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def tiny_batch(step: int, *, part: int = 0, parts: int = 1) -> dict[str, torch.Tensor]:
    """A part of the step's samples; every position counts in the loss, so that means of parts can be averaged."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE_LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE_LENGTH), generator=generator)
    size = SAMPLES // parts
    rows = slice(part * size, (part + 1) * size)
    return {"input_ids": ids[rows], "labels": labels[rows]}


def tiny_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy in the logits' own dtype: the losses inside transformers go through float32."""
    logits = model(input_ids=batch["input_ids"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
