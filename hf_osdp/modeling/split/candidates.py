"""Ways to cut a model, and a copy of it that is cut."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from torch import nn

from ...errors import OSDPError
from ...planner.description import GatherSpan, ModelDescription, UnitDescription
from ...planner.split import Cut, OperatorSplit
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


def possible_cuts(model: nn.Module, description: ModelDescription, *, vocabulary: bool = True) -> tuple[Cut, ...]:
    """Cuts that may pay, the plain model left out, the mildest first.

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
    kinds = [Cut(), *_operator_cuts(model, description)]
    cuts = [Cut(operators=kind.operators, splits=(*kind.splits, *splits)) for kind in kinds for splits in heads]
    return tuple(cut for cut in cuts if not cut.is_none)


def cut_copy(model: nn.Module, cut: Cut) -> nn.Module:
    """A copy on the meta device, cut; the model stays as it is.

    Raises:
        OSDPError, ValueError: an operator cannot be split.
    """
    memo = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    memo |= {id(b): b.detach().to("meta") for b in model.buffers()}
    twin = copy.deepcopy(model, memo)
    split_operators(twin, cut.splits)
    return twin


def cut_units(
    model: nn.Module, cut: Cut, block_classes: Sequence[str] | None = None, *, low_precision: bool = False
) -> tuple[UnitDescription, ...]:
    """Units of a model that is cut so (see `find_units`); the model stays as it is."""
    twin = cut_copy(model, cut) if cut.splits else model
    return find_units(twin, block_classes, operators=cut.operators, low_precision=low_precision)


def _operator_cuts(model: nn.Module, description: ModelDescription) -> list[Cut]:
    blocks = [u for u in description.units if u.span is GatherSpan.USE and u.class_name in description.block_classes]
    if not blocks or len(blocks) > SHALLOW:
        return []
    sizes = large_operators(modules_by_name(model), [name for unit in blocks for name in unit.module_names])
    largest = max(sizes.values(), default=0)
    cuts = [Cut(operators=True)]
    for fraction in _FRACTIONS:
        slices = {name: 2 ** math.ceil(math.log2(size * fraction / largest)) for name, size in sizes.items() if size * fraction > largest}
        splits = tuple(OperatorSplit(fqn=name, slices=count) for name, count in slices.items())
        if splits and sum(slices.values()) <= MOST_SLICES:
            cuts.append(Cut(operators=True, splits=splits))
    return cuts


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
        cut_copy(model, Cut(splits=(OperatorSplit(fqn=name, slices=min(_HEAD_SLICES)),)))
    except (OSDPError, ValueError):
        return None
    return name
