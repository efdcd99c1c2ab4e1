"""Checks of the model: its units, what they hold, and what is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from ...modeling.batch import without_adapters
from ...planner.description import DType, UnitDescription
from ...planner.job import Precision
from ...quantities import format_count
from .findings import Check, Finding, error, note, refuse_errors, warning

_NUMBERED = re.compile(r"\.(\d+)(?=\.)")
_HALF = (DType.BFLOAT16, DType.FLOAT16)


def whole_in_one_unit(units: Sequence[UnitDescription]) -> Finding | None:
    """Find a unit that holds more than half of the model, with repeated blocks in it: sharding then saves little."""
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
    """Return the list with most elements in the unit, and their number, by the numbers in parameter names."""
    elements: dict[str, set[str]] = {}
    for parameter in unit.parameters:
        for match in _NUMBERED.finditer(parameter.name):
            elements.setdefault(parameter.name[: match.start()], set()).add(match.group(1))
    name = max(elements, key=lambda key: len(elements[key]), default="")
    return name, len(elements.get(name, ()))


def unused_block_classes(asked: Sequence[str] | None, found: Sequence[str]) -> Finding | None:
    """Find classes that were asked for and make no unit; where none does, the model cannot be described."""
    if not (unused := [name for name in asked or () if name not in found]):
        return None
    return note(
        Check.BLOCKS,
        f"block_classes has {', '.join(unused)}, of which the model has none, or none outside of other blocks; units are"
        f" {', '.join(found)}. Leave it out where it was meant for another model.",
    )


def check_model(model: nn.Module, *, trains: bool = True) -> None:
    """Refuse a model that cannot be trained as it was meant, before it is described.

    Args:
        model: not yet sharded.
        trains: whether it is to be trained.

    Raises:
        PreflightError: its tied weights are separate parameters, or all parameters are frozen.
    """
    found = (split_ties(model), nothing_to_train(model) if trains else None)
    refuse_errors(finding for finding in found if finding is not None)


def split_ties(model: nn.Module) -> Finding | None:
    """Find weights that the configuration ties and the model holds twice: they would be trained apart, and loading keeps one of them."""
    base = without_adapters(model)
    try:
        ties = base.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]
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
    """Find trainable parameters in half precision without float32 masters: an optimizer's small updates are rounded away."""
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


def nothing_to_train(model: nn.Module) -> Finding | None:
    """Find that all parameters are frozen."""
    parameters = list(model.parameters())
    if any(p.requires_grad for p in parameters):
        return None
    return error(
        Check.FROZEN, f"All {len(parameters)} parameters are frozen: there is nothing to train; set requires_grad=True on some of them."
    )


def frozen(units: Sequence[UnitDescription], *, in_optimizer: int = 0) -> Finding | None:
    """Find that some parameters are frozen, `in_optimizer` of which the optimizer was given."""
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
