"""What segments allocated at two batch sizes → allocation traces, for any batch size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..planner.allocator.replay import Event
from ..planner.description import AllocationTrace, Handed
from .recorder import SegmentRecord


def allocation_traces(
    few: Sequence[SegmentRecord], many: Sequence[SegmentRecord], samples: int, kept: Sequence[int], is_block: Callable[[int], bool]
) -> list[AllocationTrace | None]:
    """Make the trace of each segment, as seen with `samples`; None where it allocated otherwise with one sample more.

    A description will have the segments `kept`; `is_block` says whether a unit is one of several that run one after the other.
    """
    maker = _TraceMaker(few, kept, is_block)
    found: dict[int, AllocationTrace | None] = {}
    for number, (one, other) in enumerate(zip(few, many, strict=True)):
        template = None if one.copy_of is None else found[id(one.copy_of)]
        if one.copy_of is None:
            found[id(one)] = maker.trace(number, other, samples)
        else:
            found[id(one)] = None if template is None else maker.with_releases(number, template)
    return list(found.values())


class _Owner(NamedTuple):
    record: int
    backward: bool
    position: int
    """1 for the last that outlives the phase, 2 for the one before."""


class _TraceMaker:
    def __init__(self, records: Sequence[SegmentRecord], kept: Sequence[int], is_block: Callable[[int], bool]) -> None:
        self._records, self._is_block = records, is_block
        self._positions = {index: position for position, index in enumerate(kept)}
        self._owners: dict[Hashable, _Owner] = {}
        """Where allocations were made that outlive their phase."""
        for number, record in enumerate(records):
            freed = {event.key for events in _phases(record) for event in events if event.nbytes < 0} | set(record.gradient_allocations)
            for backward, events in enumerate(_phases(record)):
                outlives = [event.key for event in events if event.nbytes >= 0 and event.key not in freed]
                self._owners |= {key: _Owner(number, bool(backward), len(outlives) - i) for i, key in enumerate(outlives)}

    def trace(self, number: int, many: SegmentRecord, samples: int) -> AllocationTrace | None:
        few = self._records[number]
        made, made_by_many = _made(few), _made(many)
        own = {event.key: position for position, event in enumerate(made)}
        if _order(few, own) != _order(many, {event.key: position for position, event in enumerate(made_by_many)}):
            return None
        others: list[Handed] = []

        def steps(events: Sequence[Event]) -> tuple[int, ...]:
            found = []
            for event in events:
                if event.key in own:
                    found.append(own[event.key] if event.nbytes >= 0 else ~own[event.key])
                elif (handed := self._handed(number, event.key)) is not None:
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

    def with_releases(self, number: int, template: AllocationTrace) -> AllocationTrace:
        """Add what was let go of after a copy all the same, such as masks after the last block, to the trace that stands for it."""
        others = list(template.others)
        found = []
        for events in _phases(self._records[number]):
            handed = [self._handed(number, event.key) for event in events if event.nbytes < 0]
            found.append(tuple(~(len(template.sizes) + _position(h, others)) for h in handed if h is not None and h.absolute))
        return replace(template, forward=template.forward + found[0], backward=template.backward + found[1], others=tuple(others))

    def _handed(self, number: int, key: Hashable) -> Handed | None:
        """Return how a segment finds an allocation of another; None where it is no segment's."""
        owner, own = self._owners.get(key), self._positions.get(number)
        there = None if owner is None else self._positions.get(owner.record)
        if owner is None or own is None or there is None or owner.record == number:
            return None
        near = abs(there - own) == 1 or self._is_block(self._records[owner.record].unit)
        return Handed(segment=there - own if near else there, absolute=not near, backward=owner.backward, place=owner.position)


def _position(handed: Handed, others: list[Handed]) -> int:
    if handed not in others:
        others.append(handed)
    return others.index(handed)


def _phases(record: SegmentRecord) -> tuple[Sequence[Event], Sequence[Event]]:
    return record.forward.events, record.backward.events


def _made(record: SegmentRecord) -> list[Event]:
    return [event for events in _phases(record) for event in events if event.nbytes >= 0]


def _order(record: SegmentRecord, own: dict[Hashable, int]) -> list[tuple[int, bool]]:
    """Return the order of allocations and frees, whatever their sizes; others' count as equal."""
    return [(own.get(event.key, -1), event.nbytes < 0) for events in _phases(record) for event in (*events, Event(-2, 0, 0))]
