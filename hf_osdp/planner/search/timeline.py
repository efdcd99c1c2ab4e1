"""From a problem, a batch and a search space to the timeline of stages, with every unit's options."""

from __future__ import annotations

import functools
from dataclasses import replace

from ..cost.memory import SegmentBytes, gathered_ahead, merging_segments, resident_bytes
from ..cost.timing import UnitTimer
from ..cost.units import UnitBytes, gradients_arriving, once_per_shape, shape_ids, unit_bytes
from ..decision import Batch, UnitLayout, meshes_of
from ..description import Activations, GatherSpan
from ..problem import PlanningProblem
from .stages import LaterCall, Option, RootStage, Stage, Timeline, UnitGroup, undominated
from .strategies import Space

SHORT_ROW = 8
"""Rows of up to so many equal units are searched unit by unit."""
ROW_END = 1
"""Units at each end of a longer row that are."""
_MOST_BYTES = 2**48
"""An option that takes more fits nowhere; sums of these over all units stay within the solver's whole numbers."""


class BatchCosts:
    """What the timelines of all search spaces share, of one problem at one batch."""

    def __init__(self, problem: PlanningProblem, batch: Batch) -> None:
        description = problem.description
        self.problem, self.batch = problem, batch
        self.timer = UnitTimer(description, problem.hardware, problem.job, batch)
        terms = functools.partial(unit_bytes, world_size=problem.hardware.world_size, job=problem.job, batch=batch)
        self.memory = {flag: once_per_shape(description.units, functools.partial(terms, beside_host=flag)) for flag in (False, True)}
        """By whether some unit may be on the host."""
        self.calls: dict[int, list[int]] = {}
        """Indices of each unit's segments."""
        for index, segment in enumerate(description.segments):
            self.calls.setdefault(segment.unit, []).append(index)
        self.arriving, self.merging = gradients_arriving(description, problem.job), merging_segments(description, problem.job)
        self.ahead = gathered_ahead(description)
        self.shapes = shape_ids(description.units)
        self.kinds = _segment_kinds(self)


def _segment_kinds(costs: BatchCosts) -> list[int]:
    """Return a number for each segment: the same for those of units that are alike in every option."""
    known: dict[tuple[object, ...], int] = {}
    found = []
    for index, segment in enumerate(costs.problem.description.segments):
        unit = segment.unit
        several = unit if len(costs.calls[unit]) > 1 else None  # a unit with several calls is like no other
        ways = (None, *(way.recomputation for way in segment.recomputed))
        windows = tuple(costs.timer.work(way)[1][unit] for way in ways)
        alike = segment.each(lambda one: replace(one, unit=0))
        found.append(known.setdefault((several, costs.shapes[unit], alike, costs.merging.get(index, 0), windows), len(known)))
    return found


def build_timeline(costs: BatchCosts, space: Space) -> Timeline:
    """Return the timeline of one micro-step, with options out of the space: groups of equal units, and what comes between them.

    Units with span USE run at most once a micro-step, those with span CALLS perhaps several times.
    """
    return _Builder(costs, space).timeline()


class _Builder:
    """Options of units; equal units share them, and what layouts cost."""

    def __init__(self, costs: BatchCosts, space: Space) -> None:
        self._costs, self._problem, self._batch, self._space = costs, costs.problem, costs.batch, space
        self._units, self._segments = self._problem.description.units, self._problem.description.segments
        self._memory = costs.memory[any(layout.on_host for layouts in space for layout in layouts)]
        self._may_recompute = any(layout.activations.recomputes for layouts in space for layout in layouts)
        self._segment_bytes = functools.cache(self._bytes_of_segment)

    def timeline(self) -> Timeline:
        """Return the timeline."""
        hardware, spans = self._problem.hardware, [unit.span for unit in self._units]
        alone = {i for i, span in enumerate(spans) if span is GatherSpan.STEP} | (set(range(len(spans))) - set(self._costs.calls))
        rest = {i: UnitGroup(units=(i,), options=self._options(i)) for i in sorted(alone)}
        return Timeline(
            stages=tuple(self._stages()),
            whole_step=tuple(group for i, group in rest.items() if spans[i] is GatherSpan.STEP),
            idle=tuple(group for i, group in rest.items() if spans[i] is not GatherSpan.STEP),
            model_bytes=resident_bytes(self._problem.description, self._problem.job, self._batch.micro_batch_size),
            host_limit_bytes=0 if hardware.host is None else hardware.host.memory_bytes,
            communicator_bytes=hardware.device.communicator_bytes,
        )

    def _stages(self) -> list[Stage]:
        """Return what a micro-step passes through, in forward order."""
        stages: list[Stage] = []
        row: UnitGroup | None = None
        row_key: tuple[object, ...] = ()
        for index, segment in enumerate(self._segments):
            unit, prefetches = segment.unit, self._costs.ahead[index] is not None
            if self._units[unit].span is GatherSpan.STEP:
                stages += [*_parts(row), self._root_stage(index, prefetches)]
                row = None
            elif number := self._costs.calls[unit].index(index):
                stages += [*_parts(row), LaterCall(unit=unit, number=number - 1, prefetches=prefetches)]
                row = None
            elif (key := (self._costs.kinds[index], self._space[unit])) == row_key and row is not None:
                row = replace(row, units=(*row.units, unit))
            else:
                stages += _parts(row)
                row, row_key = UnitGroup(units=(unit,), options=self._options(unit), prefetches=prefetches), key
        return [*stages, *_parts(row)]

    def _root_stage(self, index: int, prefetches: bool) -> RootStage:
        costs = self._segment_bytes(index, Activations.SAVE)
        return RootStage(
            unit=self._segments[index].unit,
            saved=costs.saved,
            forward_peak=costs.forward_peak,
            backward_peak=costs.backward_peak,
            gradients=self._costs.arriving[index],
            prefetches=prefetches,
        )

    def _bytes_of_segment(self, index: int, activations: Activations) -> SegmentBytes:
        """Return what a segment takes, with gradients of shared weights that merge in its backward."""
        segment = self._segments[index]
        span, samples = self._units[segment.unit].span, self._batch.micro_batch_size
        costs = SegmentBytes.of(segment, span, samples, activations, recomputes=self._may_recompute)
        return replace(costs, backward_peak=costs.backward_peak + self._costs.merging.get(index, 0))

    def _options(self, unit: int) -> tuple[Option, ...]:
        """Return the options of a unit that are not dominated, in the order of the rule."""
        hardware = self._problem.hardware
        made = [self._option(unit, layout) for layout in self._space[unit]]
        if hardware.device.communicator_bytes:
            world_size = hardware.world_size
            made = [replace(o, meshes=meshes_of(o.layout.shard_size, o.layout.stage_size, world_size)) for o in made]
        made = [option for option in made if option.highest <= _MOST_BYTES] or made[:1]
        return tuple(sorted(undominated(made, Option.dominates), key=lambda option: option.order))

    def _option(self, unit: int, layout: UnitLayout) -> Option:
        """Return a layout with all that it brings, over the unit's calls in forward order."""
        terms, seconds = self._memory(unit, layout), self._costs.timer(unit, layout).total_s
        indices = [] if self._units[unit].span is GatherSpan.STEP else self._costs.calls.get(unit, [])
        if not indices:
            return Option(layout=layout, bytes=terms, seconds=seconds)
        first, *later = (self._call(index, layout, terms, seconds) for index in indices)
        waiting = terms.waiting_gradients if later else 0
        if later:  # gradients of the last call, whose backward comes first, wait for those of the first call
            later[-1] = replace(later[-1], left_by_backward=waiting)
        costs = self._segment_bytes(indices[0], layout.activations)
        after = terms.gradients_after + terms.reduced_after
        reduced = costs.gradient - costs.saved - terms.kept - waiting + terms.reduce_input
        highest = reduced + max(terms.unsharded_gradients, after + terms.reduce_work)
        return replace(first, left_by_backward=after - waiting, reduce_peak=highest, later=tuple(later))

    def _call(self, index: int, layout: UnitLayout, terms: UnitBytes, seconds: float) -> Option:
        """Return one call of a unit that is freed after use, its gradients left out."""
        costs, own = self._segment_bytes(index, layout.activations), 0 if terms.kept else terms.gathered
        return Option(
            layout=layout,
            bytes=terms,
            seconds=seconds,
            left_by_forward=costs.saved + terms.kept,
            copy_out_peak=terms.gather_buffer + terms.gathered,
            forward_peak=terms.gather_buffer + terms.gathered + costs.forward_peak,
            gather_peak=own + terms.prefetched + (0 if terms.kept else terms.cast_buffer),
            compute_peak=own + costs.backward_peak,
            activations_on_host=costs.host,
        )


def _parts(row: UnitGroup | None) -> list[UnitGroup]:
    """Split a row where position matters: into single units where it is short, else single units at both ends."""
    if row is None:
        return []
    group = row

    def part(*units: int) -> UnitGroup:
        return replace(group, units=units, prefetches=group.prefetches or units[0] != group.units[0])

    if len(row.units) <= SHORT_ROW:
        return [part(unit) for unit in row.units]
    first, middle, last = row.units[:ROW_END], row.units[ROW_END:-ROW_END], row.units[-ROW_END:]
    return [*map(part, first), part(*middle), *map(part, last)]
