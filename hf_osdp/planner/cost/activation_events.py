"""Allocations and frees of segments, from their traces, one micro-step after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..allocator.replay import EventLog
from ..description import Activations, AllocationTrace, Handed, ModelDescription
from .memory import SegmentBytes


class SegmentEvents:
    """A segment's allocations at a micro-batch size, and which of them are there now; `traced`: its trace is no stand-in."""

    def __init__(self, trace: AllocationTrace, samples: int, log: EventLog, *, traced: bool) -> None:
        self.trace, self.traced, self._sizes, self._log = trace, traced, trace.bytes(samples), log
        self.after: SegmentEvents | None = None
        self.found: list[tuple[SegmentEvents, int] | None] = []
        """For each of the trace's `others`, its maker and number; None where it is not known."""
        self.claims: dict[int, int] = {}
        """How many other segments let go of an own allocation; the last one frees it."""
        self.handed = trace.handed(backward=False), trace.handed(backward=True)
        self._waiting: dict[int, int] = {}
        self._live: dict[int, int] = {}

    def forward(self) -> None:
        """Make the events of forward."""
        self._run(self.trace.forward)

    def backward(self) -> list[int]:
        """Make the events of backward, free what nobody else frees, and return the gradients of parameters."""
        if self.after is not None and not self.traced:  # the gradient that comes in is among the terms
            self.after._drop_unclaimed(backward=True)
        self._run(self.trace.backward)
        self._drop_unclaimed(backward=False)
        gradients = [self._live.pop(number) for number in self.trace.gradients if number in self._live]
        if self.after is not None:
            self.after._drop_unclaimed(backward=True)
        return gradients

    def end(self) -> None:
        """Free what is left of the micro-step."""
        self._log.drop(*self._live.values())
        self._live.clear()
        self._waiting.clear()

    def _run(self, steps: Sequence[int]) -> None:
        own, sizes, log, live = len(self._sizes), self._sizes, self._log, self._live
        for step in steps:
            if step >= 0:
                live[step] = log.make(sizes[step])
            elif ~step < own:
                log.drop(live.pop(~step, None))
            elif (found := self.found[~step - own]) is not None:
                found[0]._let_go(found[1])

    def _drop_unclaimed(self, *, backward: bool) -> None:
        """Free what a pass has handed on and no other segment frees."""
        self._log.drop(*(self._live.pop(number, None) for number in self.handed[backward] if number not in self.claims))

    def _let_go(self, number: int) -> None:
        """Free an own allocation when the last of those that hold it lets go."""
        self._waiting[number] = self._waiting.get(number, self.claims[number]) - 1
        if not self._waiting[number]:
            self._log.drop(self._live.pop(number, None))


def events_of_segments(
    description: ModelDescription, activations: Sequence[Activations], samples: int, gradient_sizes: Sequence[Sequence[int]], log: EventLog
) -> list[SegmentEvents]:
    """Return each segment's events under its unit's choice; one without a trace allocates once for each of its terms.

    `gradient_sizes` has for each segment the bytes of the gradients of its unit that come in its backward, where no trace says so.
    """
    segments: list[SegmentEvents] = []
    for segment, gradients in zip(description.segments, gradient_sizes, strict=True):
        choice = activations[segment.unit]
        form = segment.under(choice)
        place = form.offloaded_allocations if choice.offloads else form.allocations
        if place is None:
            trace = _trace_of_terms(SegmentBytes.of(segment, description.units[segment.unit].span, samples, choice), gradients)
        else:
            trace = description.allocations[place]
        segments.append(SegmentEvents(trace, samples, log, traced=place is not None))
    for index, user in enumerate(segments):
        user.after = segments[index + 1] if index + 1 < len(segments) else None
        user.found = [_find(segments, index, handed) for handed in user.trace.others]
    return segments


def _find(segments: Sequence[SegmentEvents], index: int, handed: Handed) -> tuple[SegmentEvents, int] | None:
    """Return the segment and the number of an allocation that segment `index` frees for it."""
    there = handed.segment if handed.absolute else index + handed.segment
    maker = segments[there] if 0 <= there < len(segments) else None
    if maker is None or not maker.traced or handed.place > len(made := maker.handed[handed.backward]):
        return None
    number = made[-handed.place]
    maker.claims[number] = maker.claims.get(number, 0) + 1
    return maker, number


def _trace_of_terms(terms: SegmentBytes, gradients: Sequence[int]) -> AllocationTrace:
    """Return the trace of a segment that allocates its workspace for a moment, what it saves, and gradients."""
    saved = max(0, terms.saved)
    sizes = (terms.forward_peak - saved, saved, terms.backward_peak, terms.gradient, *gradients)
    own = tuple(range(4, len(sizes)))
    return AllocationTrace(
        sizes=tuple((nbytes, 0) for nbytes in sizes), forward=(0, 1, ~0), backward=(2, ~2, ~1, 3, *own), gradients=own
    )  # fmt: skip
