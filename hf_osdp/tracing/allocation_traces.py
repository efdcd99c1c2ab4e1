"""What segments allocated at two batch sizes → allocation traces, for any batch size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..planner.allocator.replay import Event
from ..planner.description import AllocationTrace, Handed, Segment
from .recorder import SegmentRecord

Runs = Mapping[tuple[bool, bool], Sequence[Sequence[SegmentRecord]]]
"""Segment records with some samples and with one more, by whether blocks were recomputed and whether they were offloaded."""


def with_allocations(
    segments: Sequence[Segment], kept: Sequence[int], runs: Runs, samples: int, is_block: Callable[[int], bool]
) -> tuple[tuple[Segment, ...], tuple[AllocationTrace, ...]]:
    """Return the segments with indices `kept`, with their allocation traces, and these, each once.

    Args:
        segments: all of them, with what they cost when they are recomputed.
        kept: indices of those that are returned.
        runs: all segments' records.
        samples: of the first of each run.
        is_block: whether a unit is one of several that run one after the other.
    """
    positions = {index: position for position, index in enumerate(kept)}
    table: dict[AllocationTrace, int] = {}
    found: dict[tuple[bool, bool], list[int | None]] = {}
    for key, (few, many) in runs.items():
        traces = _allocation_traces(few, many, samples, positions, is_block)
        found[key] = [None if trace is None else table.setdefault(trace, len(table)) for trace in traces]

    def of(index: int, *key: bool) -> int | None:
        return found[key][index] if key in found else None

    result = []
    for index in kept:
        segment = segments[index]
        recomputed = segment.recomputed
        if recomputed is not None:
            recomputed = replace(recomputed, allocations=of(index, True, False), offloaded_allocations=of(index, True, True))
        plain, offloaded = of(index, False, False), of(index, False, True)
        result.append(replace(segment, allocations=plain, offloaded_allocations=offloaded, recomputed=recomputed))
    return tuple(result), tuple(table)


class _Owner(NamedTuple):
    """Where an allocation that outlives its phase was made."""

    record: int
    backward: bool
    position: int
    """1 for the last that outlives the phase, 2 for the one before."""


@dataclass(frozen=True, slots=True)
class _Context:
    """What the traces of one run share."""

    records: Sequence[SegmentRecord]
    owners: Mapping[Hashable, _Owner]
    """By allocation."""
    positions: Mapping[int, int]
    """A record's index among the segments that are kept."""
    is_block: Callable[[int], bool]

    def handed(self, number: int, key: Hashable) -> Handed | None:
        """Return how record `number` finds an allocation of another; None where it is no segment's."""
        owner, own = self.owners.get(key), self.positions.get(number)
        there = None if owner is None else self.positions.get(owner.record)
        if owner is None or own is None or there is None or owner.record == number:
            return None
        near = abs(there - own) == 1 or self.is_block(self.records[owner.record].unit)
        return Handed(segment=there - own if near else there, absolute=not near, backward=owner.backward, place=owner.position)


def _allocation_traces(
    few: Sequence[SegmentRecord],
    many: Sequence[SegmentRecord],
    samples: int,
    positions: Mapping[int, int],
    is_block: Callable[[int], bool],
) -> list[AllocationTrace | None]:
    """Make the trace of each record; None where it allocated otherwise with one sample more."""
    context = _Context(few, _owners(few), positions, is_block)
    index = {id(record): number for number, record in enumerate(few)}
    found: list[AllocationTrace | None] = []
    for number, (one, other) in enumerate(zip(few, many, strict=True)):
        if one.copy_of is None:
            found.append(_trace(context, number, other, samples))
        else:
            template = found[index[id(one.copy_of)]]
            found.append(None if template is None else _with_releases(context, number, template))
    return found


def _owners(records: Sequence[SegmentRecord]) -> dict[Hashable, _Owner]:
    owners: dict[Hashable, _Owner] = {}
    for number, record in enumerate(records):
        freed = {event.key for events in _phases(record) for event in events if event.nbytes < 0} | set(record.gradient_allocations)
        for backward, events in enumerate(_phases(record)):
            kept = [event.key for event in events if event.nbytes >= 0 and event.key not in freed]
            owners |= {key: _Owner(number, bool(backward), len(kept) - i) for i, key in enumerate(kept)}
    return owners


def _trace(context: _Context, number: int, many: SegmentRecord, samples: int) -> AllocationTrace | None:
    """Make the trace of a segment that ran."""
    few = context.records[number]
    own, made, made_by_many = _numbers(few), _made(few), _made(many)
    if _order(few, own) != _order(many, _numbers(many)):
        return None
    others: list[Handed] = []

    def steps(events: Sequence[Event]) -> tuple[int, ...]:
        found = []
        for event in events:
            if event.key in own:
                found.append(own[event.key] if event.nbytes >= 0 else ~own[event.key])
            elif (handed := context.handed(number, event.key)) is not None:
                found.append(~(len(own) + _position(handed, others)))
        return tuple(found)

    forward, backward = map(steps, _phases(few))
    sizes = [(a.nbytes, b.nbytes) for a, b in zip(made, made_by_many, strict=True)]
    return AllocationTrace(
        sizes=tuple((one - (two - one) * samples, two - one) for one, two in sizes),
        forward=forward,
        backward=backward,
        gradients=tuple(own[key] for key in few.gradient_allocations if key in own),
        others=tuple(others),
    )


def _with_releases(context: _Context, number: int, template: AllocationTrace) -> AllocationTrace:
    """Add what was let go of after a copy all the same, such as masks after the last block, to the trace that stands for it."""
    others = list(template.others)
    found = []
    for events in _phases(context.records[number]):
        handed = [context.handed(number, event.key) for event in events if event.nbytes < 0]
        found.append(tuple(~(len(template.sizes) + _position(h, others)) for h in handed if h is not None and h.absolute))
    if not any(found):
        return template
    return replace(template, forward=template.forward + found[0], backward=template.backward + found[1], others=tuple(others))


def _position(handed: Handed, others: list[Handed]) -> int:
    if handed not in others:
        others.append(handed)
    return others.index(handed)


def _phases(record: SegmentRecord) -> tuple[Sequence[Event], Sequence[Event]]:
    return record.forward.events, record.backward.events


def _made(record: SegmentRecord) -> list[Event]:
    return [event for events in _phases(record) for event in events if event.nbytes >= 0]


def _numbers(record: SegmentRecord) -> dict[Hashable, int]:
    return {event.key: number for number, event in enumerate(_made(record))}


def _order(record: SegmentRecord, own: dict[Hashable, int]) -> list[tuple[int, bool]]:
    """Return the order of allocations and frees, whatever their sizes; others' count as equal."""
    return [(own.get(event.key, -1), event.nbytes < 0) for events in _phases(record) for event in (*events, Event(-2, 0, 0))]
