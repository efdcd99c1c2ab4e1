"""Masks for masked language modelling: in training drawn anew for each batch, for evaluation once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, default_data_collator

_MOST_WORKERS = 1000
"""Data loader workers of a rank, each of which adds its number to the seed."""


def frame_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The tokens that begin and end a sample.

    Raises:
        ValueError: the tokenizer has none, or no mask, because it is for another kind of model.
    """
    for name in ("cls_token", "sep_token", "mask_token"):
        if getattr(tokenizer, name) is None:
            source = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(f"The tokenizer {source} has no {name}; name one of a masked language model with tokenizer_name.")
    return tokenizer.cls_token_id, tokenizer.sep_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """Hides part of the tokens: 8 of 10 behind the mask, 1 behind another token, 1 stays as it is, as BERT has it."""

    tokenizer: PreTrainedTokenizerBase
    probability: float
    """Part of the tokens that are to be guessed."""
    seed: int

    def once(self, blocks: Dataset) -> Dataset:
        """The blocks with masks that stay, so that what is evaluated before and after training is the same."""
        mask = self._collator(self.seed)

        def masked(rows: dict[str, list[list[int]]]) -> dict[str, Any]:
            batch = mask([{"input_ids": row} for row in rows["input_ids"]])
            return {name: batch[name].numpy() for name in ("input_ids", "labels")}

        return blocks.map(masked, batched=True, desc="Masking")

    def collator(self, rank: int) -> Collator:
        """What makes batches of a rank, each rank with masks of its own."""
        return Collator(mask=self._collator(self.seed + _MOST_WORKERS * rank))

    def _collator(self, seed: int) -> DataCollatorForLanguageModeling:
        return DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=self.probability, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Batches of samples, which get masks where they have none."""

    mask: DataCollatorForLanguageModeling

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return default_data_collator(samples) if "labels" in samples[0] else dict(self.mask(samples))
