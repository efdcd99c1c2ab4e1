"""A micro-step as a row of stations: groups of equal units, and the root's stretches between them.

A choice adds the same time to each of several equal units in a row; only the peak can tell them apart. A short row is
searched unit by unit. In a long one the units at both ends, where peaks fall, still are, and of those between only how
many take each choice is searched for. Which of them take it is settled by a rule: in backward, the order of
independent jobs, each with a local peak p and a change of level d, that minimises the highest level is first those that
lower it, by ascending p, then those that raise it, by descending p - d (Abdel-Wahab and Kameda 1978; Liu 1987). Units
are not quite independent, as each one's gather runs beside the unit before it; a plan is optimal among those laid out
by the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from .costs import Batch, Choice, UnitBytes, reduce_tail, unit_bytes
from .description import Activations, GatherSpan, ModelDescription, Segment, UnitDescription
from .hardware import Hardware
from .job import TrainingJob
from .memory import SegmentBytes, gathered_ahead, merging_stretch, resident_bytes
from .strategies import Space
from .timing import UnitTimer

SHORT_ROW = 8
"""Rows of up to so many equal units are searched unit by unit."""
ROW_END = 1
"""Units at each end of a longer row that are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A choice with the constants that it brings into the search, in bytes and seconds."""

    choice: Choice
    bytes: UnitBytes
    seconds: float
    """Time in one optimizer step."""
    left_by_forward: int = 0
    """f: saved activations and kept parameters."""
    left_by_backward: int = 0
    """r: gradients."""
    copy_out_peak: int = 0
    """Highest level while parameters are copied out in forward, above the level before it; the buffer of the unit before is left out."""
    forward_peak: int = 0
    """Highest level in the rest of forward, above the level before it."""
    gather_peak: int = 0
    """Highest level while parameters are copied out in backward, above the level before it."""
    compute_peak: int = 0
    """Highest level in the rest of backward, the gather that runs ahead left out."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the rule above, for backward."""
        peak = max(self.gather_peak, self.compute_peak + self.bytes.prefetched)
        change = self.left_by_backward - self.left_by_forward
        return (0, peak) if change < 0 else (1, change - peak)

    def dominates(self, other: Option) -> bool:
        """No worse in time and at every moment, so that `other` is never needed."""
        return self.seconds <= other.seconds and self.fits_where(other)

    def fits_where(self, other: Option) -> bool:
        """No worse at every moment."""
        return all(a <= b for a, b in zip(self.levels, other.levels, strict=True))

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Bytes at each moment that the choice bears on."""
        held = self.bytes.held
        return (
            held, held + self.left_by_forward, held + self.left_by_backward, held + self.forward_peak, held + self.copy_out_peak,
            held + self.gather_peak, held + self.compute_peak, held + self.compute_peak + self.bytes.prefetched,
            self.bytes.prefetched, self.bytes.gather_buffer, held + self.left_by_backward + self.bytes.step_scratch,
            held + self.bytes.gathered, self.bytes.reduce_input, self.bytes.reduced_after + self.bytes.reduce_output,
            self.bytes.reduce_stage, self.bytes.last_gradient, self.bytes.host, self.bytes.host_moment,
            held + self.left_by_backward + self.bytes.gradients_settled, held + self.bytes.gradients_after + self.bytes.gradients_settled,
            held + self.left_by_backward + self.bytes.gradients_settled + self.bytes.step_scratch,
        )  # fmt: skip


def undominated(options: Sequence[Option], dominates: Callable[[Option, Option], bool]) -> list[Option]:
    """Options that no other makes needless; of equal ones the first."""
    best: list[Option] = []
    for option in options:
        if not any(dominates(other, option) for other in best):
            best = [other for other in best if not dominates(option, other)] + [option]
    return best


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Equal units that run one after the other. Groups are told apart by identity: comparing all their options takes long."""

    units: tuple[int, ...]
    """Indices in forward order."""
    options: tuple[Option, ...]
    """Not dominated, in the order in which backward meets them."""
    prefetches: bool = False
    """The unit before the first is gathered while that one's backward computes."""

    def assign(self, counts: Sequence[int]) -> dict[int, Choice]:
        """Give `counts[k]` units the k-th option, by the rule."""
        chosen = [option.choice for option, count in zip(self.options, counts, strict=True) for _ in range(count)]
        return dict(zip(reversed(self.units), chosen, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A segment of the root or of shared weights, which are gathered for the whole step."""

    unit: int
    saved: int
    forward_peak: int
    backward_peak: int
    tail: int
    """Reduce buffer of the unit after it, still in flight in backward."""
    prefetches: bool
    """The unit before it is gathered while its backward computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """All stations of a micro-step, in forward order."""

    stations: tuple[Group | Stretch, ...]
    whole_step: tuple[Group, ...]
    """Units that are gathered for the whole step, one group each."""
    idle: tuple[Group, ...]
    """Units that never run: they hold parameters and nothing else."""
    model_bytes: int
    """Buffers of the module and the batch."""
    host_limit_bytes: int
    """What states on the host may take of its memory, for one rank; 0 where there is none."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group of which options are to be chosen."""
        return (*(s for s in self.stations if isinstance(s, Group)), *self.whole_step, *self.idle)

    @property
    def least_host_bytes(self) -> int:
        """States on the host that no choice avoids."""
        return sum(len(group.units) * min(option.bytes.host for option in group.options) for group in self.groups)

    def keeping(self, options: Set[Option]) -> Line:
        """The line with only these options, in their order."""

        def less(group: Group) -> Group:
            return replace(group, options=tuple(option for option in group.options if option in options))

        return replace(
            self,
            stations=tuple(less(s) if isinstance(s, Group) else s for s in self.stations),
            whole_step=tuple(map(less, self.whole_step)),
            idle=tuple(map(less, self.idle)),
        )

    def fits_host(self, choices: dict[int, Choice]) -> bool:
        """Whether the host has memory for the states that these choices move there."""
        chosen = [o.bytes for group in self.groups for unit in group.units for o in group.options if o.choice == choices[unit]]
        return sum(b.host for b in chosen) + max((b.host_moment for b in chosen), default=0) <= self.host_limit_bytes


def build_line(description: ModelDescription, hardware: Hardware, job: TrainingJob, batch: Batch, space: Space) -> Line:
    """Stations of one micro-step.

    Args:
        description: the model; a unit with span USE runs at most once a micro-step.
        hardware: devices and links.
        job: precision, optimizer.
        batch: micro-batch size and accumulation.
        space: choices of each unit.

    Returns:
        Groups of equal units with their options, and the stretches between them.
    """
    maker = _OptionMaker(description, hardware, job, batch, space)
    units, tails = description.units, _tails(description, hardware.world_size, job, space)
    stations: list[Group | Stretch] = []
    key_before = None
    merging, ahead = merging_stretch(description, job), gathered_ahead(description)
    for index, (segment, tail) in enumerate(zip(description.segments, tails, strict=True)):
        unit = units[segment.unit]
        if unit.span is GatherSpan.STEP:
            stations.append(_stretch(segment, tail, merging.get(index, 0), ahead[index] is not None, batch.micro_batch_size))
            key_before = None
            continue
        key = (
            _shape_key(unit), segment.each(lambda costs: replace(costs, unit=0)), tail, maker.windows(segment.unit), space[segment.unit],
        )  # fmt: skip
        if key == key_before:
            last = stations[-1]
            stations[-1] = replace(last, units=(*last.units, segment.unit))
        else:
            options = maker.options(segment.unit, segment, tail)
            stations.append(Group(units=(segment.unit,), options=options, prefetches=ahead[index] is not None))
        key_before = key
    stations = [part for station in stations for part in (_split(station) if isinstance(station, Group) else (station,))]
    running = {segment.unit for segment in description.segments}
    rest = {
        i: Group(units=(i,), options=maker.options(i, None, 0))
        for i, u in enumerate(units)
        if i not in running or u.span is GatherSpan.STEP
    }
    return Line(
        stations=tuple(stations),
        whole_step=tuple(g for i, g in rest.items() if units[i].span is GatherSpan.STEP),
        idle=tuple(g for i, g in rest.items() if units[i].span is GatherSpan.USE),
        model_bytes=resident_bytes(description, job, batch.micro_batch_size),
        host_limit_bytes=0 if hardware.host is None else hardware.host.memory_bytes,
    )


def _split(row: Group) -> list[Group]:
    """Take a row apart where position matters."""

    def part(*units: int) -> Group:
        return replace(row, units=units, prefetches=row.prefetches or units[0] != row.units[0])

    if len(row.units) <= SHORT_ROW:
        return [part(unit) for unit in row.units]
    first, middle, last = row.units[:ROW_END], row.units[ROW_END:-ROW_END], row.units[-ROW_END:]
    return [*map(part, first), part(*middle), *map(part, last)]


class _OptionMaker:
    """Options of units; equal units share them."""

    def __init__(self, description, hardware, job, batch, space):
        self.description, self.hardware, self.job, self.batch, self.space = description, hardware, job, batch, space
        self.timer = UnitTimer(description, hardware, job, batch)

    def windows(self, index: int) -> tuple:
        """What hides the unit's communication, under each choice about activations."""
        return tuple(self.timer.windows[activations][index] for activations in Activations)

    def options(self, index: int, segment: Segment | None, tail: int) -> tuple[Option, ...]:
        """The choices of a unit that are not dominated, in the order of the rule."""
        made = [self._option(index, choice, segment, tail) for choice in self.space[index]]
        return tuple(sorted(undominated(made, Option.dominates), key=lambda option: option.order))

    def _option(self, index: int, choice: Choice, segment: Segment | None, tail: int) -> Option:
        unit = self.description.units[index]
        terms = unit_bytes(unit, choice, self.hardware.world_size, self.job, self.batch)
        seconds = self.timer(index, choice).total_s
        if segment is None:
            return Option(choice=choice, bytes=terms, seconds=seconds)
        costs = SegmentBytes.of(segment.under(choice.activations), unit.span, self.batch.micro_batch_size)
        own = 0 if terms.kept else terms.gathered
        after = terms.gradients_after + terms.reduced_after
        reducing = costs.gradient - costs.saved - terms.kept + terms.reduce_input
        return Option(
            choice=choice,
            bytes=terms,
            seconds=seconds,
            left_by_forward=costs.saved + terms.kept,
            left_by_backward=after,
            copy_out_peak=terms.gather_buffer + terms.gathered,
            forward_peak=terms.gather_buffer + terms.gathered + costs.forward_peak,
            gather_peak=own + terms.prefetched + tail + (0 if terms.kept else terms.cast_buffer),
            compute_peak=max(
                own + tail + costs.backward_peak,
                reducing + terms.unsharded_gradients,
                reducing + after + terms.reduce_work,
            ),
        )


def _stretch(segment: Segment, tail: int, merging: int, prefetches: bool, samples: int) -> Stretch:
    costs = SegmentBytes.of(segment, GatherSpan.STEP, samples)
    return Stretch(
        unit=segment.unit,
        saved=costs.saved,
        forward_peak=costs.forward_peak,
        backward_peak=costs.backward_peak + merging,
        tail=tail,
        prefetches=prefetches,
    )


def _shape_key(unit: UnitDescription) -> tuple:
    return tuple((p.shape, p.dtype, p.requires_grad) for p in unit.parameters)


def _tails(description: ModelDescription, world_size: int, job: TrainingJob, space: Space) -> list[int]:
    """For each segment, the reduce buffer that the unit after it leaves in flight."""
    tails, tail = [], 0
    on_host = any(choice.on_host for choices in space for choice in choices)
    for segment in reversed(description.segments):
        tails.append(tail)
        unit = description.units[segment.unit]
        if unit.span is GatherSpan.USE:
            tail = reduce_tail(unit, world_size, job, on_host=on_host)
    return tails[::-1]
