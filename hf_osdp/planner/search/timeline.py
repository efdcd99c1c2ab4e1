"""Build the timeline of a micro-step, with each unit's options, from a problem, a batch and a search space."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

from ...errors import OSDPError
from ...quantities import MOST_BYTES
from ..cost.moments import (
    SegmentBytes,
    all_kinds,
    calls_of,
    hiding,
    merging_segments,
    resident_bytes,
)
from ..cost.timing import UnitTimer
from ..cost.units import gradients_arriving, once_per_shape, shape_ids, unit_bytes
from ..decision import Batch, Space, UnitLayout, groups_of
from ..description import GatherSpan
from ..placement import Activations, activation_choices
from ..problem import PlanningProblem
from .options import Option, Part, RootSegment, Timeline, UnitGroup, undominated

SHORT_ROW = 8
"""Longest row of equal units that is searched unit by unit; in a longer row only the first and the last unit are."""


class BatchCosts:
    """Costs of layouts at one batch of a problem, shared by its search spaces."""

    def __init__(self, problem: PlanningProblem, batch: Batch) -> None:
        description = problem.description
        self.problem, self.batch = problem, batch
        self.calls = calls_of(description)
        for unit, indices in self.calls.items():
            described = description.units[unit]
            if described.span is GatherSpan.USE and len(indices) > 1:  # each call would gather it
                raise OSDPError(
                    f"Unit {described.label!r} runs more than once in a forward pass; describe it with span STEP."
                )
        self.hides, self.arriving = hiding(description), gradients_arriving(description, problem.job)
        self._merging = merging_segments(description, problem.job)
        self._timer = UnitTimer(description, problem.hardware, problem.job, batch)
        self._shapes = shape_ids(description.units)
        choices = list(zip(self._shapes, activation_choices(description), strict=True))
        self.structures = [choices.index(choice) for choice in choices]
        """The first unit of the same structure, for each unit; such units have the same choices."""
        self.kinds = self._segment_kinds()
        terms = partial(unit_bytes, world_size=problem.hardware.world_size, job=problem.job, batch=batch)
        self._memory = once_per_shape(description.units, terms)
        self.segment_bytes = cache(self._segment_bytes)
        self._option = cache(self._make_option)
        self._options = cache(self._make_options)

    def _segment_kinds(self) -> list[int]:
        """Return a number for each segment; segments have the same number if their units have equal options: equal
        parameters, costs, and compute beside which they communicate.
        """
        known: dict[tuple[object, ...], int] = {}
        kinds = []
        for index, segment in enumerate(self.problem.description.segments):
            unit = segment.unit
            policies = (None, *(policy.recomputation for policy in segment.recomputed))
            windows = tuple(self._timer.work(Activations(recomputation=policy))[1][unit] for policy in policies)
            alike = segment.each(lambda one: replace(one, unit=0))
            key = (self._shapes[unit], alike, self._merging.get(index, 0), windows)
            kinds.append(known.setdefault(key, len(known)))
        return kinds

    def options(
        self, unit: int, layouts: tuple[UnitLayout, ...], recomputed: bool, *, every_layout: bool = False
    ) -> tuple[Option, ...]:
        """Return the options of a unit that are not dominated, or those of `every_layout`, in the order of the rule in
        `options.py`; `recomputed`: some block may be recomputed.
        """
        index = self._index(unit)
        if index is not None:  # the first unit with equal options has made them
            unit = self.problem.description.segments[self.kinds.index(self.kinds[index])].unit
        return self._options(unit, layouts, recomputed, every_layout)

    def _make_options(
        self, unit: int, layouts: tuple[UnitLayout, ...], recomputed: bool, every_layout: bool
    ) -> tuple[Option, ...]:
        made = [self._option(unit, layout, recomputed) for layout in layouts]
        if not every_layout:
            small = [option for option in made if max(map(abs, option.levels)) <= MOST_BYTES]
            meshes = self.problem.hardware.device.communicator_bytes > 0
            made = undominated(small or made[:1], meshes=meshes)
        return tuple(sorted(made, key=lambda option: option.order))

    def _index(self, unit: int) -> int | None:
        """Return the segment in which the unit is gathered; None if it never runs, or is gathered for the step."""
        whole_step = self.problem.description.units[unit].span is GatherSpan.STEP
        return None if whole_step or unit not in self.calls else self.calls[unit][0]

    def _segment_bytes(self, index: int, activations: Activations, recomputed: bool) -> SegmentBytes:
        """Return a segment's memory terms, with gradients of shared weights that merge in its backward."""
        segment = self.problem.description.segments[index]
        span, samples = self.problem.description.units[segment.unit].span, self.batch.micro_batch_size
        costs = SegmentBytes.of(segment, span, samples, activations, recomputes=recomputed)
        return costs.merging(self._merging.get(index, 0))

    def _make_option(self, unit: int, layout: UnitLayout, recomputed: bool) -> Option:
        """Return a layout with its bytes and seconds."""
        index, time = self._index(unit), self._timer(unit, layout)
        return Option(
            layout=layout, bytes=self._memory(unit, layout), seconds=time.total_s, issued=time.issued_s,
            structure=self.structures[unit], meshes=groups_of(layout, self.problem.hardware.world_size),
            segment=None if index is None else self.segment_bytes(index, layout.activations, recomputed),
        )  # fmt: skip


def build_timeline(costs: BatchCosts, space: Space, *, every_layout: bool = False) -> Timeline:
    """Return the timeline of one micro-step: groups of equal units, with options from the space, and the segments
    between them; with `every_layout` also options that others dominate.
    """
    problem, hardware = costs.problem, costs.problem.hardware
    spans = [unit.span for unit in problem.description.units]
    recomputed = any(layout.activations.recomputes for layouts in space for layout in layouts)
    options = partial(costs.options, recomputed=recomputed, every_layout=every_layout)
    alone = [i for i, span in enumerate(spans) if span is GatherSpan.STEP or i not in costs.calls]
    rest = {i: UnitGroup(units=(i,), options=options(i, space[i])) for i in alone}
    return Timeline(
        parts=tuple(_parts(costs, space, recomputed, options)),
        whole_step=tuple(group for i, group in rest.items() if spans[i] is GatherSpan.STEP),
        idle=tuple(group for i, group in rest.items() if spans[i] is not GatherSpan.STEP),
        model_bytes=resident_bytes(problem.description, problem.job, costs.batch.micro_batch_size, all_kinds),
        host_limit_bytes=0 if hardware.host is None else hardware.host.memory_bytes,
        communicator_bytes=hardware.device.communicator_bytes,
    )


def _parts(
    costs: BatchCosts,
    space: Space,
    recomputed: bool,
    options: Callable[[int, tuple[UnitLayout, ...]], tuple[Option, ...]],
) -> Iterator[Part]:
    """Yield the parts of a micro-step in forward order; a row is split where the position of a unit matters."""
    units = [segment.unit for segment in costs.problem.description.segments]
    whole_step = {i for i, unit in enumerate(costs.problem.description.units) if unit.span is GatherSpan.STEP}

    def row_key(index: int) -> object:
        unit = units[index]
        alone = index if costs.problem.description.units[unit].ends_late else None
        return index if unit in whole_step else (costs.kinds[index], space[unit], alone)

    for key, grouped in itertools.groupby(range(len(units)), row_key):
        first, *rest = row = list(grouped)
        unit = units[first]
        if isinstance(key, tuple):
            own = options(unit, space[unit])
            for part in [[index] for index in row] if len(row) <= SHORT_ROW else ([first], rest[:-1], rest[-1:]):
                members = tuple(units[index] for index in part)
                ends_late = costs.problem.description.units[unit].ends_late
                yield UnitGroup(units=members, options=own, ends_late=ends_late)
        else:
            own_bytes = costs.segment_bytes(first, Activations.SAVE, recomputed)
            yield RootSegment(
                unit=unit, bytes=own_bytes, gradients=costs.arriving[first], hides=costs.hides[first],
            )  # fmt: skip
