"""Ways to split a model that may pay; split it, or a copy of it, and find its units."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from torch import nn

from ..errors import OSDPError
from ..planner.description import DType, GatherSpan, ModelDescription, UnitDescription
from ..planner.split import ModelSplit, OperatorSplit
from .loss_pieces import loss_in_pieces
from .split.apply_split import split_operators
from .split.modules import is_conv1d
from .split.names import is_split
from .units import embedding_and_head, find_units, modules_by_name

SHALLOW = 8
"""Models of up to so many blocks are split into operators: of many blocks, one is fine enough a unit."""
_LOSS_PIECES = 8
_HEAD_SLICES = 4
_FRACTIONS = (2, 4)
"""Operators are put in slices no larger than the largest one over so many."""
MOST_SLICES = 64
"""Of all blocks together: a search over more units than that takes minutes."""


def apply_split(model: nn.Module, split: ModelSplit) -> None:
    """Change a model in place, before it is sharded, in what is not done yet; refuse as `split_operators` and `loss_in_pieces`."""
    if split.sliced and not is_split(model):
        split_operators(model, split.sliced)
    if split.loss_pieces > 1:
        loss_in_pieces(model, split.loss_pieces)


def split_copy(model: nn.Module, split: ModelSplit) -> nn.Module:
    """Return a copy on the meta device that is split so; the model stays as it is. Refuse as `apply_split`."""
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    memo |= {id(b): b.detach().to("meta") for b in model.buffers()}
    copied = copy.deepcopy(model, memo)
    apply_split(copied, split)
    return copied


def split_units(
    model: nn.Module, split: ModelSplit, block_classes: Sequence[str] | None = None, *, low_precision: bool = False
) -> tuple[UnitDescription, ...]:
    """Return the units of a model that is split so (see `find_units`); the model stays as it is."""
    return find_units(
        split_copy(model, split) if split.sliced else model, block_classes, operators=split.operators, low_precision=low_precision
    )


def possible_splits(
    model: nn.Module, description: ModelDescription, *, vocabulary: bool = True, operators: bool = True, slices: bool = True
) -> tuple[ModelSplit, ...]:
    """Return the splits that may pay, the plain model left out, the mildest first.

    These are the loss in pieces, or the vocabulary projection with its loss in slices, where the model lets it; in shallow models
    operator units, operators in slices, and these with the loss in pieces or the projection in slices.

    The description is of the plain model. With `vocabulary`, training gives labels to forward and reads no logits. Without `operators`,
    the loss in pieces alone; without `slices`, nothing is cut.
    """
    heads = _heads(model) if vocabulary else []
    if description.compute_dtype is DType.FLOAT16:  # gradients that are taken in forward know no loss scale
        heads = [head for head in heads if head.loss_pieces == 1]
    if not operators:
        heads = [head for head in heads if not head.sliced]
    kinds = [ModelSplit(), *(_operator_splits(model, description) if operators else ())]
    made = (
        ModelSplit(operators=kind.operators, sliced=(*kind.sliced, *head.sliced), loss_pieces=head.loss_pieces)
        for kind in kinds
        for head in (ModelSplit(), *heads)
    )
    return tuple(split for split in made if not split.is_none and (slices or not split.sliced))


def _operator_splits(model: nn.Module, description: ModelDescription) -> list[ModelSplit]:
    blocks = [u for u in description.units if u.span is GatherSpan.USE and u.class_name in description.block_classes]
    if not blocks or len(blocks) > SHALLOW:
        return []
    inside = tuple(f"{name}." for unit in blocks for name in unit.module_names)
    sizes = {
        name: cast(nn.Parameter, module.weight).numel()
        for name, module in modules_by_name(model).items()
        if (type(module) is nn.Linear or is_conv1d(module)) and name.startswith(inside)
    }
    largest = max(sizes.values(), default=0)
    found = [ModelSplit(operators=True)]
    for fraction in _FRACTIONS:
        slices = {name: 2 ** math.ceil(math.log2(size * fraction / largest)) for name, size in sizes.items() if size * fraction > largest}
        if slices and sum(slices.values()) <= MOST_SLICES:
            found.append(ModelSplit(operators=True, sliced=tuple(OperatorSplit(fqn=name, slices=n) for name, n in slices.items())))
    return found


def _heads(model: nn.Module) -> list[ModelSplit]:
    """Return what can be done to the vocabulary projection and its loss, the mildest first."""
    head = embedding_and_head(model)[1]
    name = next((name for name, module in modules_by_name(model).items() if module is head), None)
    if name is None:
        return []
    found = []
    for split in (ModelSplit(loss_pieces=_LOSS_PIECES), ModelSplit(sliced=(OperatorSplit(fqn=name, slices=_HEAD_SLICES),))):
        with suppress(OSDPError, ValueError):
            split_copy(model, split)
            found.append(split)
    return found
