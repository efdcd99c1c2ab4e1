"""Find splits of a model that may be faster, and the units of a split model."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import cast

from torch import nn

from ...errors import OSDPError
from ...planner.description import DType, GatherSpan, ModelDescription
from ...planner.split import ModelSplit, OperatorSplit
from ..units import modules_by_name
from .apply import split_copy
from .modules import is_conv1d

SHALLOW = 8
"""Most blocks of a model that is split into operators; in deeper models, blocks are small enough as units."""
_LOSS_CHUNKS = 8
_FRACTIONS = (2, 4)
"""Operators are split into slices no larger than the largest operator divided by these numbers."""
MOST_SLICES = 64
"""Most slices of all blocks together; a search over more units takes minutes."""


def possible_splits(
    model: nn.Module,
    description: ModelDescription,
    *,
    vocabulary: bool = True,
    operators: bool = True,
    parts: bool = True,
) -> tuple[ModelSplit, ...]:
    """Return the splits that may be faster, with the smallest changes first; the unsplit model is left out.

    These are the loss in chunks, if the model allows it; in shallow models also operator units, alone or with the loss
    in chunks, and operators in slices.

    The description is of the unsplit model. `vocabulary` requires that training passes labels to forward and reads no
    logits. Without `operators`, only the loss in chunks is possible; without `parts`, no operator is sliced.
    """
    chunks = [1]
    # in float16, gradients that forward computes are without loss scale
    if vocabulary and description.compute_dtype is not DType.FLOAT16 and _takes_loss_in_chunks(model):
        chunks.append(_LOSS_CHUNKS)
    kinds = [ModelSplit(), *(_operator_splits(model, description) if operators else ())]
    made = (replace(kind, loss_chunks=n) for kind in kinds for n in (chunks[:1] if kind.sliced else chunks))
    return tuple(split for split in made if not split.is_none and (parts or not split.sliced))


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
        slices = {
            name: 2 ** math.ceil(math.log2(size * fraction / largest))
            for name, size in sizes.items()
            if size * fraction > largest
        }
        if slices and sum(slices.values()) <= MOST_SLICES:
            found.append(
                ModelSplit(
                    operators=True, sliced=tuple(OperatorSplit(fqn=name, slices=n) for name, n in slices.items())
                )
            )
    return found


def _takes_loss_in_chunks(model: nn.Module) -> bool:
    with suppress(OSDPError):
        split_copy(model, ModelSplit(loss_chunks=_LOSS_CHUNKS))
        return True
    return False
