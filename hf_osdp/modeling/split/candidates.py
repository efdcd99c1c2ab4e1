"""Ways to split a model, and a copy of it that is split."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from torch import nn

from ...errors import OSDPError
from ...planner.description import GatherSpan, ModelDescription, UnitDescription
from ...planner.split import ModelSplit, OperatorSplit
from ..operator_units import large_operators
from ..units import find_units, modules_by_name
from .apply_split import split_operators

SHALLOW = 8
"""Models of up to so many blocks are cut into operators: of many blocks, one is fine enough a unit."""
_HEAD_SLICES = (4,)
_FRACTIONS = (2, 4)
"""Operators are put in slices no larger than the largest one over so many."""
MOST_SLICES = 64
"""Of all blocks together: a search over more units than that takes minutes."""


def possible_splits(model: nn.Module, description: ModelDescription, *, vocabulary: bool = True) -> tuple[ModelSplit, ...]:
    """Splits that may pay, the plain model left out, the mildest first.

    Args:
        model: real or on the meta device.
        description: of the plain model.
        vocabulary: training gives labels to forward and reads no logits, so that the projection may be split with its loss.

    Returns:
        The vocabulary projection with its loss in slices, where the model lets it; in shallow models operator units, operators in
        slices, and these with the projection in slices.
    """
    head = _head(model) if vocabulary else None
    heads = [(), *((OperatorSplit(fqn=head, slices=slices),) for slices in _HEAD_SLICES if head)]
    kinds = [ModelSplit(), *_operator_splits(model, description)]
    made = (ModelSplit(operators=kind.operators, sliced=(*kind.sliced, *head)) for kind in kinds for head in heads)
    return tuple(split for split in made if not split.is_none)


def split_copy(model: nn.Module, split: ModelSplit) -> nn.Module:
    """A copy on the meta device, cut; the model stays as it is.

    Raises:
        OSDPError, ValueError: an operator cannot be split.
    """
    memo = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    memo |= {id(b): b.detach().to("meta") for b in model.buffers()}
    twin = copy.deepcopy(model, memo)
    split_operators(twin, split.sliced)
    return twin


def split_units(
    model: nn.Module, split: ModelSplit, block_classes: Sequence[str] | None = None, *, low_precision: bool = False
) -> tuple[UnitDescription, ...]:
    """Units of a model that is split so (see `find_units`); the model stays as it is."""
    twin = split_copy(model, split) if split.sliced else model
    return find_units(twin, block_classes, operators=split.operators, low_precision=low_precision)


def _operator_splits(model: nn.Module, description: ModelDescription) -> list[ModelSplit]:
    blocks = [u for u in description.units if u.span is GatherSpan.USE and u.class_name in description.block_classes]
    if not blocks or len(blocks) > SHALLOW:
        return []
    sizes = large_operators(modules_by_name(model), [name for unit in blocks for name in unit.module_names])
    largest = max(sizes.values(), default=0)
    splits = [ModelSplit(operators=True)]
    for fraction in _FRACTIONS:
        slices = {name: 2 ** math.ceil(math.log2(size * fraction / largest)) for name, size in sizes.items() if size * fraction > largest}
        sliced = tuple(OperatorSplit(fqn=name, slices=count) for name, count in slices.items())
        if sliced and sum(slices.values()) <= MOST_SLICES:
            splits.append(ModelSplit(operators=True, sliced=sliced))
    return splits


def _head(model: nn.Module) -> str | None:
    """Name of the vocabulary projection, where it can be split together with its loss."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    name = next((name for name, module in modules_by_name(model).items() if module is head and head is not None), None)
    if name is None:
        return None
    try:
        split_copy(model, ModelSplit(sliced=(OperatorSplit(fqn=name, slices=min(_HEAD_SLICES)),)))
    except (OSDPError, ValueError):
        return None
    return name
