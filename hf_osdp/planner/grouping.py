"""Several blocks in one unit: FSDP2 gathers and reduces them together, which takes the host less time and the device
more memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from .affine import Affine, Envelope
from .cost.units import shape_ids
from .description import DType, GatherSpan, ModelDescription, PhaseCost, RecomputedSegment, Segment, UnitDescription

SIZES = (2, 4, 8)
"""Numbers of blocks in a unit that the planner tries."""


def grouped(description: ModelDescription, blocks: int) -> ModelDescription:
    """Return the model with up to `blocks` neighbouring equal blocks in each unit; the same description if no two
    blocks are equal neighbours, or blocks are cut into smaller units.
    """
    is_cut = description.split.operators or description.split.cuts_parameters
    runs = [] if blocks < 2 or is_cut else [run for run in _runs(description) if len(run) > 1]
    parts = [run[start : start + blocks] for run in runs for start in range(0, len(run), blocks)]
    if not parts:
        return description
    split = replace(description.split, blocks_per_unit=blocks)
    return joined(replace(description, split=split), [part for part in parts if len(part) > 1])


def joined(description: ModelDescription, parts: Sequence[Sequence[int]]) -> ModelDescription:
    """Return the model with the units of each part as one.

    Such a unit has their costs one after the other, where each runs once and they follow each other. Its gradients
    come together: those of a block are live until the backward of the unit's first block has ended. Its activations
    are not offloaded.
    """
    units, segments = description.units, description.segments
    first_of = {index: part[0] for part in parts for index in part}
    kept = [index for index in range(len(units)) if first_of.get(index, index) == index]
    number = {index: place for place, index in enumerate(kept)}
    whole = {part[0]: as_one([units[index] for index in part]) for part in parts}
    of_part, chains = {tuple(part) for part in parts}, list[Segment]()
    position = 0
    while position < len(segments):
        own = next((part for part in of_part if part[0] == segments[position].unit), (segments[position].unit,))
        row = segments[position : position + len(own)]
        if tuple(segment.unit for segment in row) != own:
            own, row = (segments[position].unit,), segments[position : position + 1]
        gradients = [_gradient_bytes(description, units[index]) for index in own if len(own) > 1]
        one = _after_each_other(row, gradients) if gradients else row[0]
        chains.append(replace(one, unit=number[first_of.get(own[0], own[0])]))
        position += len(row)
    return replace(description, units=tuple(whole.get(index, units[index]) for index in kept), segments=tuple(chains))


def _runs(description: ModelDescription) -> Iterator[list[int]]:
    """Yield the indices of the units of equal blocks, each called once, that follow each other."""
    units, shapes = description.units, shape_ids(description.units)
    calls = [segment.unit for segment in description.segments]
    times = Counter(calls)

    def kind(index: int) -> tuple[object, ...]:
        unit = units[calls[index]]
        is_block = unit.span is GatherSpan.USE and unit.class_name in description.block_classes
        if not is_block or unit.ends_late or len(unit.module_names) > 1 or times[calls[index]] > 1:
            return (index,)
        policies = tuple(policy.recomputation for policy in description.segments[index].recomputed)
        return shapes[calls[index]], unit.class_name, unit.fqn.rpartition(".")[0], policies

    return ([calls[index] for index in run] for _, run in groupby(range(len(calls)), key=kind))


def as_one(units: Sequence[UnitDescription]) -> UnitDescription:
    """Return several units as one."""
    return replace(
        units[0],
        fqn="+".join(unit.fqn for unit in units),
        module_names=tuple(name for unit in units for name in unit.module_names),
        parameters=tuple(parameter for unit in units for parameter in unit.parameters),
        shared=tuple(names for unit in units for names in unit.shared),
    )


def _gradient_bytes(description: ModelDescription, unit: UnitDescription) -> Affine:
    """Return the bytes of a block's gradients, as backward makes them: in the compute dtype where it casts."""
    compute = description.compute_dtype
    elements = Counter[DType]()
    for p in unit.parameters:
        elements[p.dtype] += p.numel
    casts = max(elements, key=lambda dtype: elements[dtype]) is not compute
    dtypes = ((p, compute if casts and not p.keeps_dtype else p.dtype) for p in unit.trainable)
    return Affine(constant=sum(p.numel * dtype.itemsize for p, dtype in dtypes))


def _after_each_other(segments: Sequence[Segment], gradients: Sequence[Affine]) -> Segment:
    """Return segments as one, of which forward runs each in turn, and backward from the last to the first."""
    each = [{policy.recomputation: policy.costs for policy in segment.recomputed} for segment in segments]
    common = [policy for policy in each[0] if all(policy in costs for costs in each)]
    return replace(
        _chained(segments, gradients),
        recomputed=tuple(
            RecomputedSegment(recomputation=policy, costs=_chained([costs[policy] for costs in each], gradients))
            for policy in common
        ),
    )


def _chained(segments: Sequence[Segment], gradients: Sequence[Affine]) -> Segment:
    saved, forward, backward, adding = Affine(), list[Envelope](), list[Envelope](), list[Envelope]()
    for segment in segments:
        forward.append(segment.forward.peak_bytes.plus(saved))
        saved = saved.plus(segment.saved_bytes)
    level = come = Affine()
    for segment, own in reversed(list(zip(segments, gradients, strict=True))):
        backward.append(segment.backward.peak_bytes.plus(level).plus(come))
        adding.append((segment.backward.adding_bytes or segment.backward.peak_bytes).plus(level))
        level = level.plus(segment.kept_bytes).plus(segment.saved_bytes.scaled(-1, constants=True))
        come = come.plus(own)
    return replace(
        segments[0],
        saved_bytes=saved,
        held_bytes=_sum([segment.held_bytes for segment in segments]),
        own_saved_bytes=Affine(),
        sent_bytes=Affine(),
        arrival_bytes=_sum([segments[0].arrival_bytes, *(segment.kept_bytes for segment in segments[1:])]),
        kept_bytes=_sum([segment.kept_bytes for segment in segments]),
        gradients=tuple(dict.fromkeys(name for segment in segments for name in segment.gradients)),
        forward=_in_turn([segment.forward for segment in segments], forward),
        backward=replace(
            _in_turn([segment.backward for segment in segments], backward), adding_bytes=Envelope.highest(adding)
        ),
        recomputed=(),
    )


def _in_turn(phases: Sequence[PhaseCost], peaks: Sequence[Envelope]) -> PhaseCost:
    work = [one.name for one in fields(PhaseCost) if one.name not in ("peak_bytes", "adding_bytes", "seconds")]
    seconds = [phase.seconds for phase in phases if phase.seconds is not None]
    sums: dict[str, Any] = {name: _sum([getattr(phase, name) for phase in phases]) for name in work}
    return PhaseCost(
        peak_bytes=Envelope.highest(peaks),
        **sums,
        seconds=_sum(seconds) if len(seconds) == len(phases) else None,
    )


def _sum(values: Sequence[Affine]) -> Affine:
    total = Affine()
    for value in values:
        total = total.plus(value)
    return total
