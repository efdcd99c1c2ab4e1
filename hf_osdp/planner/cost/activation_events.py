"""Allocations and frees of segments, from their traces, one micro-step after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..allocator.replay import EventLog
from ..description import Activations, AllocationTrace, Handed, ModelDescription
from .memory import SegmentBytes


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
            else:
                trace = description.allocations[place]
                self._segments.append(_Traced(trace, sizes.setdefault(place, trace.bytes(samples)), log))
        for index, traced in enumerate(self._segments):
            if isinstance(traced, _Traced):
                traced.found = [self._find(index, handed) for handed in traced.trace.others]

    @property
    def traced(self) -> bool:
        """Whether all segments have a trace."""
        return all(isinstance(segment, _Traced) for segment in self._segments)

    def forward(self, index: int) -> None:
        """Make the events of a segment's forward."""
        self._segments[index].forward()

    def backward(self, index: int, gradient_sizes: Sequence[int]) -> list[int]:
        """Make the events of a segment's backward; return the allocations that are its parameters' gradients.

        Args:
            index: of the segment.
            gradient_sizes: bytes of the gradients of its unit that come here, for segments without a trace.
        """
        segment, after = self._segments[index], self._segments[index + 1] if index + 1 < len(self._segments) else None
        if after is not None and isinstance(segment, _ByTerms):
            after.drop_handed_back()  # it is among the terms
        gradients = segment.backward(gradient_sizes)
        if after is not None:
            after.drop_handed_back()
        return gradients

    def hands_back(self, index: int) -> bool:
        """Return whether a segment's backward makes a gradient of its input, as far as is known."""
        return self._segments[index].hands_back

    def end(self) -> None:
        """Free what is left of the micro-step."""
        for segment in self._segments:
            segment.drop_rest()

    def _find(self, index: int, handed: Handed) -> tuple[_Traced, int] | None:
        """Return the segment and the number of an allocation that segment `index` frees for it."""
        there = handed.segment if handed.absolute else index + handed.segment
        maker = self._segments[there] if 0 <= there < len(self._segments) else None
        if not isinstance(maker, _Traced) or handed.place > len(made := maker.handed[handed.backward]):
            return None
        number = made[-handed.place]
        maker.claims[number] = maker.claims.get(number, 0) + 1
        return maker, number


class _Traced:
    """One segment with a trace."""

    def __init__(self, trace: AllocationTrace, sizes: list[int], log: EventLog) -> None:
        self.trace, self._sizes, self._log = trace, sizes, log
        self.found: list[tuple[_Traced, int] | None] = []
        """For each of the trace's `others`, its maker and number; None where it is not known."""
        self.claims: dict[int, int] = {}
        """How many other segments let go of an own allocation; the last one frees it."""
        self._waiting: dict[int, int] = {}
        self.handed = trace.handed(backward=False), trace.handed(backward=True)
        self.hands_back = bool(self.handed[True])
        self._live: dict[int, int] = {}

    def forward(self) -> None:
        self._run(self.trace.forward)

    def backward(self, gradient_sizes: Sequence[int]) -> list[int]:
        """Make the backward's events, and free what forward has left and nobody else frees."""
        self._run(self.trace.backward)
        self._drop_unclaimed(self.handed[False])
        return [self._live.pop(number) for number in self.trace.gradients if number in self._live]

    def drop_handed_back(self) -> None:
        """Free the gradient that was handed on, where the segment before should have."""
        self._drop_unclaimed(self.handed[True])

    def drop_rest(self) -> None:
        self._log.drop_all(self._live.values())
        self._live.clear()
        self._waiting.clear()

    def _drop_unclaimed(self, numbers: Sequence[int]) -> None:
        self._log.drop_all(self._live.pop(number, None) for number in numbers if number not in self.claims)

    def _let_go(self, number: int) -> None:
        """Free an own allocation when the last of those that hold it lets go."""
        self._waiting[number] = self._waiting.get(number, self.claims[number]) - 1
        if not self._waiting[number]:
            self._log.drop(self._live.pop(number, None))

    def _run(self, steps: Sequence[int]) -> None:
        own, sizes, log, live = len(self._sizes), self._sizes, self._log, self._live
        for step in steps:
            if step >= 0:
                live[step] = log.make(sizes[step])
            elif ~step < own:
                log.drop(live.pop(~step, None))
            elif (found := self.found[~step - own]) is not None:
                found[0]._let_go(found[1])


class _ByTerms:
    """One segment without a trace."""

    hands_back = True

    def __init__(self, terms: SegmentBytes, log: EventLog) -> None:
        self._terms, self._log = terms, log
        self._saved: int | None = None
        self._handed_back: int | None = None

    def forward(self) -> None:
        """Allocate what it saves, and its workspace for a moment."""
        saved = max(0, self._terms.saved)
        workspace = self._log.make(max(0, self._terms.forward_peak - saved))
        self._saved = self._log.make(saved)
        self._log.drop(workspace)

    def backward(self, gradient_sizes: Sequence[int]) -> list[int]:
        """Allocate its workspace for a moment, then gradients."""
        self._log.drop_all((self._log.make(self._terms.backward_peak), self._saved))
        self._saved, self._handed_back = None, self._log.make(self._terms.gradient)
        return [self._log.make(nbytes) for nbytes in gradient_sizes]

    def drop_handed_back(self) -> None:
        self._log.drop(self._handed_back)
        self._handed_back = None

    def drop_rest(self) -> None:
        self._log.drop_all((self._handed_back, self._saved))
        self._handed_back = self._saved = None
