"""Allocations and frees of segments, from their traces, one micro-step after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..allocator.replay import EventLog
from ..description import Activations, AllocationTrace, Handed, ModelDescription
from .memory import SegmentBytes


class ActivationEvents:
    """Run segments' allocation traces at a micro-batch size.

    A segment without a trace allocates once for each of its terms: workspace, what it saves, and the gradient that it hands on.

    Args:
        description: the model.
        activations: one a unit.
        samples: micro-batch size.
        gradient_sizes: for each segment, bytes of the gradients of its unit that come in its backward; segments with a trace say so there.
        log: where events go.
    """

    def __init__(
        self,
        description: ModelDescription,
        activations: Sequence[Activations],
        samples: int,
        gradient_sizes: Sequence[Sequence[int]],
        log: EventLog,
    ) -> None:
        self._segments: list[_Segment] = []
        for segment, gradients in zip(description.segments, gradient_sizes, strict=True):
            choice = activations[segment.unit]
            form = segment.under(choice)
            place = form.offloaded_allocations if choice.offloads else form.allocations
            if place is None:
                trace = _trace_of_terms(SegmentBytes.of(segment, description.units[segment.unit].span, samples, choice), gradients)
            else:
                trace = description.allocations[place]
            self._segments.append(_Segment(trace, samples, log, traced=place is not None))
        for index, user in enumerate(self._segments):
            user.found = [self._find(index, handed) for handed in user.trace.others]

    @property
    def traced(self) -> bool:
        """Whether all segments have a trace."""
        return all(segment.traced for segment in self._segments)

    def forward(self, index: int) -> None:
        """Make the events of a segment's forward."""
        self._segments[index].run(self._segments[index].trace.forward)

    def backward(self, index: int) -> list[int]:
        """Make the events of a segment's backward, free what nobody else frees, and return the gradients of its parameters."""
        segment = self._segments[index]
        after = self._segments[index + 1 : index + 2]
        if not segment.traced:  # the gradient that came in is among the terms
            for other in after:
                other.drop_unclaimed(backward=True)
        segment.run(segment.trace.backward)
        segment.drop_unclaimed(backward=False)
        gradients = [segment.live.pop(number) for number in segment.trace.gradients if number in segment.live]
        for other in after:
            other.drop_unclaimed(backward=True)
        return gradients

    def hands_back(self, index: int) -> bool:
        """Return whether a segment's backward makes a gradient of its input, as far as is known."""
        return bool(self._segments[index].handed[True])

    def end(self) -> None:
        """Free what is left of the micro-step."""
        for segment in self._segments:
            segment.drop_rest()

    def _find(self, index: int, handed: Handed) -> tuple[_Segment, int] | None:
        """Return the segment and the number of an allocation that segment `index` frees for it."""
        there = handed.segment if handed.absolute else index + handed.segment
        maker = self._segments[there] if 0 <= there < len(self._segments) else None
        if maker is None or not maker.traced or handed.place > len(made := maker.handed[handed.backward]):
            return None
        number = made[-handed.place]
        maker.claims[number] = maker.claims.get(number, 0) + 1
        return maker, number


def _trace_of_terms(terms: SegmentBytes, gradients: Sequence[int]) -> AllocationTrace:
    """Return the trace of a segment that allocates its workspace for a moment, what it saves, and gradients."""
    saved = max(0, terms.saved)
    sizes = (max(0, terms.forward_peak - saved), saved, terms.backward_peak, terms.gradient, *gradients)
    own = tuple(range(4, len(sizes)))
    return AllocationTrace(
        sizes=tuple((nbytes, 0) for nbytes in sizes), forward=(0, 1, ~0), backward=(2, ~2, ~1, 3, *own), gradients=own
    )  # fmt: skip


class _Segment:
    """One segment, and which of its allocations are there now."""

    def __init__(self, trace: AllocationTrace, samples: int, log: EventLog, *, traced: bool) -> None:
        self.trace, self.traced, self._sizes, self._log = trace, traced, trace.bytes(samples), log
        self.found: list[tuple[_Segment, int] | None] = []
        """For each of the trace's `others`, its maker and number; None where it is not known."""
        self.claims: dict[int, int] = {}
        """How many other segments let go of an own allocation; the last one frees it."""
        self._waiting: dict[int, int] = {}
        self.handed = trace.handed(backward=False), trace.handed(backward=True)
        self.live: dict[int, int] = {}

    def run(self, steps: Sequence[int]) -> None:
        """Make the events of a pass."""
        own, sizes, log, live = len(self._sizes), self._sizes, self._log, self.live
        for step in steps:
            if step >= 0:
                live[step] = log.make(sizes[step])
            elif ~step < own:
                log.drop(live.pop(~step, None))
            elif (found := self.found[~step - own]) is not None:
                found[0]._let_go(found[1])

    def drop_unclaimed(self, *, backward: bool) -> None:
        """Free what a pass has handed on and no other segment frees."""
        self._log.drop_all(self.live.pop(number, None) for number in self.handed[backward] if number not in self.claims)

    def drop_rest(self) -> None:
        self._log.drop_all(self.live.values())
        self.live.clear()
        self._waiting.clear()

    def _let_go(self, number: int) -> None:
        """Free an own allocation when the last of those that hold it lets go."""
        self._waiting[number] = self._waiting.get(number, self.claims[number]) - 1
        if not self._waiting[number]:
            self._log.drop(self.live.pop(number, None))
