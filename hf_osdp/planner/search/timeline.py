"""Description and space → the line of stations that the search lays options out on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cost.memory import SegmentBytes, activation_host_bytes, gathered_ahead, merging_segments, resident_bytes
from ..cost.timing import UnitTimer
from ..cost.units import UnitBytes, gradients_arriving, reduce_input, shape_ids, unit_bytes
from ..decision import Batch, UnitLayout, meshes_of
from ..description import Activations, GatherSpan, ModelDescription
from ..hardware import Hardware
from ..job import TrainingJob
from .stages import Call, Group, Line, Option, Stretch, undominated
from .strategies import Space

SHORT_ROW = 8
"""Rows of up to so many equal units are searched unit by unit."""
ROW_END = 1
"""Units at each end of a longer row that are."""
_MOST_BYTES = 2**48
"""An option that takes more fits nowhere; sums of these over all units stay within the solver's whole numbers."""


def build_line(description: ModelDescription, hardware: Hardware, job: TrainingJob, batch: Batch, space: Space) -> Line:
    """Stations of one micro-step.

    Args:
        description: the model; a unit with span USE runs at most once a micro-step, one with span CALLS perhaps several times.
        hardware: devices and links.
        job: precision, optimizer.
        batch: micro-batch size and accumulation.
        space: choices of each unit.

    Returns:
        Groups of equal units with their options, and what comes between them.
    """
    maker = _OptionMaker(description, hardware, job, batch, space)
    units = description.units
    spans = [unit.span for unit in units]
    alone = {i for i, span in enumerate(spans) if span is GatherSpan.STEP} | (set(range(len(units))) - set(maker.calls))
    rest = {i: Group(units=(i,), options=maker.options(i)) for i in sorted(alone)}
    return Line(
        stations=tuple(_stations(maker)),
        whole_step=tuple(g for i, g in rest.items() if spans[i] is GatherSpan.STEP),
        idle=tuple(g for i, g in rest.items() if spans[i] is not GatherSpan.STEP),
        model_bytes=resident_bytes(description, job, batch.micro_batch_size),
        host_limit_bytes=0 if hardware.host is None else hardware.host.memory_bytes,
        communicator_bytes=hardware.device.communicator_bytes,
    )


def _stations(maker: _OptionMaker) -> list[Group | Call | Stretch]:
    """What a micro-step passes through, in forward order."""
    description = maker.description
    stations: list[Group | Call | Stretch] = []
    ahead = gathered_ahead(description)
    key_before = None
    for index, segment in enumerate(description.segments):
        unit, prefetches = segment.unit, ahead[index] is not None
        key = None
        if description.units[unit].span is GatherSpan.STEP:
            stations.append(maker.stretch(index, prefetches))
        elif number := maker.calls[unit].index(index):
            stations.append(Call(unit=unit, number=number - 1, prefetches=prefetches))
        elif (key := maker.key(index)) == key_before:
            stations[-1] = replace(stations[-1], units=(*stations[-1].units, unit))
        else:
            stations.append(Group(units=(unit,), options=maker.options(unit), prefetches=prefetches))
        key_before = key
    return [part for station in stations for part in (_split(station) if isinstance(station, Group) else (station,))]


def _split(row: Group) -> list[Group]:
    """Take a row apart where position matters."""

    def part(*units: int) -> Group:
        return replace(row, units=units, prefetches=row.prefetches or units[0] != row.units[0])

    if len(row.units) <= SHORT_ROW:
        return [part(unit) for unit in row.units]
    first, middle, last = row.units[:ROW_END], row.units[ROW_END:-ROW_END], row.units[-ROW_END:]
    return [*map(part, first), part(*middle), *map(part, last)]


class _OptionMaker:
    """Options of units; equal units share them, and what layouts cost."""

    def __init__(self, description: ModelDescription, hardware: Hardware, job: TrainingJob, batch: Batch, space: Space):
        self.description, self.job = description, job
        self._world_size, self._batch, self._space = hardware.world_size, batch, space
        self.timer = UnitTimer(description, hardware, job, batch)
        self._counts_communicators = bool(hardware.device.communicator_bytes)
        self.calls: dict[int, list[int]] = {}
        """Indices of each unit's segments."""
        for index, segment in enumerate(description.segments):
            self.calls.setdefault(segment.unit, []).append(index)
        self._arriving, self._merging = gradients_arriving(description, job), merging_segments(description, job)
        # one process: plain units leave in flight what a unit on the host before them has left there
        self._always_in_flight = hardware.world_size == 1 and any(choice.on_host for choices in space for choice in choices)
        self._shapes = shape_ids(description.units)
        self._terms: dict[tuple, UnitBytes] = {}

    def key(self, index: int) -> tuple:
        """What makes the segments of two units alike in every option; a unit with several calls is like no other."""
        segment = self.description.segments[index]
        unit = segment.unit
        several = unit if len(self.calls[unit]) > 1 else None
        costs = segment.each(lambda costs: replace(costs, unit=0))
        windows = tuple(self.timer.windows[activations][unit] for activations in Activations)
        return several, self._shapes[unit], costs, self._merging.get(index, 0), windows, self._space[unit]

    def stretch(self, index: int, prefetches: bool) -> Stretch:
        """A segment of a unit that is gathered for the whole step."""
        segment = self.description.segments[index]
        costs = SegmentBytes.of(segment, GatherSpan.STEP, self._batch.micro_batch_size)
        return Stretch(
            unit=segment.unit,
            saved=costs.saved,
            forward_peak=costs.forward_peak,
            backward_peak=costs.backward_peak + self._merging.get(index, 0),
            gradients=self._arriving[index],
            prefetches=prefetches,
        )

    def options(self, unit: int) -> tuple[Option, ...]:
        """The choices of a unit that are not dominated, in the order of the rule."""
        span = self.description.units[unit].span
        running = [] if span is GatherSpan.STEP else [self._costs(index) for index in self.calls.get(unit, ())]
        made = [self._option(unit, choice, running) for choice in self._space[unit]]
        if self._counts_communicators:
            sizes = ((option, option.choice.shard_size, option.choice.stage_size) for option in made)
            made = [replace(option, meshes=meshes_of(shard, stage, self._world_size)) for option, shard, stage in sizes]
        made = [option for option in made if option.highest <= _MOST_BYTES] or made[:1]
        return tuple(sorted(undominated(made, Option.dominates), key=lambda option: option.order))

    def _costs(self, index: int) -> _Call:
        """What a segment costs."""
        segment = self.description.segments[index]
        span, samples = self.description.units[segment.unit].span, self._batch.micro_batch_size
        forms = {kept: SegmentBytes.of(segment, span, samples, kept) for kept in Activations}
        if merging := self._merging.get(index, 0):
            forms = {kept: replace(form, backward_peak=form.backward_peak + merging) for kept, form in forms.items()}
        on_host = {kept: activation_host_bytes(segment, samples, kept) for kept in Activations}
        return _Call(forms=forms, on_host=on_host)

    def _option(self, unit: int, choice: UnitLayout, calls: Sequence[_Call]) -> Option:
        """A choice with all that it brings, over the unit's calls in forward order."""
        terms, seconds = self._bytes(unit, choice), self.timer(unit, choice).total_s
        if not calls:
            return Option(choice=choice, bytes=terms, seconds=seconds)
        first, *later = (call.under(choice, terms, seconds) for call in calls)
        if not later:
            return calls[0].reducing(first)
        # gradients of the last call, whose backward comes first, wait for those of the first call
        waiting = terms.waiting_gradients
        later[-1] = replace(later[-1], left_by_backward=waiting)
        return replace(calls[0].reducing(first, waiting), later=tuple(later))

    def _bytes(self, unit: int, choice: UnitLayout) -> UnitBytes:
        layout = choice.shard_size, choice.reshard_after_forward, choice.stage_size, choice.reduce_every_micro_step
        key = (self._shapes[unit], *layout, choice.on_host)
        terms = self._terms.get(key)
        if terms is None:
            terms = unit_bytes(self.description.units[unit], choice, self._world_size, self.job, self._batch)
            if self._always_in_flight:
                terms = replace(terms, reduce_tail=reduce_input(self.description.units[unit], 1, self.job))
            self._terms[key] = terms
        return terms


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What a segment of a unit that is freed after use costs."""

    forms: dict[Activations, SegmentBytes]
    on_host: dict[Activations, int]

    def under(self, choice: UnitLayout, terms: UnitBytes, seconds: float) -> Option:
        """The call under a choice, its gradients left out."""
        costs, own = self.forms[choice.activations], 0 if terms.kept else terms.gathered
        return Option(
            choice=choice,
            bytes=terms,
            seconds=seconds,
            left_by_forward=costs.saved + terms.kept,
            copy_out_peak=terms.gather_buffer + terms.gathered,
            forward_peak=terms.gather_buffer + terms.gathered + costs.forward_peak,
            gather_peak=own + terms.prefetched + (0 if terms.kept else terms.cast_buffer),
            compute_peak=own + costs.backward_peak,
            activations_on_host=self.on_host[choice.activations],
        )

    def reducing(self, option: Option, waiting: int = 0) -> Option:
        """The same with its gradients, and so many bytes of them that wait, reduced when backward is done."""
        costs, terms = self.forms[option.choice.activations], option.bytes
        after = terms.gradients_after + terms.reduced_after
        level = costs.gradient - costs.saved - terms.kept - waiting + terms.reduce_input
        highest = level + max(terms.unsharded_gradients, after + terms.reduce_work)
        return replace(option, left_by_backward=after - waiting, reduce_peak=highest)
