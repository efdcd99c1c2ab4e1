"""From a problem, a batch and a search space to the timeline of stages, with every unit's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cost.memory import SegmentBytes, activation_host_bytes, gathered_ahead, merging_segments, resident_bytes
from ..cost.timing import UnitTimer
from ..cost.units import UnitBytes, gradients_arriving, reduce_input, shape_ids, unit_bytes
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


def build_timeline(problem: PlanningProblem, batch: Batch, space: Space) -> Timeline:
    """Return the timeline of one micro-step.

    Args:
        problem: its model's units with span USE run at most once a micro-step, those with span CALLS perhaps several times.
        batch: micro-batch size and accumulation.
        space: layouts of each unit.

    Returns:
        Groups of equal units with their options, and what comes between them.
    """
    return _Builder(problem, batch, space).timeline()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What a segment of a unit that is freed after use costs."""

    forms: dict[Activations, SegmentBytes]
    on_host: dict[Activations, int]

    def under(self, layout: UnitLayout, terms: UnitBytes, seconds: float) -> Option:
        """Return the call under a layout, its gradients left out."""
        costs, own = self.forms[layout.activations], 0 if terms.kept else terms.gathered
        return Option(
            layout=layout,
            bytes=terms,
            seconds=seconds,
            left_by_forward=costs.saved + terms.kept,
            copy_out_peak=terms.gather_buffer + terms.gathered,
            forward_peak=terms.gather_buffer + terms.gathered + costs.forward_peak,
            gather_peak=own + terms.prefetched + (0 if terms.kept else terms.cast_buffer),
            compute_peak=own + costs.backward_peak,
            activations_on_host=self.on_host[layout.activations],
        )

    def reducing(self, option: Option, waiting: int = 0) -> Option:
        """Return the option with its gradients, `waiting` bytes of them from later calls, reduced when backward is done."""
        costs, terms = self.forms[option.layout.activations], option.bytes
        after = terms.gradients_after + terms.reduced_after
        level = costs.gradient - costs.saved - terms.kept - waiting + terms.reduce_input
        highest = level + max(terms.unsharded_gradients, after + terms.reduce_work)
        return replace(option, left_by_backward=after - waiting, reduce_peak=highest)


class _Builder:
    """Options of units; equal units share them, and what layouts cost."""

    def __init__(self, problem: PlanningProblem, batch: Batch, space: Space) -> None:
        self._problem, self._batch, self._space = problem, batch, space
        description, hardware = problem.description, problem.hardware
        self._units, self._segments = description.units, description.segments
        self._timer = UnitTimer(description, hardware, problem.job, batch)
        self._calls: dict[int, list[int]] = {}
        """Indices of each unit's segments."""
        for index, segment in enumerate(description.segments):
            self._calls.setdefault(segment.unit, []).append(index)
        self._arriving, self._merging = gradients_arriving(description, problem.job), merging_segments(description, problem.job)
        # one process: plain units leave in flight what a unit on the host before them has left there
        self._always_in_flight = hardware.world_size == 1 and any(layout.on_host for layouts in space for layout in layouts)
        self._shapes = shape_ids(description.units)
        self._terms: dict[tuple[object, ...], UnitBytes] = {}

    def timeline(self) -> Timeline:
        """Return the timeline."""
        hardware, spans = self._problem.hardware, [unit.span for unit in self._units]
        alone = {i for i, span in enumerate(spans) if span is GatherSpan.STEP} | (set(range(len(spans))) - set(self._calls))
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
        ahead = gathered_ahead(self._problem.description)
        for index, segment in enumerate(self._segments):
            unit, prefetches = segment.unit, ahead[index] is not None
            if self._units[unit].span is GatherSpan.STEP:
                stages += [*_parts(row), self._root_stage(index, prefetches)]
                row = None
            elif number := self._calls[unit].index(index):
                stages += [*_parts(row), LaterCall(unit=unit, number=number - 1, prefetches=prefetches)]
                row = None
            elif (key := self._key(index)) == row_key and row is not None:
                row = replace(row, units=(*row.units, unit))
            else:
                stages += _parts(row)
                row, row_key = UnitGroup(units=(unit,), options=self._options(unit), prefetches=prefetches), key
        return [*stages, *_parts(row)]

    def _key(self, index: int) -> tuple[object, ...]:
        """Return what makes the segments of two units alike in every option; a unit with several calls is like no other."""
        segment = self._segments[index]
        unit = segment.unit
        several = unit if len(self._calls[unit]) > 1 else None
        costs = segment.each(lambda costs: replace(costs, unit=0))
        windows = tuple(self._timer.windows[activations][unit] for activations in Activations)
        return several, self._shapes[unit], costs, self._merging.get(index, 0), windows, self._space[unit]

    def _root_stage(self, index: int, prefetches: bool) -> RootStage:
        segment = self._segments[index]
        costs = SegmentBytes.of(segment, GatherSpan.STEP, self._batch.micro_batch_size)
        return RootStage(
            unit=segment.unit,
            saved=costs.saved,
            forward_peak=costs.forward_peak,
            backward_peak=costs.backward_peak + self._merging.get(index, 0),
            gradients=self._arriving[index],
            prefetches=prefetches,
        )

    def _options(self, unit: int) -> tuple[Option, ...]:
        """Return the options of a unit that are not dominated, in the order of the rule."""
        hardware, span = self._problem.hardware, self._units[unit].span
        calls = [] if span is GatherSpan.STEP else [self._call(index) for index in self._calls.get(unit, ())]
        made = [self._option(unit, layout, calls) for layout in self._space[unit]]
        if hardware.device.communicator_bytes:
            world_size = hardware.world_size
            made = [replace(o, meshes=meshes_of(o.layout.shard_size, o.layout.stage_size, world_size)) for o in made]
        made = [option for option in made if option.highest <= _MOST_BYTES] or made[:1]
        return tuple(sorted(undominated(made, Option.dominates), key=lambda option: option.order))

    def _call(self, index: int) -> _Call:
        """Return what a segment costs."""
        segment = self._segments[index]
        span, samples = self._units[segment.unit].span, self._batch.micro_batch_size
        forms = {kept: SegmentBytes.of(segment, span, samples, kept) for kept in Activations}
        if merging := self._merging.get(index, 0):
            forms = {kept: replace(form, backward_peak=form.backward_peak + merging) for kept, form in forms.items()}
        on_host = {kept: activation_host_bytes(segment, samples, kept) for kept in Activations}
        return _Call(forms=forms, on_host=on_host)

    def _option(self, unit: int, layout: UnitLayout, calls: Sequence[_Call]) -> Option:
        """Return a layout with all that it brings, over the unit's calls in forward order."""
        terms, seconds = self._bytes(unit, layout), self._timer(unit, layout).total_s
        if not calls:
            return Option(layout=layout, bytes=terms, seconds=seconds)
        first, *later = (call.under(layout, terms, seconds) for call in calls)
        if not later:
            return calls[0].reducing(first)
        # gradients of the last call, whose backward comes first, wait for those of the first call
        waiting = terms.waiting_gradients
        later[-1] = replace(later[-1], left_by_backward=waiting)
        return replace(calls[0].reducing(first, waiting), later=tuple(later))

    def _bytes(self, unit: int, layout: UnitLayout) -> UnitBytes:
        decided = layout.shard_size, layout.reshard_after_forward, layout.stage_size, layout.reduce_every_micro_step, layout.on_host
        key = (self._shapes[unit], *decided)
        if key not in self._terms:
            job = self._problem.job
            terms = unit_bytes(self._units[unit], layout, self._problem.hardware.world_size, job, self._batch)
            if self._always_in_flight:
                terms = replace(terms, reduce_tail=reduce_input(self._units[unit], 1, job))
            self._terms[key] = terms
        return self._terms[key]


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
