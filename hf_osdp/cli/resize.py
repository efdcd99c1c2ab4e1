"""The same model with longer samples or wider, as a changed configuration."""

from __future__ import annotations

import copy
from typing import Any

_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
_WIDTHS = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim",
    "embedding_size", "word_embed_proj_dim", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
"""Sizes and numbers of heads that grow with the width, where a configuration has them."""


def position_names(config: Any) -> tuple[str, ...]:
    """Fields of a configuration that bound its positions."""
    aliases = getattr(config, "attribute_map", {})
    return tuple(name for name in _POSITIONS if name not in aliases and isinstance(getattr(config, name, None), int))


def with_positions(config: Any, positions: int) -> Any:
    """A copy whose tables of positions hold at least so many."""
    changed = copy.deepcopy(config)
    for name in position_names(config):
        setattr(changed, name, max(positions, getattr(config, name)))
    return changed


def head_step(config: Any) -> int:
    """Heads come in multiples of this: as many as share one key-value head.

    Raises:
        ValueError: the configuration has no width and heads that can be changed.
    """
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not isinstance(width, int) or not isinstance(heads, int) or width % heads:
        raise ValueError(f"{type(config).__name__} has no hidden_size that is a multiple of its num_attention_heads.")
    pairs = getattr(config, "num_key_value_heads", None) or heads
    return heads // pairs if heads % pairs == 0 else heads


def with_heads(config: Any, heads: int) -> Any:
    """A copy with so many heads of the same size; width, inner width and key-value heads grow in proportion.

    Args:
        config: a transformers configuration.
        heads: a multiple of `head_step(config)`.
    """
    changed, before = copy.deepcopy(config), config.num_attention_heads
    pairs = getattr(config, "num_key_value_heads", None)
    aliases = getattr(config, "attribute_map", {})
    for name in _WIDTHS:
        if name not in aliases and isinstance(size := getattr(config, name, None), int):
            setattr(changed, name, size * heads // before)
    if isinstance(pairs, int):
        changed.num_key_value_heads = pairs * heads // before
    changed.hidden_size = config.hidden_size // before * heads
    changed.num_attention_heads = heads
    return changed
