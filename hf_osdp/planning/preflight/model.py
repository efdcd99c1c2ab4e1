"""Checks of the model: its units, what they hold, and what is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...planner.description import DType, UnitDescription
from ...planner.job import Precision
from ...quantities import format_count
from .findings import Check, Finding, error, note, refuse_errors, warning

_NUMBERED = re.compile(r"\.(\d+)(?=\.)")
_HALF = (DType.BFLOAT16, DType.FLOAT16)


def whole_in_one_unit(units: Sequence[UnitDescription]) -> Finding | None:
    """A unit that holds more than half of the model, with repeated blocks in it: nothing is won by freeing what comes at once.

    Args:
        units: of the model.
    """
    total, largest = sum(unit.numel for unit in units), max(units, key=lambda unit: unit.numel)
    name, count = _repeated(largest)
    if 2 * largest.numel <= total or count < 2:
        return None
    return warning(
        Check.BLOCKS,
        f"Unit {largest.label} ({largest.class_name}) holds {format_count(largest.numel)} of {format_count(total)} parameters, all {count}"
        f" of {name} among them, and gathers them at once; name the class of those with block_classes.",
    )


def _repeated(unit: UnitDescription) -> tuple[str, int]:
    """The list with most elements in the unit, by the numbers in the names of its parameters."""
    elements: dict[str, set[str]] = {}
    for parameter in unit.parameters:
        for match in _NUMBERED.finditer(parameter.name):
            elements.setdefault(parameter.name[: match.start()], set()).add(match.group(1))
    name = max(elements, key=lambda key: len(elements[key]), default="")
    return name, len(elements.get(name, ()))


def unused_block_classes(asked: Sequence[str] | None, found: Sequence[str]) -> Finding | None:
    """Classes that were asked for and make no unit. (Where none does, the model cannot be described.)

    Args:
        asked: class names; None asks for none.
        found: those of the model's units.
    """
    if not (unused := [name for name in asked or () if name not in found]):
        return None
    return note(
        Check.BLOCKS,
        f"block_classes has {', '.join(unused)}, of which the model has none, or none outside of other blocks; units are"
        f" {', '.join(found)}. Leave it out where it was meant for another model.",
    )


def check_model(model: Any, *, trains: bool = True) -> None:
    """Refuse a model that cannot be trained as it was meant, before it is described.

    Args:
        model: not yet sharded.
        trains: whether it is there to be trained.

    Raises:
        PreflightError: its ties are apart, or nothing in it is to be trained.
    """
    found = (split_ties(model), nothing_to_train(model) if trains else None)
    refuse_errors(finding for finding in found if finding is not None)


def split_ties(model: Any) -> Finding | None:
    """Weights that the configuration ties and the model holds twice: they would be trained apart, and one is lost when it is loaded.

    Args:
        model: a transformers model, perhaps inside peft's; others tie nothing by configuration.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        ties = base.get_expanded_tied_weights_keys(all_submodels=True)
    except (AttributeError, ValueError):  # another module, or names that adapters have changed
        return None
    parameters = dict(base.named_parameters(remove_duplicate=False))
    apart = [(a, b) for a, b in ties.items() if a in parameters and b in parameters and parameters[a] is not parameters[b]]
    if not apart:
        return None
    copy, source = apart[0]
    return error(
        Check.TIES,
        f"The configuration ties {copy} to {source}, but the model has two parameters: they would be trained apart, and a saved"
        " model is loaded with one of them. Call model.tie_weights(), or set config.tie_word_embeddings=False.",
    )


def no_masters(units: Sequence[UnitDescription], precision: Precision) -> Finding | None:
    """Trainable parameters in half precision that nobody holds in float32: an optimizer's small updates are rounded away.

    Args:
        units: of the model as it will be trained.
        precision: of the training; with mixed precision, masters are made.
    """
    half = [p for unit in units for p in unit.parameters if p.requires_grad and p.dtype in _HALF]
    if precision.compute is not None or not half:
        return None
    dtype, count = half[0].dtype, format_count(sum(p.numel for p in half))
    name = "bf16" if dtype is DType.BFLOAT16 else "fp16"
    return warning(
        Check.MASTERS,
        f"{count} trainable parameters are in {dtype.value}, and mixed_precision=no has the optimizer update them in it, where small"
        f" updates are rounded away; use mixed_precision={name}, or load the model in float32.",
    )


def nothing_to_train(model: Any) -> Finding | None:
    """All parameters are frozen.

    Args:
        model: any module.
    """
    parameters = list(model.parameters())
    if any(p.requires_grad for p in parameters):
        return None
    return error(
        Check.FROZEN, f"All {len(parameters)} parameters are frozen: there is nothing to train; set requires_grad=True on some of them."
    )


def frozen(units: Sequence[UnitDescription], *, in_optimizer: int = 0) -> Finding | None:
    """Some parameters are not trained.

    Args:
        units: of the model.
        in_optimizer: how many frozen parameters the optimizer was given.
    """
    parameters = [p for unit in units for p in unit.parameters]
    still = [p for p in parameters if not p.requires_grad]
    if not still or len(still) == len(parameters):
        return None
    count, total = (format_count(sum(p.numel for p in some)) for some in (still, parameters))
    given = f" The optimizer was given {in_optimizer} of them, which it leaves alone." if in_optimizer else ""
    return note(
        Check.FROZEN,
        f"{count} of {total} parameters are frozen, without gradients and optimizer states; to thaw any, plan again.{given}",
    )
