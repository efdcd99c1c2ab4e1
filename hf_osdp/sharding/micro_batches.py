"""Cut the batches of an optimizer step, as the stock Trainer loads them, into the micro-batches that a plan runs.

So each rank trains on the samples of its stock step, also in the last step of an epoch, and collators draw the same
random numbers. Rows keep the columns that the collator gave them; only under a budget of tokens are columns of padding
cut off and added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from ..distributed.mesh import collective_device, rank, world_size
from ..errors import OSDPError
from ..measurement.timing import over_ranks
from ..planner.plan import Plan
from ..planner.token_budget import TokenBudget
from .steps import micro_step

_MASK, _IDS, _LABELS, _IGNORED = "attention_mask", "input_ids", "labels", -100
_OF_TOKENS = {
    _MASK, _IDS, _LABELS, "decoder_attention_mask", "decoder_input_ids", "position_ids", "shift_labels",
    "special_tokens_mask", "token_type_ids",
}  # fmt: skip
"""Fields with a value for each token."""
DEPEND_ON_PADDING = {
    "big_bird", "bigbird_pegasus", "canine", "convbert", "cpmant", "fnet", "funnel", "mobilebert", "mra",
    "nystromformer", "paligemma", "prophetnet", "reformer", "xlnet", "yoso",
}  # fmt: skip
"""Model types whose outputs change with columns of padding: convolutions, pooling, Fourier transforms, random or
hashed blocks, summaries at the last column (`tests/zoo/test_padding.py` tries the others).
"""
_SUMMARIES = {"last", "mean"}
"""Values of `summary_type` for which a classifier reads columns of padding."""
_OF_LONGEST = {"dynamic", "longrope"}
"""Rotary positions whose frequencies change with the columns of a batch."""
_PICTURES = 4
"""Dimensions of a batch of pictures."""

Batch = Mapping[str, torch.Tensor]
Part = tuple[dict[str, torch.Tensor], float]
"""A micro-batch, and the share of a batch's loss that it has if losses are means over samples."""


def reason_against_cuts(batch: Any, *, samples: int | None = None, by_length: bool = False) -> str | None:  # noqa: ANN401  what a collator returns
    """Return why a batch, of this number of samples if it is known, cannot be cut into samples, or `by_length`; None
    if it can.
    """
    if not isinstance(batch, Mapping) or not batch:
        return "its batches are no mappings of tensors"
    rows = samples
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != (rows := rows or len(value)):
            return f"{name!r} of its batches has no row for each sample"
        of_pictures = value.dim() == _PICTURES and value.is_floating_point() and _IDS not in batch
        if not (value.dim() == 1 or of_pictures or (name in _OF_TOKENS and value.dim() == 2)):
            return f"{name!r} of its batches may have a value for each token"
    if by_length and (_MASK not in batch or _IDS not in batch):
        return f"its batches have no {_MASK}, which says where a sample ends"
    return None


def micro_batches(
    batches: Sequence[Batch], size: int, budget: TokenBudget | None = None, *, averages: bool, pad_token: int = 0
) -> list[Part]:
    """Cut the batches of this rank's step, into as many micro-batches as every other rank. Collective.

    Args:
        batches: as the stock Trainer runs them, each with padding to its own longest sample.
        size: most samples of a micro-batch. Batches of equal shapes are joined to reach it.
        budget: where the batches of all ranks allow it, decides in place of `size`, takes samples from long to short,
            and joins all of them.
        averages: whether losses are means over samples.
        pad_token: what `input_ids` are filled with where rows become longer.

    Returns:
        Micro-batches, each with its samples, or of means its labels, as a share of those of a batch; 0 without labels.

    Raises:
        OSDPError: on all ranks, if a batch cannot be cut, though the one seen before training could.
    """
    rows = [_rows(batch) for batch in batches]
    if budget is not None and world_size() == 1 and len(set(rows)) > 1:  # the last batch of an epoch
        alike = [list(group) for _, group in groupby(batches, _rows)]
        cuts = [micro_batches(group, size, budget, averages=averages, pad_token=pad_token) for group in alike]
        return [part for parts in cuts for part in parts]
    reasons = (reason_against_cuts(batch, by_length=budget is not None) for batch in batches)
    reason = next(filter(None, reasons), None)
    partly = reason is None and averages and any(map(_lacks_labels, batches))
    if budget is not None:
        fits = (
            reason is None and not partly and len(set(rows)) == 1
            and len({frozenset((name, v.dtype, v.dim()) for name, v in batch.items()) for batch in batches}) == 1
            and not any(map(is_padded_left, batches))
        )  # fmt: skip
        if any(over_ranks([int(not fits)])):
            return micro_batches(batches, size, averages=averages)
        joined = dealt(_joined(batches, pad_token), pad_token) if budget.deals else _joined(batches, pad_token)
        longest, order = lengths_of(joined).sort(descending=True, stable=True)
        lengths = longest.tolist()
        (most,) = over_ranks([len(budget.cut(lengths))])
        sizes, widths = budget.cut(lengths, parts=int(most)), list(map(budget.width, lengths))
        return _by_length(joined, order, widths, sizes, rows[0])
    if reason is not None:
        over_ranks([1, 0, 0, 0])
        raise _uncut(reason)
    shapes = {tuple((name, value.dtype, value.shape) for name, value in batch.items()) for batch in batches}
    unlike, count = int(partly or len(shapes) > 1), sum(-(-number // size) for number in rows)
    failed, differ, most, least = over_ranks([0, unlike, count, -count])
    if failed or -least < most:
        raise _uncut("another rank cannot cut its own" if failed else "ranks have different numbers of samples")
    together = size // rows[0]
    if differ or together < 2:
        return [part for batch in batches for part in _chunks(batch, size, by_labels=partly)]
    joins = [batches[first : first + together] for first in range(0, len(batches), together)]
    return [(dict(_joined(join)), float(len(join))) for join in joins]


def parts_of_step(
    model: nn.Module, batches: Batch | Sequence[Batch], plan: Plan, budget: TokenBudget | None
) -> Iterator[Part]:
    """Yield the micro-batches of this rank's step in a loop, each within its `micro_step`. Collective."""
    loaded = [batches] if isinstance(batches, Mapping) else batches
    pad_token, size = pad_token_of(model), plan.micro_batch_size
    parts = micro_batches(loaded, size, budget, averages=False, pad_token=pad_token)
    whole = sum(map(_rows, loaded))
    for number, (part, _) in enumerate(parts, 1):
        with micro_step(model, is_last=number == len(parts)):
            yield part, _rows(part) / whole


def reason_against_lengths(model: nn.Module, *, compiles: bool) -> str | None:
    """Return why a model's samples cannot be cut by length; None if nothing of the model is against it."""
    config = getattr(model, "config", None)
    kind, summary = getattr(config, "model_type", ""), getattr(config, "summary_type", None)
    if getattr(config, "is_encoder_decoder", False):
        return "the model has rows of two lengths"
    if kind in DEPEND_ON_PADDING or summary in _SUMMARIES:
        return f"outputs of {kind} may depend on padding"
    kinds = (getattr(module, "rope_type", None) for module in model.modules())
    named = {one for found in kinds for one in (found.values() if isinstance(found, dict) else [found])}
    if rotary := sorted(_OF_LONGEST & named):
        return f"rotary positions of the kind {rotary[0]!r} depend on the longest row of a batch"
    adapters = getattr(model, "peft_config", {})
    if isinstance(adapters, dict) and any(
        getattr(one, "is_prompt_learning", False) and one.task_type == "SEQ_CLS" for one in adapters.values()
    ):
        return "a classifier behind a learned prompt may read the last column, also of padding"
    return "compiled blocks would be compiled for each length" if compiles else None


def _uncut(reason: str) -> OSDPError:
    return OSDPError(
        f"A step cannot be cut into the plan's micro-batches: {reason}; set micro_batch_size to the samples of the"
        " arguments' batches."
    )


def dealt(batch: Batch, pad_token: int) -> Batch:
    """Deal the samples of all ranks' steps in turn, from long to short, so that ranks have equal work; each rank keeps
    its own samples if their number or their columns differ between ranks. Collective.
    """
    columns = batch[_MASK].shape[1]
    fields = [
        (name, value.dtype, len(value), *(("tokens",) if _is_of_tokens(name, value, columns) else value.shape[1:]))
        for name, value in sorted(batch.items())
    ]
    signature = crc32(repr(fields).encode())
    own, other, width = map(int, over_ranks([signature, -signature, columns]))
    if own != -other or world_size() == 1:
        return batch
    widened = {
        name: _widened(name, value, width, pad_token) if _is_of_tokens(name, value, columns) else value
        for name, value in sorted(batch.items())
    }
    rows = [value.flatten(1) if value.dim() > 1 else value[:, None] for value in widened.values()]
    sent = torch.cat([value.contiguous().view(torch.uint8) for value in rows], 1).to(collective_device())
    every = sent.new_empty(world_size() * len(sent), sent.shape[1])
    dist.all_gather_into_tensor(every, sent)
    parts = every.to(batch[_MASK].device).split([value.shape[1] * value.element_size() for value in rows], 1)
    found = {
        name: part.contiguous().view(value.dtype).reshape(-1, *value.shape[1:])
        for (name, value), part in zip(widened.items(), parts, strict=True)
    }
    order = lengths_of(found).argsort(descending=True, stable=True)
    return {name: value[order[rank() :: world_size()]] for name, value in found.items()}


def pad_token_of(model: nn.Module) -> int:
    """Return the id that stands for padding in a model's `input_ids`; 0 if it has none, as its results then do not
    depend on it.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    return max(getattr(text, "pad_token_id", None) or 0, 0)  # some configurations have -1


def _is_of_tokens(name: str, value: torch.Tensor, columns: int) -> bool:
    """Return whether a field of a batch with so many columns has a value for each token; labels that are numbers have
    one for each class.
    """
    of_classes = name == _LABELS and value.is_floating_point()
    return name in _OF_TOKENS and value.dim() == 2 and value.shape[1] == columns and not of_classes


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _chunks(batch: Batch, size: int, *, by_labels: bool) -> list[Part]:
    """Cut a batch without changing its columns; shares are `by_labels` where some samples have none."""
    cuts = [
        {name: value[start : start + size] for name, value in batch.items()} for start in range(0, _rows(batch), size)
    ]
    counts = [int((cut[_LABELS] != _IGNORED).sum()) for cut in cuts] if by_labels else []
    if not sum(counts):
        counts = list(map(_rows, cuts))
    return [(cut, count / sum(counts)) for cut, count in zip(cuts, counts, strict=True)]


def _lacks_labels(batch: Batch) -> bool:
    labels = batch.get(_LABELS)
    return labels is not None and labels.dim() == 1 and bool((labels == _IGNORED).any())


def is_padded_left(batch: Batch) -> bool:
    """Return whether a sample's padding is before its tokens."""
    return _MASK in batch and bool((batch[_MASK][:, 1:] > batch[_MASK][:, :-1]).any())


def _joined(batches: Sequence[Batch], pad_token: int = 0) -> Batch:
    """Join the samples of batches, with padding on the right to the longest one."""
    if len(batches) == 1:
        return batches[0]
    joined = {}
    for name in batches[0]:
        values = [batch[name] for batch in batches]
        widest = max(value.shape[-1] for value in values)
        joined[name] = torch.cat([_widened(name, value, widest, pad_token) for value in values])
    return joined


def _widened(name: str, value: torch.Tensor, width: int, pad_token: int) -> torch.Tensor:
    """Return a field with padding on the right to this width, if it has a value for each token."""
    if name not in _OF_TOKENS or value.dim() != 2:
        return value
    filler = pad_token if name == _IDS else _IGNORED if "labels" in name else 0
    return pad(value, (0, width - value.shape[1]), value=filler)


def lengths_of(batch: Batch) -> torch.Tensor:
    """Return the tokens of a batch's samples, padding at their end left out: those that the mask or labels use; if
    there is no mask, the columns of their ids.
    """
    if _MASK not in batch:
        return torch.full((_rows(batch),), batch[_IDS].shape[1])
    mask = batch[_MASK]
    used = mask != 0
    for name, value in batch.items():
        if "labels" in name and _is_of_tokens(name, value, mask.shape[1]):
            used = used | (value != _IGNORED)
    return (used * torch.arange(1, used.shape[1] + 1, device=used.device)).amax(1).clamp(min=1)


def _by_length(batch: Batch, order: torch.Tensor, widths: list[int], sizes: list[int], rows: int) -> list[Part]:
    """Cut samples in this order, without columns that only hold padding; a batch has had so many rows."""
    parts = []
    for start, end in zip([0, *accumulate(sizes)], accumulate(sizes), strict=False):
        width, columns = widths[start], batch[_MASK].shape[1]
        part = {name: value[order[start:end]] for name, value in batch.items()}
        own = {name for name, value in batch.items() if _is_of_tokens(name, value, columns)}
        parts.append((part | {name: part[name][:, :width] for name in own}, (end - start) / rows))
    return parts
