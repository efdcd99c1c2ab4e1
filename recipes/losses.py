"""Losses that are the same however a step's samples are cut into micro-batches."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import ModelOutput


def mean_over_labels(outputs: ModelOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Cross-entropy in which each label has the same weight. BERT's own takes the mean of each micro-batch, and the Trainer adds those.

    Args:
        outputs: with `logits`, [samples, tokens, vocabulary] or [samples, classes].
        labels: [samples, tokens] or [samples]; -100 where nothing is to be guessed.
        num_items_in_batch: labels of the whole optimizer step, on all ranks.
    """
    logits = outputs.logits.view(-1, outputs.logits.shape[-1])
    labels = labels.view(-1)
    each = cross_entropy(logits, labels, reduction="none")
    if each.dtype in (torch.bfloat16, torch.float16):  # a sum of thousands has three digits in bf16
        each = each.float()
    return each.sum() / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
