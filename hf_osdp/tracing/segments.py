"""Stretches of traces at three batch sizes → segments, whose costs are lines."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..errors import DescriptionError
from ..planner.affine import Affine, Envelope
from ..planner.description import PhaseCost, Segment
from .recorder import PhaseRecord, Stretch

Samples = tuple[int, int, int]
"""The batch sizes, rising by one after the first."""


def segments_of(traces: Sequence[Sequence[Stretch]], samples: Samples) -> list[Segment]:
    """Segments of one trace at each batch size.

    Raises:
        DescriptionError: the traces do not run through the same units.
    """
    if len({tuple(stretch.unit for stretch in trace) for trace in traces}) > 1:
        raise DescriptionError(f"The model runs other units with {samples[0]} samples than with {samples[-1]}; its costs are no line.")
    alike = list(zip(*traces, strict=True))
    kept = [bytes_line([(stretch.copy_of or stretch).kept_bytes for stretch in stretches], samples) for stretches in alike]
    return _with_kept([_segment(stretches, samples) for stretches in alike], kept)


def _with_kept(segments: Sequence[Segment], kept: Sequence[Affine]) -> list[Segment]:
    """Segments whose backward begins with what the modules of those after them have kept, as RecurrentGemma's keep a state."""
    found: list[Segment] = []
    later = Affine()
    for segment, own in zip(reversed(segments), reversed(kept), strict=True):
        peak = segment.backward.peak_bytes if later == Affine() else segment.backward.peak_bytes.plus(later)
        later = later.plus(own)
        gradient = segment.gradient_bytes.plus(later)
        found.append(replace(segment, gradient_bytes=gradient, backward=replace(segment.backward, peak_bytes=peak)))
    return found[::-1]


def with_recomputed(plain: list[Segment], again: list[Segment], recomputable: Collection[int]) -> list[Segment]:
    """The plain segments, with those of the other trace beside them.

    Raises:
        DescriptionError: the traces do not run through the same units.
    """
    if [segment.unit for segment in plain] != [segment.unit for segment in again]:
        raise DescriptionError("The model runs other units where its blocks are recomputed.")
    pairs = list(zip(plain, again, strict=True))
    first = next((index for index, one in enumerate(plain) if one.unit in recomputable), None)
    if first is not None:
        # what a stretch between blocks frees when blocks save, and not when they keep it to run again: T5's position bias
        kept = [_more(other.saved_bytes, one.saved_bytes) for one, other in pairs if one.unit not in recomputable]
        saved = functools.reduce(Affine.plus, kept, pairs[first][1].saved_bytes)
        pairs[first] = (plain[first], replace(pairs[first][1], saved_bytes=saved))
    return [replace(one, recomputed=other) if one.unit in recomputable else one for one, other in pairs]


def with_offloaded(plain: list[Segment], away: list[Segment], offloadable: Collection[int]) -> list[Segment]:
    """The plain segments, with what goes where what they save waits on the host: less than is sent, where others hold it too.

    Raises:
        DescriptionError: the traces do not run through the same units.
    """
    if [segment.unit for segment in plain] != [segment.unit for segment in away]:
        raise DescriptionError("The model runs other units where its blocks are offloaded.")
    return [
        replace(one, own_saved_bytes=_more(one.saved_bytes, other.saved_bytes), sent_bytes=other.sent_bytes)
        if one.unit in offloadable
        else one
        for one, other in zip(plain, away, strict=True)
    ]


def _more(line: Affine, than: Affine) -> Affine:
    """What one line has above another, each coefficient by itself."""
    return Affine(constant=max(0.0, line.constant - than.constant), per_sample=max(0.0, line.per_sample - than.per_sample))


def _segment(stretches: Sequence[Stretch], samples: Samples) -> Segment:
    """Costs of a stretch, or of the equal one that was traced in its place, from its trace at each batch size."""
    traced = [stretch.copy_of or stretch for stretch in stretches]
    released = [_released_bytes(stretch) for stretch in stretches]
    ends = [t.end_bytes - r for t, r in zip(traced, released, strict=True)]
    return Segment(
        unit=stretches[0].unit,
        saved_bytes=bytes_line([end - t.start_bytes for t, end in zip(traced, ends, strict=True)], samples),
        sent_bytes=bytes_line([t.sent_bytes for t in traced], samples),
        gradients=tuple(stretches[0].gradients),
        gradient_bytes=bytes_line([t.handed_back_bytes for t in traced], samples),
        forward=_phase([t.forward for t in traced], [t.start_bytes for t in traced], samples),
        backward=_phase([t.backward for t in traced], ends, samples),
    )


def _released_bytes(stretch: Stretch) -> int:
    """What callers let go of when a stand-in had run: after the last of equal blocks, masks and embeddings.

    A stand-in itself frees as much as it makes: its input is not saved, and its output is as large.
    """
    return 0 if stretch.copy_of is None else max(0, stretch.start_bytes - stretch.end_bytes)


def _phase(records: Sequence[PhaseRecord], floors: Sequence[int], samples: Samples) -> PhaseCost:
    levels = [[level - floor for level in record.levels] for record, floor in zip(records, floors, strict=True)]
    return PhaseCost(
        peak_bytes=_peak(levels, samples),
        matmul_flops=_line([record.matmul_flops for record in records[1:]], samples),
        traffic_bytes=_line([record.traffic_bytes for record in records[1:]], samples),
        operators=_line([record.operators for record in records[1:]], samples),
    )


def _line(values: Sequence[float], samples: Samples) -> Affine:
    """The line through the last two batch sizes."""
    slope = (values[1] - values[0]) / (samples[2] - samples[1])
    return Affine(constant=values[0] - slope * samples[1], per_sample=slope)


def bytes_line(values: Sequence[float], samples: Samples) -> Affine:
    """The same, and not below the first batch size's value."""
    return _raised(_line(values[1:], samples), samples[0], values[0])


def _peak(levels: Sequence[Sequence[int]], samples: Samples) -> Envelope:
    """The highest moment, whatever the batch size.

    Each moment's bytes lie on a line of their own, c_m + s_m b: in backward, gradients of activations rule early and those
    of parameters late.
    """
    first, few, many = (max(0, max(moments, default=0)) for moments in levels)
    moments = list(zip(levels[1], levels[2], strict=True)) if len(levels[1]) == len(levels[2]) else [(few, many)]
    peak = Envelope.above(_line(values, samples) for values in {*moments, (0, 0)})
    return peak if samples[0] != 1 or peak.bytes(1) == first else replace(peak, single=float(first))


def _raised(line: Affine, at: int, value: float) -> Affine:
    return Affine(constant=line.constant + max(0.0, value - line(at)), per_sample=line.per_sample)


def is_idle(segment: Segment) -> bool:
    """Whether nothing happened: views, or a glance at a shape between two blocks."""
    zero = Affine()
    return segment.saved_bytes == zero and segment.forward == PhaseCost() and segment.backward == PhaseCost()
