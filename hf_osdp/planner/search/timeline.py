"""Build the timeline of a micro-step, with each unit's options, from a problem, a batch and a search space."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from ...errors import OSDPError
from ..cost.moments import (
    SegmentBytes,
    all_kinds,
    call_moments,
    calls_of,
    gathered_ahead,
    merging_segments,
    resident_bytes,
)
from ..cost.timing import UnitTimer
from ..cost.units import gradients_arriving, once_per_shape, shape_ids, unit_bytes
from ..decision import Batch, Space, UnitLayout, meshes_of
from ..description import GatherSpan, Recomputation
from ..placement import Activations, activation_choices
from ..problem import PlanningProblem
from .options import LaterCall, Option, Part, RootSegment, Timeline, UnitGroup, undominated

SHORT_ROW = 8
"""Longest row of equal units that is searched unit by unit; in a longer row only the first and the last unit are."""
_MOST_BYTES = 2**48
"""Largest option in bytes. No device holds more, and the sum over all units must not overflow in the solver."""


class _Others(NamedTuple):
    """Choices of other units in the space that change a unit's bytes."""

    away: bool
    """Some unit's parameters may be on the host."""
    recomputed: bool
    """Some block may be recomputed."""


class BatchCosts:
    """Costs of layouts at one batch of a problem, shared by its search spaces.

    With `alike`, a unit keeps each layout that is not dominated in all units of its structure, for plans in which they
    have the same one.
    """

    def __init__(self, problem: PlanningProblem, batch: Batch, *, alike: bool = False) -> None:
        description = problem.description
        self.problem, self.batch = problem, batch
        self.calls = calls_of(description)
        for unit, indices in self.calls.items():
            described = description.units[unit]
            if described.span is GatherSpan.USE and len(indices) > 1:  # each call would gather it
                raise OSDPError(
                    f"Unit {described.label!r} runs more than once in a forward pass; describe it with span STEP or"
                    " CALLS."
                )
        self.ahead = gathered_ahead(description)
        self._arriving, self._merging = (
            gradients_arriving(description, problem.job),
            merging_segments(description, problem.job),
        )
        self._timer = UnitTimer(description, problem.hardware, problem.job, batch)
        self._shapes = shape_ids(description.units)
        self._same = alike
        choices = list(zip(self._shapes, activation_choices(description), strict=True))
        self._alike = [choices.index(choice) for choice in choices]
        """The first unit of the same structure, for each unit; such units have the same choices."""
        self.kinds = self._segment_kinds()
        terms = partial(unit_bytes, world_size=problem.hardware.world_size, job=problem.job, batch=batch)
        self._memory = {
            flag: once_per_shape(description.units, partial(terms, beside_host=flag)) for flag in (False, True)
        }
        """Memory terms of a unit, by whether some unit may be on the host."""
        self._segment_bytes = cache(self._bytes_of)
        self._made: dict[tuple[int, UnitLayout, _Others], Option] = {}
        self._kept: dict[tuple[int, tuple[UnitLayout, ...], _Others], tuple[UnitLayout, ...]] = {}
        self._options: dict[tuple[int, tuple[UnitLayout, ...], _Others], tuple[Option, ...]] = {}

    def _segment_kinds(self) -> list[int]:
        """Return a number for each segment; segments have the same number if their units have equal options."""
        known: dict[tuple[object, ...], int] = {}
        kinds = []
        for index, segment in enumerate(self.problem.description.segments):
            unit = segment.unit
            several = unit if len(self.calls[unit]) > 1 else None  # a unit with several calls equals no other unit
            policies = (None, *(policy.recomputation for policy in segment.recomputed))
            windows = tuple(self._timer.work(_freed(policy))[1][unit] for policy in policies)
            alike = segment.each(lambda one: replace(one, unit=0))
            kinds.append(
                known.setdefault(
                    (several, self._shapes[unit], alike, self._merging.get(index, 0), windows), len(known)
                )
            )
        return kinds

    def options(self, unit: int, layouts: tuple[UnitLayout, ...], others: _Others) -> tuple[Option, ...]:
        """Return the options of a unit that are not dominated, in the order of the rule in `options.py`."""
        key = (self._kind(unit), layouts, others)
        if key not in self._options:
            alike = (self._alike[unit] if self._same else self._kind(unit), layouts, others)
            if alike not in self._kept:
                self._kept[alike] = self._undominated(unit, layouts, others)
            kept = (self._made_option(unit, layout, others) for layout in self._kept[alike])
            self._options[key] = tuple(sorted(kept, key=lambda option: option.order))
        return self._options[key]

    def _undominated(self, unit: int, layouts: tuple[UnitLayout, ...], others: _Others) -> tuple[UnitLayout, ...]:
        """Return the layouts that no other dominates; with `alike`, in all units of this structure."""
        same = [other for other, first in enumerate(self._alike) if first == self._alike[unit]]
        kinds = {self._kind(other): other for other in (same if self._same else [unit])}
        made = [tuple(self._made_option(one, layout, others) for one in kinds.values()) for layout in layouts]
        small = [options for options in made if all(max(map(abs, option.levels)) <= _MOST_BYTES for option in options)]
        meshes = self._same or self.problem.hardware.device.communicator_bytes > 0
        return tuple(options[0].layout for options in undominated(small or made[:1], meshes=meshes))

    def _indices(self, unit: int) -> list[int]:
        """Return the segments in which the unit is gathered."""
        whole_step = self.problem.description.units[unit].span is GatherSpan.STEP
        return [] if whole_step else self.calls.get(unit, [])

    def _kind(self, unit: int) -> int:
        indices = self._indices(unit)
        return self.kinds[indices[0]] if indices else ~unit

    def _made_option(self, unit: int, layout: UnitLayout, others: _Others) -> Option:
        key = (self._kind(unit), layout, others)
        if key not in self._made:
            self._made[key] = self._option(unit, self._indices(unit), layout, others)
        return self._made[key]

    def root_segment(self, index: int, others: _Others) -> RootSegment:
        """Return a segment of a unit that is gathered for the whole step."""
        unit, costs = (
            self.problem.description.segments[index].unit,
            self._segment_bytes(index, Activations.SAVE, others),
        )
        return RootSegment(
            unit=unit, bytes=costs, gradients=self._arriving[index], prefetches=self.ahead[index] is not None
        )

    def _bytes_of(self, index: int, activations: Activations, others: _Others) -> SegmentBytes:
        """Return a segment's memory terms, with gradients of shared weights that merge in its backward."""
        segment = self.problem.description.segments[index]
        span, samples = self.problem.description.units[segment.unit].span, self.batch.micro_batch_size
        costs = SegmentBytes.of(segment, span, samples, activations, recomputes=others.recomputed)
        return replace(costs, backward_peak=costs.backward_peak + self._merging.get(index, 0))

    def _option(self, unit: int, indices: list[int], layout: UnitLayout, others: _Others) -> Option:
        """Return a layout with its bytes and seconds; `indices` are the unit's segments in forward order."""
        hardware, terms = self.problem.hardware, self._memory[others.away](unit, layout)
        whole = Option(
            layout=layout, bytes=terms, seconds=self._timer(unit, layout).total_s, structure=self._alike[unit],
            host=terms.host, meshes=meshes_of(layout.shard_size, layout.stage_size, hardware.world_size),
        )  # fmt: skip
        first, *later = [self._call(indices, number, whole, others) for number in range(len(indices))] or [whole]
        return replace(first, later=tuple(later))

    def _call(self, indices: list[int], number: int, whole: Option, others: _Others) -> Option:
        """Return the option of one call of a unit that is freed after use."""
        segment = self._segment_bytes(indices[number], whole.layout.activations, others)
        is_late = self.problem.description.units[self.problem.description.segments[indices[0]].unit].ends_late
        moments = call_moments(
            whole.bytes, segment, all_kinds, is_first=not number, is_last=number == len(indices) - 1, ends_late=is_late
        )
        return replace(whole, call=moments, host=whole.bytes.host + segment.host)


def build_timeline(costs: BatchCosts, space: Space) -> Timeline:
    """Return the timeline of one micro-step: groups of equal units, with options from the space, and the segments
    between them.

    Units with span USE run at most once in a micro-step, units with span CALLS possibly several times.
    """
    problem, hardware = costs.problem, costs.problem.hardware
    spans = [unit.span for unit in problem.description.units]
    others = _Others(
        away=any(layout.away for layouts in space for layout in layouts),
        recomputed=any(layout.activations.recomputes for layouts in space for layout in layouts),
    )
    alone = [i for i, span in enumerate(spans) if span is GatherSpan.STEP or i not in costs.calls]
    rest = {i: UnitGroup(units=(i,), options=costs.options(i, space[i], others)) for i in alone}
    return Timeline(
        parts=tuple(_parts(costs, space, others)),
        whole_step=tuple(group for i, group in rest.items() if spans[i] is GatherSpan.STEP),
        idle=tuple(group for i, group in rest.items() if spans[i] is not GatherSpan.STEP),
        model_bytes=resident_bytes(problem.description, problem.job, costs.batch.micro_batch_size, all_kinds),
        host_limit_bytes=0 if hardware.host is None else hardware.host.memory_bytes,
        communicator_bytes=hardware.device.communicator_bytes,
    )


def _parts(costs: BatchCosts, space: Space, others: _Others) -> Iterator[Part]:
    """Yield the parts of a micro-step in forward order; a row is split where the position of a unit matters."""
    units = [segment.unit for segment in costs.problem.description.segments]
    whole_step = {i for i, unit in enumerate(costs.problem.description.units) if unit.span is GatherSpan.STEP}

    def row_key(index: int) -> object:
        unit = units[index]
        in_row = unit not in whole_step and costs.calls[unit][0] == index
        alone = index if costs.problem.description.units[unit].ends_late else None
        return (costs.kinds[index], space[unit], alone) if in_row else index

    for key, grouped in itertools.groupby(range(len(units)), row_key):
        first, *rest = row = list(grouped)
        unit = units[first]
        if isinstance(key, tuple):
            options = costs.options(unit, space[unit], others)
            for part in [[index] for index in row] if len(row) <= SHORT_ROW else ([first], rest[:-1], rest[-1:]):
                members = tuple(units[index] for index in part)
                ends_late = costs.problem.description.units[unit].ends_late
                prefetches = costs.ahead[part[0]] is not None
                yield UnitGroup(units=members, options=options, ends_late=ends_late, prefetches=prefetches)
        elif unit in whole_step:
            yield costs.root_segment(first, others)
        else:
            yield LaterCall(
                unit=unit, number=costs.calls[unit].index(first) - 1, prefetches=costs.ahead[first] is not None
            )


def _freed(policy: Recomputation | None) -> UnitLayout:
    """Return the layout of a unit that is recomputed under this policy, and freed after its forward."""
    return UnitLayout(shard_size=1, reshard_after_forward=True, activations=Activations(recomputation=policy))
