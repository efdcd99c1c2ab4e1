"""Allocations and frees of segments, from their traces, one micro-step after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..allocation_trace import AllocationTrace
from ..cost.memory import SegmentBytes
from ..description import Activations, ModelDescription
from .event_log import EventLog


class ActivationEvents:
    """Runs segments' allocation traces at a micro-batch size.

    A segment without a trace allocates once for each of its terms: workspace, what it saves, and the gradient that it hands on.

    Args:
        description: the model.
        activations: one a unit.
        samples: micro-batch size.
        log: where events go.
    """

    def __init__(self, description: ModelDescription, activations: Sequence[Activations], samples: int, log: EventLog) -> None:
        self._log = log
        self._segments: list[_Traced | _ByTerms] = []
        sizes: dict[int, list[int]] = {}
        for segment in description.segments:
            choice = activations[segment.unit]
            form = segment.under(choice)
            place = form.offloaded_allocations if choice.offloads else form.allocations
            if place is None:
                terms = SegmentBytes.of(segment, description.units[segment.unit].span, samples, choice)
                self._segments.append(_ByTerms(terms, log))
                continue
            trace = description.allocations[place]
            self._segments.append(_Traced(trace, sizes.setdefault(place, trace.bytes(samples)), log))
        self._find_others()

    @property
    def traced(self) -> bool:
        """Whether all segments have a trace."""
        return all(segment.is_traced for segment in self._segments)

    def forward(self, index: int) -> None:
        """A segment's forward."""
        self._segments[index].forward()

    def backward(self, index: int, gradient_sizes: Sequence[int]) -> list[int]:
        """A segment's backward; returns the allocations that are its parameters' gradients.

        Args:
            index: of the segment.
            gradient_sizes: bytes of the gradients of its unit that come here, for segments without a trace.
        """
        segment, after = self._segments[index], self._segments[index + 1] if index + 1 < len(self._segments) else None
        if after is not None and not segment.is_traced:
            after.drop_handed_back()  # it is among the terms
        gradients = segment.backward(gradient_sizes)
        if after is not None:
            after.drop_handed_back()
        return gradients

    def hands_back(self, index: int) -> bool:
        """Whether a segment's backward makes a gradient of its input, as far as is known."""
        return self._segments[index].hands_back

    def end(self) -> None:
        """The micro-step is over: nothing of it is left."""
        for segment in self._segments:
            segment.drop_rest()

    def _find_others(self) -> None:
        """Tell each trace where the allocations of others are that it frees."""
        for index, segment in enumerate(self._segments):
            for handed in segment.others:
                there = handed.segment if handed.absolute else index + handed.segment
                found = self._segments[there] if 0 <= there < len(self._segments) else None
                number = None if found is None else found.place_of(backward=handed.backward, place=handed.place)
                segment.found.append(None if number is None else (found, number))
                if number is not None:
                    found.claims[number] = found.claims.get(number, 0) + 1


class _Traced:
    """One segment with a trace."""

    is_traced = True

    def __init__(self, trace: AllocationTrace, sizes: list[int], log: EventLog) -> None:
        self._trace, self._sizes, self._log = trace, sizes, log
        self.others = trace.others
        self.found: list[tuple[_Traced, int] | None] = []
        self.claims: dict[int, int] = {}
        """How many other segments let go of an own allocation; the last one frees it."""
        self._waiting: dict[int, int] = {}
        self._handed = trace.handed(backward=False), trace.handed(backward=True)
        self.hands_back = bool(self._handed[True])
        self.live: dict[int, int] = {}

    def place_of(self, *, backward: bool, place: int) -> int | None:
        """The allocation that is so far from the last one that outlives a phase."""
        handed = self._handed[backward]
        return handed[-place] if place <= len(handed) else None

    def forward(self) -> None:
        """Run the forward's events."""
        self._run(self._trace.forward)

    def backward(self, gradient_sizes: Sequence[int]) -> list[int]:
        """Run the backward's events, and free what forward has left and nobody else frees."""
        self._run(self._trace.backward)
        for number in self._handed[False]:
            if number not in self.claims:
                self.drop(number)
        return [self.live.pop(number) for number in self._trace.gradients if number in self.live]

    def drop_handed_back(self) -> None:
        """Free the gradient that was handed on, where the segment before should have."""
        for number in self._handed[True]:
            if number not in self.claims:
                self.drop(number)

    def let_go(self, number: int) -> None:
        """One of those that hold an own allocation does so no more."""
        self._waiting[number] = self._waiting.get(number, self.claims[number]) - 1
        if not self._waiting[number]:
            self.drop(number)

    def drop(self, number: int) -> None:
        """Free an own allocation, if it is there."""
        self._log.drop(self.live.pop(number, None))

    def drop_rest(self) -> None:
        """Free all that is there."""
        self._log.drop_all(self.live.values())
        self.live.clear()
        self._waiting.clear()

    def _run(self, steps: Sequence[int]) -> None:
        own, sizes, log, live = len(self._sizes), self._sizes, self._log, self.live
        for step in steps:
            if step >= 0:
                live[step] = log.make(sizes[step])
            elif ~step < own:
                log.drop(live.pop(~step, None))
            elif (found := self.found[~step - own]) is not None:
                found[0].let_go(found[1])


class _ByTerms:
    """One segment without a trace."""

    is_traced = False
    others: tuple[()] = ()
    hands_back = True

    def __init__(self, terms: SegmentBytes, log: EventLog) -> None:
        self._terms, self._log = terms, log
        self.found: list[None] = []
        self._saved: int | None = None
        self._handed_back: int | None = None

    def place_of(self, *, backward: bool, place: int) -> None:
        """Nothing of it is known to others."""

    def forward(self) -> None:
        """Allocate what it saves, and its workspace for a moment."""
        saved = max(0, self._terms.saved)
        workspace = self._log.make(max(0, self._terms.forward_peak - saved))
        self._saved = self._log.make(saved)
        self._log.drop(workspace)

    def backward(self, gradient_sizes: Sequence[int]) -> list[int]:
        """Allocate its workspace for a moment, then gradients."""
        self._log.drop(self._log.make(self._terms.backward_peak))
        self._log.drop(self._saved)
        self._saved = None
        self._handed_back = self._log.make(self._terms.gradient)
        return [self._log.make(nbytes) for nbytes in gradient_sizes]

    def drop_handed_back(self) -> None:
        """Free the gradient that was handed on."""
        self._log.drop(self._handed_back)
        self._handed_back = None

    def drop_rest(self) -> None:
        """Free all that is there."""
        self.drop_handed_back()
        self._log.drop(self._saved)
        self._saved = None
