"""Ways to split a model that may pay, a copy of it that is split, and its units."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import cast

from torch import nn

from ..errors import OSDPError
from ..planner.description import GatherSpan, ModelDescription, UnitDescription
from ..planner.split import ModelSplit, OperatorSplit
from .split.apply_split import split_operators
from .split.modules import is_conv1d
from .units import embedding_and_head, find_units, modules_by_name

SHALLOW = 8
"""Models of up to so many blocks are split into operators: of many blocks, one is fine enough a unit."""
_HEAD_SLICES = 4
_FRACTIONS = (2, 4)
"""Operators are put in slices no larger than the largest one over so many."""
MOST_SLICES = 64
"""Of all blocks together: a search over more units than that takes minutes."""


def split_copy(model: nn.Module, split: ModelSplit) -> nn.Module:
    """Return a copy on the meta device with operators in slices; the model stays as it is. Refuse as `split_operators`."""
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    memo |= {id(b): b.detach().to("meta") for b in model.buffers()}
    copied = copy.deepcopy(model, memo)
    split_operators(copied, split.sliced)
    return copied


def split_units(
    model: nn.Module, split: ModelSplit, block_classes: Sequence[str] | None = None, *, low_precision: bool = False
) -> tuple[UnitDescription, ...]:
    """Return the units of a model that is split so (see `find_units`); the model stays as it is."""
    return find_units(
        split_copy(model, split) if split.sliced else model, block_classes, operators=split.operators, low_precision=low_precision
    )


def possible_splits(model: nn.Module, description: ModelDescription, *, vocabulary: bool = True) -> tuple[ModelSplit, ...]:
    """Return the splits that may pay, the plain model left out, the mildest first.

    These are the vocabulary projection with its loss in slices, where the model lets it; in shallow models operator units,
    operators in slices, and these with the projection in slices.

    The description is of the plain model. With `vocabulary`, training gives labels to forward and reads no logits.
    """
    head = _head(model) if vocabulary else None
    heads = [(), (head,)] if head is not None else [()]
    kinds = [ModelSplit(), *_operator_splits(model, description)]
    made = (ModelSplit(operators=kind.operators, sliced=(*kind.sliced, *head)) for kind in kinds for head in heads)
    return tuple(split for split in made if not split.is_none)


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


def _head(model: nn.Module) -> OperatorSplit | None:
    """Return the split of the vocabulary projection, where it can be split together with its loss."""
    head = embedding_and_head(model)[1]
    name = next((name for name, module in modules_by_name(model).items() if module is head), None)
    if name is None:
        return None
    split = OperatorSplit(fqn=name, slices=_HEAD_SLICES)
    try:
        split_copy(model, ModelSplit(sliced=(split,)))
    except (OSDPError, ValueError):
        return None
    return split
