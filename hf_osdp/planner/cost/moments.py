"""The moments of a step at which memory may peak: one walk for the estimate, by kind of bytes, and for the search.

docs/planner.md has the equations. What a call takes is in `call_moments`, what is beside it in `forward_moments` and
`backward_moments`, from which `step_moments` walks through the layouts of a plan and `search/program.py` through
unknown ones.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..decision import Batch
from ..description import GatherSpan, ModelDescription, Segment
from ..placement import Activations
from ..training_job import TrainingJob
from .placement import saved_bytes
from .units import UnitBytes, gradients_arriving, merged_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on one rank at one moment, by kind."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Saved activations, workspace of the running segment, logits, loss, unsharded gradients of the running
    segment.
    """
    gathered: int = 0
    """Unsharded parameters and gather buffers."""
    buffers: int = 0
    """Reduce buffers, casts and optimizer scratch."""
    model_buffers: int = 0
    """The module's own buffers, the batch, and other models."""
    held_outputs: int = 0
    """Outputs of the model that the loop keeps through backward, such as logits."""

    @property
    def total(self) -> int:
        return sum(_kinds(self))

    def __add__(self, other: MemoryBreakdown) -> MemoryBreakdown:
        return MemoryBreakdown(**dict(zip(_KINDS, map(operator.add, _kinds(self), _kinds(other)), strict=True)))

    def __sub__(self, other: MemoryBreakdown) -> MemoryBreakdown:
        return MemoryBreakdown(**dict(zip(_KINDS, map(operator.sub, _kinds(self), _kinds(other)), strict=True)))


_KINDS = tuple(field.name for field in fields(MemoryBreakdown))
_kinds = operator.attrgetter(*_KINDS)
Bytes = TypeVar("Bytes", int, MemoryBreakdown)
"""Bytes in all, for the search, or by kind."""


class _Summand(Protocol):
    def __add__(self, other: Any, /) -> Any: ...  # noqa: ANN401 - each kind of bytes with itself


Summand = TypeVar("Summand", bound=_Summand)
"""Bytes in all, by kind, or of an unknown layout."""


def all_kinds(**kinds: int) -> int:
    """Return the sum of bytes of several kinds, as `MemoryBreakdown` keeps them apart."""
    return sum(kinds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBytes:
    """Memory terms of one segment of one micro-batch, in bytes; `Segment` and `PhaseCost` define them."""

    saved: int
    """Negative for a segment of the root that frees more than it saves, such as the output of the preceding unit."""
    gradient: int
    arrived: int
    """Without gradients of parameters, when the last of these has come; at least what backward leaves."""
    kept: int
    forward_peak: int
    backward_peak: int
    adding_peak: int
    """That of backward where autograd adds gradients to held ones as they come (`UnitBytes.adds`)."""
    host: int

    @classmethod
    def of(
        cls,
        segment: Segment,
        span: GatherSpan,
        samples: int,
        activations: Activations = Activations.SAVE,
        *,
        recomputes: bool = False,
    ) -> SegmentBytes:
        """Return the terms at a micro-batch size under a choice of activations; `recomputes`: some block is
        recomputed.
        """
        form = segment.under(activations.recomputation)
        saved = form.saved_bytes.change(samples) if span is GatherSpan.STEP else form.saved_bytes.bytes(samples)
        saved += form.held_bytes.bytes(samples) if recomputes else 0
        left, host = saved_bytes(form, saved, samples, activations)
        gradient, kept = form.gradient_bytes.bytes(samples), form.kept_bytes.bytes(samples)
        return cls(
            saved=left,
            gradient=gradient,
            arrived=max(gradient + kept, form.arrival_bytes.bytes(samples)),
            kept=kept,
            forward_peak=form.forward.peak_bytes.bytes(samples),
            backward_peak=form.backward.peak_bytes.bytes(samples) + saved - left,
            adding_peak=(form.backward.adding_bytes or form.backward.peak_bytes).bytes(samples) + saved - left,
            host=host,
        )

    def peak(self, unit: UnitBytes) -> int:
        """Return the peak of backward under a layout of its unit."""
        return self.adding_peak if unit.adds else self.backward_peak

    def merging(self, nbytes: int) -> SegmentBytes:
        """Return the terms with so many bytes more in backward."""
        return replace(self, backward_peak=self.backward_peak + nbytes, adding_peak=self.adding_peak + nbytes)

    def in_units(self, size: int) -> SegmentBytes:
        """Return the terms in units of `size` bytes, rounded down."""
        return SegmentBytes(**{name: getattr(self, name) // size for name in self.__slots__})

    @classmethod
    def least(cls, choices: Collection[SegmentBytes]) -> SegmentBytes:
        """Return the least of each term, with which no moment is higher than with any of these."""
        return cls(**{name: min(getattr(one, name) for one in choices) for name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMoments(Generic[Summand]):
    """Moments of one call of a unit that is freed after use, relative to the level before its forward or its backward.

    Buffers of its neighbours are not in them: what the unit before gathers or reduces, and the prefetched gather.
    A unit that FSDP2 manages frees the former when it is gathered and reduced; replicas leave them.
    """

    copy_out: Summand
    """While parameters are gathered and copied out of the gather's buffer in forward."""
    forward: Summand
    """In forward, without the gather's buffer."""
    left_by_forward: Summand
    """f: saved activations and kept parameters."""
    gather: Summand
    """While parameters are copied out in backward, or gathered if nothing has prefetched them."""
    gathered: Summand
    """With these parameters, when a gather ahead is issued."""
    computing: tuple[Summand, ...]
    """In backward beside the reduce buffer of another unit: until gradients are reduced; of a replica also then,
    before they are freed and with the result."""
    reducing: tuple[Summand, ...]
    """While FSDP2 reduces gradients: before they are freed, and with the result; none if that is at the end."""
    left_by_backward: Summand
    """r: gradients, and what modules keep."""


EARLIER = "earlier"
"""Begins the phases of backward in an earlier micro-step."""
NO_CALL: CallMoments[int] = CallMoments(
    copy_out=0, forward=0, left_by_forward=0, gather=0, gathered=0, computing=(0,), reducing=(0,), left_by_backward=0
)
"""Of a unit that is gathered for the whole step, or never runs."""


def call_moments(unit: UnitBytes, segment: SegmentBytes, of: Callable[..., Bytes]) -> CallMoments[Bytes]:
    """Return the moments of a call; `of` makes bytes of kinds."""
    own, cast = (0, 0) if unit.kept else (unit.gathered, unit.cast_buffer + unit.gathering)
    forward = of(activations=segment.saved, gathered=unit.kept)
    reductions: tuple[Bytes, ...] = ()
    if unit.at_end:
        backward = of(gathered=unit.gathered, gradients=unit.unsharded_gradients, activations=segment.kept)
    else:
        # FSDP2 reduces when backward has ended, a replica when the last gradient has come
        there = segment.gradient + segment.kept if unit.managed else segment.arrived
        freed = of(activations=there - segment.saved, gathered=-unit.kept)
        backward = of(gradients=unit.gradients_after, buffers=unit.reduced_after, activations=segment.kept)
        reductions = _reduction(
            unit, freed + of(activations=unit.unsharded_gradients), freed + of(gradients=unit.gradients_after), of
        )
    compute = of(activations=segment.peak(unit), gathered=own)
    return CallMoments(
        copy_out=of(gathered=unit.gather_buffer + unit.gathered + unit.gathering),
        forward=of(activations=segment.forward_peak, gathered=unit.gathered),
        left_by_forward=forward,
        gather=of(gathered=own + unit.prefetched, buffers=cast),
        gathered=of(gathered=own),
        computing=tuple(itertools.chain([compute], () if unit.managed else reductions)),
        reducing=reductions if unit.managed else (),
        left_by_backward=backward,
    )


def highest_moments(unit: UnitBytes, segment: SegmentBytes) -> CallMoments[int]:
    """Return the moments of a call with only the highest of each kind."""
    call = call_moments(unit, segment, all_kinds)
    return replace(call, computing=(max(call.computing),), reducing=(max(call.reducing, default=0),))


def forward_moments(call: CallMoments[Summand], before: Summand, buffer: Summand) -> Iterator[tuple[str, Summand]]:
    """Yield phase and bytes of a call's forward above the level before it, beside the gather buffer of the unit before
    and, in the end, the one that is left (`buffer`).
    """
    yield "forward: gather", before + call.copy_out
    yield "forward", buffer + call.forward


def backward_moments(
    call: CallMoments[Summand], tail: Summand, ahead: Summand, issued: Summand | None
) -> Iterator[tuple[str, Summand]]:
    """Yield phase and bytes of a call's backward above the level before it, beside a reduce buffer in flight (`tail`)
    and a prefetched gather (`ahead`); `issued` are this gather's bytes while it is issued, None for no such moment.
    """
    yield "backward: gather", tail + call.gather
    if issued is not None:
        yield "backward: gather", tail + call.gathered + issued
    for number, moment in enumerate(call.computing):
        yield "backward: reduce" if number else "backward", tail + ahead + moment
    for moment in call.reducing:
        yield "backward: reduce", ahead + moment


@dataclass(frozen=True, slots=True, kw_only=True)
class EndMoments(Generic[Bytes]):
    """Moments of a unit's reduction at the end of backward, relative to the level before it."""

    filled: Bytes
    """With the filled buffer of the reduction."""
    reduced: Bytes
    """With its result."""
    left: Bytes


def end_moments(unit: UnitBytes, of: Callable[..., Bytes]) -> EndMoments[Bytes]:
    """Return the moments of a reduction at the end of backward, 0 of a unit that was reduced before; `of` makes bytes
    of kinds.
    """
    if not unit.at_end:
        return EndMoments(filled=of(), reduced=of(), left=of())
    freed = of(gathered=-unit.gathered, gradients=-unit.joined)
    left = freed + of(gradients=unit.left_at_end)
    filled, reduced = _reduction(unit, freed, left, of)
    return EndMoments(filled=filled, reduced=reduced, left=left + of(buffers=unit.reduced_after))


def _reduction(unit: UnitBytes, before: Bytes, after: Bytes, of: Callable[..., Bytes]) -> tuple[Bytes, Bytes]:
    """Return the moments of a reduction: with its filled buffer, and with its result, beside what is there then."""
    return (
        before + of(buffers=unit.reduce_input + unit.reduce_copy),
        after + of(buffers=unit.reduced_after + unit.reduce_input + unit.reduce_work),
    )


def contributions(unit: UnitBytes, call: CallMoments[int] | None) -> tuple[int, ...]:
    """Return the bytes that a unit adds to each moment of a step, its own and those of other units; a unit that takes
    no more at each of them never makes a plan's peak higher, if FSDP2 manages both or none: a replica leaves other
    units' buffers in place, and a managed root has others gathered ahead. Nor may it leave a reduce buffer that the
    other frees. `call` are its highest moments, None for a unit that is gathered for the whole step or never runs.
    """
    held = unit.held
    if call is None:
        gathered = held + unit.gathered
        after = gathered + unit.unsharded_gradients
        found = [held, gathered + unit.gathering, gathered + unit.gather_buffer, after]
        found += [unit.unsharded_gradients > 0, not unit.adds]
        ended = [held, after]
    else:
        left, after = held + call.left_by_forward, held + call.left_by_backward
        forward = (held + nbytes for _, nbytes in forward_moments(call, 0, unit.gather_buffer))
        backward = (left + nbytes for _, nbytes in backward_moments(call, 0, 0, 0))
        buffers = (left + unit.gather_buffer, left + unit.prefetched, left + unit.issued)
        tail = after + (0 if unit.at_end else unit.reduce_tail)
        found = [held, *forward, left, *backward, after, *buffers, tail]
        ended = [after]
    end = end_moments(unit, all_kinds)
    for level in ended:
        stepping = level + end.left - unit.reduced_after - unit.copies
        found += [level, level + end.filled, level + end.reduced, level + end.left]
        found += [stepping, stepping + unit.step_scratch, stepping + unit.step_passing]
    return (not unit.managed, unit.managed, unit.leaves_tail, *found)


def step_moments(
    description: ModelDescription,
    units: Sequence[UnitBytes],
    segments: Sequence[SegmentBytes],
    job: TrainingJob,
    batch: Batch,
    of: Callable[..., Bytes],
) -> Iterator[tuple[str, int | None, Bytes]]:
    """Yield every moment of the last micro-step and of the optimizer's step in FSDP2's order: phase, unit, bytes; `of`
    makes bytes of kinds. With accumulation, the backward of an earlier micro-step is before that of the last; in its
    forward no more is there.
    """
    order, merging = description.segments, merging_segments(description, job)
    segments = [own.merging(merging.get(index, 0)) for index, own in enumerate(segments)]
    whole_step = [i for i, unit in enumerate(description.units) if unit.span is GatherSpan.STEP]
    level = of(
        parameters=sum(u.parameters for u in units),
        optimizer=sum(u.optimizer for u in units),
        gradients=sum(u.gradients_held for u in units),
        gathered=sum(units[i].gathered for i in whole_step) + (copies := sum(u.copies for u in units)),
    )
    level = level + resident_bytes(description, job, batch.micro_batch_size, of)
    before_forward = _gather_buffers(description, units)
    for i in whole_step:
        if (beside := units[i].gathering) > 0:
            yield "forward: gather", i, level + of(gathered=before_forward[0] + beside)
    calls = _calls(description, units, segments, of)
    buffers = itertools.pairwise(before_forward)
    for segment, terms, call, (before, buffer) in zip(order, segments, calls, buffers, strict=True):
        if call is None:
            yield "forward", segment.unit, level + of(activations=terms.forward_peak, gathered=buffer)
            level = level + of(activations=terms.saved)
            continue
        for phase, nbytes in forward_moments(call, of(gathered=before), of(gathered=buffer)):
            yield phase, segment.unit, level + nbytes
        level = level + call.left_by_forward

    if earlier := [unit.earlier for unit in units if unit.earlier is not None]:
        held = sum(one.gradients_held - u.gradients_held for one, u in zip(earlier, units, strict=True))
        own_calls, start = _calls(description, earlier, segments, of), level + of(gradients=held)
        for phase, number, nbytes in _whole_backward(description, earlier, segments, own_calls, job, of, start):
            yield f"{EARLIER} {phase}", number, nbytes
    level = yield from _whole_backward(description, units, segments, calls, job, of, level)
    yield "optimizer step", None, level + of(buffers=update_bytes(units), gathered=-copies)


def update_bytes(units: Sequence[UnitBytes]) -> int:
    """Return the most temporaries of an optimizer step: those of all units together, or of one."""
    return max(sum(unit.step_scratch for unit in units), *(unit.step_passing for unit in units), 0)


def _calls(
    description: ModelDescription,
    units: Sequence[UnitBytes],
    segments: Sequence[SegmentBytes],
    of: Callable[..., Bytes],
) -> list[CallMoments[Bytes] | None]:
    """Return the moments of each segment's call, once for equal ones; None if its unit is gathered for the whole
    step.
    """
    known: dict[tuple[int, SegmentBytes], CallMoments[Bytes]] = {}
    found: list[CallMoments[Bytes] | None] = []
    for one, terms in zip(description.segments, segments, strict=True):
        unit, whole_step = units[one.unit], description.units[one.unit].span is GatherSpan.STEP
        if not whole_step and (id(unit), terms) not in known:
            known[id(unit), terms] = call_moments(unit, terms, of)
        found.append(None if whole_step else known[id(unit), terms])
    return found


def _whole_backward(
    description: ModelDescription,
    units: Sequence[UnitBytes],
    segments: Sequence[SegmentBytes],
    calls: Sequence[CallMoments[Bytes] | None],
    job: TrainingJob,
    of: Callable[..., Bytes],
    level: Bytes,
) -> Generator[tuple[str, int, Bytes], None, Bytes]:
    """Yield every moment of a micro-step's backward, given the level before it; return that after it, without what
    FSDP2 keeps until its end.
    """
    arriving, reduced, uses = gradients_arriving(description, job), 0, calls_of(description)
    beside = _buffers_beside(description, units)
    rows = list(zip(description.segments, segments, calls, strict=True))
    for index, (segment, terms, call) in reversed(list(enumerate(rows))):
        number, ahead, tail = segment.unit, of(gathered=beside.ahead[index]), of(buffers=beside.in_flight[index])
        issued = ahead + of(buffers=stage) if (stage := beside.stages[index]) else None
        if call is None:
            if issued is not None:
                yield "backward: gather", number, level + tail + issued
            yield "backward", number, level + of(activations=terms.peak(units[number])) + ahead + tail
            come = sum(units[i].coming(nbytes) for i, nbytes in arriving[index].items())
            level = level + of(activations=terms.kept - terms.saved, gradients=come)
            continue
        for phase, nbytes in backward_moments(call, tail, ahead, issued):
            yield phase, number, level + nbytes
        reduced += 0 if units[number].at_end else units[number].reduced_after
        level = level - call.left_by_forward + call.left_by_backward

    idle = (i for i, unit in enumerate(description.units) if unit.span is GatherSpan.STEP and i not in uses)
    level = level + of(gradients=sum(units[i].unsharded_gradients for i in idle))
    for number in (i for i, unit in enumerate(units) if unit.at_end):
        end = end_moments(units[number], of)
        yield "reduce", number, level + end.filled
        yield "reduce", number, level + end.reduced
        level, reduced = level + end.left, reduced + units[number].reduced_after
    return level - of(buffers=reduced)


class _Beside(NamedTuple):
    """Bytes of other units beside each segment's backward."""

    in_flight: list[int]
    """The reduce input of the unit whose backward ended before, or of one before that which was left
    (`leaves_tail`)."""
    ahead: list[int]
    """The gather that is prefetched when the segment's backward begins, or began before and is not used yet."""
    stages: list[int]
    """What is beside this gather while it is issued."""


def _gather_buffers(description: ModelDescription, units: Sequence[UnitBytes]) -> list[int]:
    """Return for each segment the gather buffer of the unit before, which FSDP2 frees after it has copied the unit out
    of its own, and at last that at the end of forward. Units that FSDP2 does not manage leave them where they are.
    """
    whole_step = (unit for unit, own in zip(units, description.units, strict=True) if own.span is GatherSpan.STEP)
    gathered = [max((unit.gather_buffer for unit in whole_step), default=0)]
    for index in (segment.unit for segment in description.segments):
        passes = description.units[index].span is GatherSpan.USE and units[index].managed
        gathered.append(units[index].gather_buffer if passes else gathered[-1])
    return gathered


def _buffers_beside(description: ModelDescription, units: Sequence[UnitBytes]) -> _Beside:
    """Return FSDP2's buffers of other units beside each segment's backward."""
    in_flight, ahead = [0], [0]
    prefetches = gathered_ahead(description, [unit.managed for unit in units])
    for segment, before in zip(reversed(description.segments), reversed(prefetches), strict=True):
        unit = units[segment.unit]
        ahead.append(ahead[-1] if not unit.managed else 0 if before is None else units[before].prefetched)
        in_use = description.units[segment.unit].span is GatherSpan.USE
        leaves = not in_use or unit.at_end or unit.leaves_tail
        in_flight.append(in_flight[-1] if leaves else unit.reduce_tail)
    return _Beside(in_flight[-2::-1], ahead[:0:-1], _stages(description, units, prefetches))


def _stages(description: ModelDescription, units: Sequence[UnitBytes], prefetches: Sequence[int | None]) -> list[int]:
    """Return for each segment the bytes beside the prefetched gather while it is issued, which is done by each call of
    a unit that FSDP2 manages; the root's, which contains the others, begins with the last segment.
    """
    found = [0] * len(prefetches)
    if any(unit.gather_stage for unit in units):
        issues = hiding(description)
        issues[-1] = True
        for index, (segment, before) in enumerate(zip(description.segments, prefetches, strict=True)):
            in_use = description.units[segment.unit].span is GatherSpan.USE
            if before is not None and units[segment.unit].managed and (in_use or issues[index]):
                found[index] = units[before].issued - units[before].prefetched
    return found


def resident_bytes(description: ModelDescription, job: TrainingJob, samples: int, of: Callable[..., Bytes]) -> Bytes:
    """Return the bytes that do not depend on layouts: the module's buffers, the batch, and outputs that the loop
    holds; `of` makes bytes of kinds.
    """
    return of(
        model_buffers=description.buffer_bytes + description.other_bytes + description.input_bytes.bytes(samples),
        held_outputs=description.output_bytes.bytes(samples) if job.holds_outputs else 0,
    )


def calls_of(description: ModelDescription) -> dict[int, list[int]]:
    """Return the indices of each unit's segments, in forward order; a unit that never runs is left out."""
    calls: dict[int, list[int]] = {}
    for index, segment in enumerate(description.segments):
        calls.setdefault(segment.unit, []).append(index)
    return calls


def merging_segments(description: ModelDescription, job: TrainingJob) -> dict[int, int]:
    """Return the bytes of the sum of a shared parameter's gradients, by segment: each call of the unit adds its own,
    but for the last, whose backward comes first.
    """
    found: dict[int, int] = {}
    for number, calls in calls_of(description).items():
        if nbytes := merged_gradients(description.units[number], job):
            found |= dict.fromkeys(calls[:-1] or calls, nbytes)
    return found


def gathered_ahead(description: ModelDescription, managed: Sequence[bool]) -> tuple[int | None, ...]:
    """Return for each segment the unit whose gather is prefetched when the segment's backward begins, or None; FSDP2
    does this for units that it manages, and skips others.

    FSDP2 prefetches the group whose forward ended before (`FSDPParamGroup._backward_prefetch`). The root's forward
    ends last, so that its segments are not in this order. Segments of shared weights are not in it either if one of
    the modules never runs (T5's `shared`). If all run, nothing is prefetched where the shared weights are next,
    because they are still gathered.
    """
    ahead: list[int | None] = []
    before: int | None = None
    for segment, hides in zip(description.segments, hiding(description), strict=True):
        ahead.append(before)
        if managed[segment.unit] and description.units[segment.unit].span is not GatherSpan.STEP:
            before = segment.unit
        elif managed[segment.unit] and hides:
            before = None
    return tuple(ahead)


def hiding(description: ModelDescription) -> list[bool]:
    """Return for each segment whether it is one of shared weights that FSDP2 has in its order."""
    runs = Counter(segment.unit for segment in description.segments)
    units = (description.units[segment.unit] for segment in description.segments)
    return [
        unit.span is GatherSpan.STEP and bool(unit.fqn) and runs[segment.unit] >= len(unit.module_names)
        for unit, segment in zip(units, description.segments, strict=True)
    ]
