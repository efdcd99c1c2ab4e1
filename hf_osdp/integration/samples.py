"""How long one sample is, read from the data itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

_LOOKED_AT = 256
"""Samples that are looked at; the longest of them counts."""
_TOKEN_FIELDS = ("input_ids", "inputs_embeds")


def longest_sample(dataset: Any) -> int | None:
    """Tokens of the longest of a dataset's first samples.

    Args:
        dataset: whatever a DataLoader takes; an iterable one is started and dropped.

    Returns:
        The length, or None where the samples do not show one.
    """
    if dataset is None:
        return None
    with torch.random.fork_rng(devices=[]):
        try:
            return max((length for length in map(_length, _first_samples(dataset)) if length is not None), default=None)
        except (KeyError, IndexError, TypeError):
            return None


def batch_length(dataset: Any, collate: Callable[[list[Any]], Any]) -> int | None:
    """Tokens of a sample after the DataLoader's collate function, padding included.

    Args:
        dataset: the DataLoader's dataset.
        collate: its `collate_fn`.

    Returns:
        The length, or None where the batch does not show one.
    """
    with torch.random.fork_rng(devices=[]):
        samples = list(_first_samples(dataset))
        return _batch_tokens(collate(samples)) if samples else None


def batch_size_of(loader: DataLoader, *, share: int) -> int | None:
    """Samples that one process gets at once.

    Args:
        loader: not yet prepared.
        share: processes that one of its batches is split over.

    Returns:
        The number, or None where the loader does not say.
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return None if size is None else size // share


def _first_samples(dataset: Any) -> Iterator[Any]:
    """By index where there is a length, as torch's samplers do it; else from a fresh iterator."""
    if hasattr(dataset, "__len__"):
        return (dataset[index] for index in range(min(len(dataset), _LOOKED_AT)))
    return islice(iter(dataset), _LOOKED_AT)


def _length(sample: Any) -> int | None:
    """Tokens of one sample that is a mapping with `input_ids`, a tensor, or a tuple that starts with one."""
    if isinstance(sample, Mapping):
        sample = next((sample[name] for name in _TOKEN_FIELDS if name in sample), None)
    elif isinstance(sample, (tuple, list)) and sample and isinstance(sample[0], torch.Tensor):
        sample = sample[0]
    return len(sample) if sample is not None and hasattr(sample, "__len__") else None


def _batch_tokens(batch: Any) -> int | None:
    """The second dimension of the batch's token tensor."""
    if isinstance(batch, Mapping):
        batch = next((batch[name] for name in _TOKEN_FIELDS if name in batch), None)
    elif isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    return int(batch.shape[1]) if isinstance(batch, torch.Tensor) and batch.dim() > 1 else None
