"""Cut the batches of an optimizer step, as the stock Trainer loads them, into the micro-batches that a plan runs.

So each rank trains on the samples of its stock step, also in the last step of an epoch, and collators draw the same
random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ..distributed.mesh import collective_device, world_size
from ..errors import OSDPError
from ..planner.token_budget import TokenBudget

_MASK, _LABELS, _IGNORED = "attention_mask", ("labels", "shift_labels"), -100
_OF_TOKENS = {
    _MASK, *_LABELS, "decoder_attention_mask", "decoder_input_ids", "input_ids", "position_ids",
    "special_tokens_mask", "token_type_ids",
}  # fmt: skip
"""Fields with a value for each token."""
_PICTURES = 4
"""Dimensions of a batch of pictures, which are alike in all batches."""

Batch = Mapping[str, torch.Tensor]


def reason_against_cuts(batch: Any, *, samples: int | None = None, by_length: bool = False) -> str | None:  # noqa: ANN401  what a collator returns
    """Return why a batch, of this number of samples if it is known, cannot be cut into samples, or `by_length`; None
    if it can.
    """
    if not isinstance(batch, Mapping) or not batch:
        return "its batches are no mappings of tensors"
    mask, rows = batch.get(_MASK), samples
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != (rows := rows or len(value)):
            return f"{name!r} of its batches has no row for each sample"
        alike = value.dim() == 1 or (value.dim() == _PICTURES and value.is_floating_point())
        if not alike and not (name in _OF_TOKENS and value.dim() == 2):
            return f"{name!r} of its batches may have a value for each token"
    if by_length and mask is None:
        return f"its batches have no {_MASK}, which says where a sample ends"
    return None


def micro_batches(
    batches: Sequence[Batch], size: int, budget: TokenBudget | None = None
) -> list[tuple[dict[str, torch.Tensor], float]]:
    """Cut the batches of this rank's step. Collective with a budget.

    Args:
        batches: as the stock Trainer runs them, each with padding to its own longest sample.
        size: samples of a micro-batch.
        budget: decides in place of `size`, and takes samples from long to short.

    Returns:
        Micro-batches, without columns that only hold padding, each with its samples as a share of a batch's.

    Raises:
        OSDPError: a batch cannot be cut, though the one seen before training could.
    """
    reasons = (reason_against_cuts(batch, by_length=budget is not None) for batch in batches)
    if (reason := next(filter(None, reasons), None)) is not None:
        raise OSDPError(
            f"A step cannot be cut into the plan's micro-batches: {reason}; set OSDPConfig(micro_batch_size=...) to"
            " the samples of the arguments' batches."
        )
    parts = []
    for rows, alike in groupby(batches, _rows):
        group = list(alike)
        together = len(group) if budget is not None else lcm(rows, size) // rows
        for first in range(0, len(group), together):
            cut = _cut(_joined(group[first : first + together]), size, budget)
            parts += [(part, _rows(part) / rows) for part in cut]
    return parts


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _joined(batches: Sequence[Batch]) -> Batch:
    """Join the samples of batches, with padding to the longest one."""
    if len(batches) == 1:
        return batches[0]
    joined = {}
    for name in batches[0]:
        values = [batch[name] for batch in batches]
        if name in _OF_TOKENS and values[0].dim() == 2:
            widest, filler = max(value.shape[1] for value in values), _IGNORED if name in _LABELS else 0
            values = [pad(value, (0, widest - value.shape[1]), value=filler) for value in values]
        joined[name] = torch.cat(values)
    return joined


def _cut(batch: Batch, size: int, budget: TokenBudget | None) -> list[dict[str, torch.Tensor]]:
    order, lengths, rows = None, None, _rows(batch)
    mask = batch.get(_MASK)
    if mask is not None:
        used = mask != 0
        for labels in (batch[name] for name in _LABELS if name in batch and batch[name].shape == mask.shape):
            used = used | (labels != _IGNORED)
        last = (used * torch.arange(1, used.shape[1] + 1, device=used.device)).amax(1)
        if budget is not None:
            last, order = last.sort(descending=True, stable=True)
        lengths = [max(1, length) for length in last.tolist()]
    if budget is None or lengths is None:
        sizes = [size] * (rows // size) + [rows % size] * (rows % size > 0)
    else:
        sizes = budget.cut(lengths)
        if world_size() > 1:
            count = torch.tensor(len(sizes), device=collective_device())
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
            sizes = budget.cut(lengths, parts=int(count))
    parts = []
    for start, end in zip([0, *accumulate(sizes)], accumulate(sizes), strict=False):
        chosen: Any = slice(start, end) if order is None else order[start:end]
        part = {name: value[chosen] for name, value in batch.items()}
        if mask is not None and lengths is not None:
            width = TokenBudget.width(max(lengths[start:end]))
            part |= {name: part[name][:, :width] for name, value in batch.items() if _is_like(name, value, mask)}
        parts.append(part)
    return parts


def _is_like(name: str, value: torch.Tensor, mask: torch.Tensor) -> bool:
    return name in _OF_TOKENS and value.shape == mask.shape
