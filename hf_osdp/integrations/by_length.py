"""Cut the samples of a rank's step into micro-batches by their lengths (`TokenBudget`), under the Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer

from ..distributed.mesh import collective_device, world_size
from ..errors import OSDPError
from ..modeling.batch import Inputs
from ..planner.token_budget import TokenBudget

_MASK = "attention_mask"
_OF_TOKENS = {
    _MASK, "input_ids", "inputs_embeds", "labels", "position_ids", "shift_labels", "special_tokens_mask",
    "token_type_ids",
}  # fmt: skip
"""Fields with a value for each token, whose padding is cut off."""


def reason_against_cuts(trainer: Trainer, inputs: Inputs | None) -> str | None:
    """Return why a Trainer's samples cannot be cut by length; None if they can."""
    model, config = trainer.model, getattr(trainer.model, "config", None)
    assert isinstance(model, nn.Module)
    if getattr(config, "is_encoder_decoder", False):
        return f"{type(model).__name__} has rows of two lengths"
    if trainer.args.train_sampling_strategy == "group_by_length":
        return "train_sampling_strategy='group_by_length' groups samples already"
    if trainer.accelerator.config.compile:
        return "compiled blocks would be compiled for each length"
    if not isinstance(trainer.train_dataset, Sized):
        return "the dataset is a stream"
    batch = None if inputs is None else inputs(2)
    return "its batches are not known" if batch is None else _reason_against(batch)


def _reason_against(batch: Any) -> str | None:  # noqa: ANN401
    """Return why a batch cannot be cut; None if it can."""
    mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return f"batches have no {_MASK} of samples × tokens, which says where a sample ends"
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != mask.shape[0]:
            return f"{name!r} of a batch has no row for each sample"
        if name not in _OF_TOKENS and value.dim() > 1 and value.shape[1] == mask.shape[1]:
            return f"{name!r} of a batch may have a value for each token"
    return None


def micro_batches(batch: Mapping[str, Any], budget: TokenBudget) -> list[dict[str, Any]]:
    """Cut the samples of this rank's step into as many micro-batches as every other rank. Collective.

    Args:
        batch: samples × tokens with padding, on any device.
        budget: what a micro-batch may hold.

    Returns:
        Micro-batches, from long samples to short ones, without the columns that only hold padding.

    Raises:
        OSDPError: this batch cannot be cut, though the one seen before training could.
    """
    if (reason := _reason_against(batch)) is not None:
        raise OSDPError(f"Samples cannot be cut by length, because {reason}; set batch_by_tokens=False.")
    used = batch[_MASK] != 0
    labels = batch.get("labels")
    if labels is not None and labels.shape == used.shape:
        used = used | (labels != -100)
    last = (used * torch.arange(1, used.shape[1] + 1, device=used.device)).amax(1)
    longest, order = last.sort(descending=True, stable=True)
    lengths = [max(1, length) for length in longest.tolist()]
    sizes = budget.cut(lengths)
    if world_size() > 1:
        count = torch.tensor(len(sizes), device=collective_device())
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        sizes = budget.cut(lengths, parts=int(count))
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        {
            name: value[index][:, : budget.width(lengths[start])] if _is_of_tokens(name, value, used) else value[index]
            for name, value in batch.items()
        }
        for start, index in zip(starts, order.split(sizes), strict=True)
    ]


def _is_of_tokens(name: str, value: torch.Tensor, mask: torch.Tensor) -> bool:
    return name in _OF_TOKENS and value.shape[:2] == mask.shape
