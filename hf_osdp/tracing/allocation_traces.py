"""What stretches of a trace allocated at two batch sizes → allocation traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..planner.allocator.replay import Event
from ..planner.description import AllocationTrace, Handed, Segment
from .recorder import Stretch


class _Owner(NamedTuple):
    """Where an allocation that outlives its phase was made."""

    stretch: int
    backward: bool
    place: int


def with_allocations(
    segments: Sequence[Segment],
    kept: Sequence[int],
    runs: Mapping[tuple[bool, bool], Sequence[Sequence[Stretch]]],
    samples: int,
    *,
    is_block: Callable[[int], bool],
) -> tuple[tuple[Segment, ...], tuple[AllocationTrace, ...]]:
    """Segments with their allocation traces, and these, each once.

    Args:
        segments: of all stretches, with what they cost when they are recomputed.
        kept: indices of those that are given back.
        runs: stretches with `samples` samples and with one more, by whether blocks were recomputed and whether they were offloaded.
        samples: of the first.
        is_block: whether a unit is one of several that run one after the other.
    """
    places = {index: place for place, index in enumerate(kept)}
    table: dict[AllocationTrace, int] = {}
    found = {
        key: [None if trace is None else table.setdefault(trace, len(table)) for trace in traces]
        for key, (few, many) in runs.items()
        for traces in [_allocation_traces(few, many, samples, place=places.get, is_block=is_block)]
    }

    def of(index: int, *key: bool) -> int | None:
        return found[key][index] if key in found else None

    given = []
    for index in kept:
        segment = segments[index]
        again = segment.recomputed
        if again is not None:
            again = replace(again, allocations=of(index, True, False), offloaded_allocations=of(index, True, True))
        plain, away = of(index, False, False), of(index, False, True)
        given.append(replace(segment, allocations=plain, offloaded_allocations=away, recomputed=again))
    return tuple(given), tuple(table)


def _allocation_traces(
    few: Sequence[Stretch],
    many: Sequence[Stretch],
    samples: int,
    *,
    place: Callable[[int], int | None],
    is_block: Callable[[int], bool],
) -> list[AllocationTrace | None]:
    """The trace of each stretch; None where it allocated otherwise with one sample more. `place` gives a stretch's index among the
    segments, None where it is none."""
    owners = _owners(few)
    index = {id(stretch): number for number, stretch in enumerate(few)}
    found: list[AllocationTrace | None] = []
    for number, (one, other) in enumerate(zip(few, many, strict=True)):
        builder = _Builder(few, owners, number, place, is_block)
        if one.copy_of is None:
            found.append(builder.trace(one, other, samples))
        else:
            template = found[index[id(one.copy_of)]]
            found.append(None if template is None else builder.with_releases(template, one))
    return found


def _owners(stretches: Sequence[Stretch]) -> dict[int, _Owner]:
    owners: dict[int, _Owner] = {}
    for number, stretch in enumerate(stretches):
        phases = (stretch.forward.events, stretch.backward.events)
        freed = {event.key for events in phases for event in events if event.nbytes < 0} | set(stretch.gradient_allocations)
        for backward, events in enumerate(phases):
            kept = [event.key for event in events if event.nbytes >= 0 and event.key not in freed]
            owners |= {key: _Owner(number, bool(backward), len(kept) - i) for i, key in enumerate(kept)}
    return owners


class _Builder:
    """Makes the trace of one stretch."""

    def __init__(
        self,
        stretches: Sequence[Stretch],
        owners: dict[int, _Owner],
        number: int,
        place: Callable[[int], int | None],
        is_block: Callable[[int], bool],
    ) -> None:
        self._stretches, self._owners, self._number, self._place, self._is_block = stretches, owners, number, place, is_block
        self._others: list[Handed] = []

    def trace(self, few: Stretch, many: Stretch, samples: int) -> AllocationTrace | None:
        """The trace of a stretch that ran."""
        local = _numbers(few)
        if _shape(few, local) != _shape(many, _numbers(many)):
            return None
        sizes = [(a.nbytes, b.nbytes) for a, b in zip(_made(few), _made(many), strict=True)]
        return AllocationTrace(
            sizes=tuple((one - (two - one) * samples, two - one) for one, two in sizes),
            forward=self._steps(few.forward.events, local),
            backward=self._steps(few.backward.events, local),
            gradients=tuple(local[key] for key in few.gradient_allocations if key in local),
            others=tuple(self._others),
        )

    def with_releases(self, template: AllocationTrace, stretch: Stretch) -> AllocationTrace:
        """The trace of the stretch in whose place this one did not run, with what was let go of after it all the same: masks, after
        the last block."""
        self._others = list(template.others)
        found = []
        for events in (stretch.forward.events, stretch.backward.events):
            handed = [self._handed(event.key) for event in events if event.nbytes < 0]
            found.append(tuple(~(len(template.sizes) + self._number_of(h)) for h in handed if h is not None and h.absolute))
        if not any(found):
            return template
        return AllocationTrace(
            sizes=template.sizes, forward=template.forward + found[0], backward=template.backward + found[1],
            gradients=template.gradients, others=tuple(self._others),
        )  # fmt: skip

    def _steps(self, events: Sequence[Event], local: dict[int, int]) -> tuple[int, ...]:
        steps = []
        for event in events:
            if event.key in local:
                steps.append(local[event.key] if event.nbytes >= 0 else ~local[event.key])
            elif (handed := self._handed(event.key)) is not None:
                steps.append(~(len(local) + self._number_of(handed)))
        return tuple(steps)

    def _handed(self, key: int) -> Handed | None:
        """What another stretch made, as this one finds it."""
        owner, own = self._owners.get(key), self._place(self._number)
        there = None if owner is None else self._place(owner.stretch)
        if own is None or there is None or owner.stretch == self._number:
            return None
        near = abs(there - own) == 1 or self._is_block(self._stretches[owner.stretch].unit)
        return Handed(segment=there - own if near else there, absolute=not near, backward=owner.backward, place=owner.place)

    def _number_of(self, handed: Handed) -> int:
        if handed not in self._others:
            self._others.append(handed)
        return self._others.index(handed)


def _made(stretch: Stretch) -> list[Event]:
    return [event for event in (*stretch.forward.events, *stretch.backward.events) if event.nbytes >= 0]


def _numbers(stretch: Stretch) -> dict[int, int]:
    return {event.key: number for number, event in enumerate(_made(stretch))}


def _shape(stretch: Stretch, local: dict[int, int]) -> list[tuple[int, bool]]:
    """The order of allocations and frees, whatever their sizes; others' count as equal."""
    phases = (stretch.forward.events, stretch.backward.events)
    return [(local.get(event.key, -1), event.nbytes < 0) for events in phases for event in (*events, Event(-2, 0, 0))]
