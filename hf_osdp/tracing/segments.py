"""Fit segments, whose costs are linear in the batch size, to segment records at two or three batch sizes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from ..errors import DescriptionError
from ..planner.affine import Affine, Envelope, ScratchMoment
from ..planner.description import PhaseCost, Segment
from .kernel_scratch import Growth
from .recorder import SegmentRecord
from .work import WORK, PhaseRecord

Samples = Sequence[int]
"""The traced batch sizes: two consecutive ones, preceded perhaps by a smaller one, at which costs may be above the
line.
"""


def segments_of(traces: Sequence[Sequence[SegmentRecord]], samples: Samples) -> list[Segment]:
    """Fit segments to one trace per batch size; raise DescriptionError if the traces do not run the same units."""
    if len({tuple(record.unit for record in trace) for trace in traces}) > 1:
        raise DescriptionError(
            f"The model runs other units with {samples[0]} samples than with {samples[-1]}: which it runs depends on"
            " the batch, so its costs are not linear. Pass inputs with which it runs all; a loss that runs the model"
            f" in mini-batches needs mini-batches of more than {samples[-1]} samples."
        )
    by_segment = list(zip(*map(_without_unused, traces), strict=True))
    phases: _Phases = {}
    return [_segment(records, samples, phases) for records in by_segment]


def _without_unused(trace: Sequence[SegmentRecord]) -> list[SegmentRecord]:
    """Return a trace in which a unit without backward, such as the last layer of a vision tower whose features are
    those of the layer before, ends without the bytes that later segments free in forward. How many these are depends
    on the unit's activations; the later segments' forward peaks include them.
    """
    records = list(trace)
    places = {id(record): index for index, record in enumerate(trace)}
    for index, record in enumerate(trace):
        if record.unit == 0 or record.backward.levels:
            continue
        for by, nbytes in record.freed:
            for place in range(index, places[id(by)] + 1):
                one = records[place]
                begins, ends = place > index, place < places[id(by)] and (place > index or one.copy_of is None)
                records[place] = replace(
                    one, start_bytes=one.start_bytes - begins * nbytes, end_bytes=one.end_bytes - ends * nbytes
                )
    return [one if one.copy_of is None else replace(one, copy_of=records[places[id(one.copy_of)]]) for one in records]


def with_sent(kept: list[Segment], sent: list[Segment]) -> list[Segment]:
    """Set the bytes that segments send to the host, and those that this frees on the device: fewer, if other segments
    hold them too.
    """
    return [
        one if other.sent_bytes == Affine()
        else replace(one, own_saved_bytes=excess(one.saved_bytes, other.saved_bytes), sent_bytes=other.sent_bytes)
        for one, other in zip(kept, sent, strict=True)
    ]  # fmt: skip


def is_idle(segment: Segment) -> bool:
    """Return whether a segment costs nothing, for example only views between two blocks."""
    return segment.saved_bytes == Affine() and segment.forward == PhaseCost() and segment.backward == PhaseCost()


def linear_bytes(values: Sequence[float], samples: Samples) -> Affine:
    """Fit bytes at the batch sizes: a line through the last two, raised if the first is above it."""
    fit = _linear(values[-2:], samples[-2:])
    return Affine(constant=fit.constant + max(0.0, values[0] - fit(samples[0])), per_sample=fit.per_sample)


def _linear(values: Sequence[float], samples: Samples) -> Affine:
    """Return the line through two values."""
    slope = (values[1] - values[0]) / (samples[1] - samples[0])
    return Affine(constant=values[0] - slope * samples[0], per_sample=slope)


def excess(one: Affine, other: Affine) -> Affine:
    """Return the difference of two functions, with each negative coefficient set to 0."""
    return Affine(
        constant=max(0.0, one.constant - other.constant), per_sample=max(0.0, one.per_sample - other.per_sample)
    )


_Phases: TypeAlias = dict[tuple[int, ...], PhaseCost]
"""Fitted phases by the identities of their records and the bytes below them."""


def _segment(records: Sequence[SegmentRecord], samples: Samples, phases: _Phases) -> Segment:
    traced = [record.copy_of or record for record in records]
    ends = [t.end_bytes - _released(record) for t, record in zip(traced, records, strict=True)]

    def phase(records: Sequence[PhaseRecord], floors: Sequence[int]) -> PhaseCost:
        key = (*map(id, records), *floors)
        if key not in phases:
            phases[key] = _phase(records, floors, samples)
        return phases[key]

    return Segment(
        unit=records[0].unit,
        saved_bytes=linear_bytes([end - t.start_bytes for t, end in zip(traced, ends, strict=True)], samples),
        sent_bytes=linear_bytes([t.sent_bytes for t in traced], samples),
        gradients=tuple(records[0].gradients),
        gradient_bytes=linear_bytes([t.input_gradient_bytes for t in traced], samples),
        arrival_bytes=linear_bytes([t.arrival_bytes for t in traced], samples),
        kept_bytes=linear_bytes([t.kept_bytes for t in traced], samples),
        forward=phase([t.forward for t in traced], [t.start_bytes for t in traced]),
        backward=phase([t.backward for t in traced], ends),
    )


def _released(record: SegmentRecord) -> int:
    """Return the bytes that a replayed block's caller freed, such as the mask after the last block; the block frees
    only its own.
    """
    return 0 if record.copy_of is None else max(0, record.start_bytes - record.end_bytes)


def _phase(records: Sequence[PhaseRecord], floors: Sequence[int], samples: Samples) -> PhaseCost:
    levels = [[level - floor for level in record.levels] for record, floor in zip(records, floors, strict=True)]
    rest = [list(map(operator.sub, own, record.come)) for own, record in zip(levels, records, strict=True)]
    peak, adding = (replace(_peak(own, samples), scratch=_scratch(records, own, samples)) for own in (levels, rest))
    return PhaseCost(
        peak_bytes=peak,
        adding_bytes=None if adding == peak else adding,
        operators=_linear([record.operators for record in records[-2:]], samples[-2:]),
        **{name: _linear([getattr(record, name) for record in records[-2:]], samples[-2:]) for name in WORK},
    )


def _scratch(
    records: Sequence[PhaseRecord], levels: Sequence[Sequence[int]], samples: Samples
) -> tuple[ScratchMoment, ...]:
    """Return the moments at which kernels take memory of their own: of each kind of kernel the one with most live
    bytes.
    """
    highest: dict[tuple[Growth, Affine], Affine] = {}
    for calls in zip(*(record.scratch for record in records[-2:]), strict=False):
        (_, one), (_, other) = calls
        if one.growth == other.growth:
            lives = [own[at] for (at, _), own in zip(calls, levels[-2:], strict=True)]
            live, rows = _linear(lives, samples[-2:]), _linear([one.rows, other.rows], samples[-2:])
            before = highest.get((one.growth, rows), live)
            highest[one.growth, rows] = max(before, live, key=lambda moment: moment(samples[-1]))
    return tuple(growth.moment(live, rows) for (growth, rows), live in highest.items())


def _peak(levels: Sequence[Sequence[int]], samples: Samples) -> Envelope:
    """Return the peak as a function of the batch size b: the maximum over moments m of c_m + s_m b.

    In backward, gradients of activations dominate early and those of parameters late.
    """
    highest = [max(0, max(moments, default=0)) for moments in levels]
    moments = (
        list(zip(*levels[-2:], strict=True)) if len(levels[-2]) == len(levels[-1]) else [(highest[-2], highest[-1])]
    )
    peak = Envelope.above([Affine(), *(_linear(values, samples[-2:]) for values in moments)])
    return peak if samples[0] != 1 or peak.bytes(1) == highest[0] else replace(peak, single=float(highest[0]))
