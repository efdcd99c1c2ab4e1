"""Profiles: files with measurements of a machine (devices, links) and of a model's blocks on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from ..errors import ProfileError
from ..quantities import check_numbers
from ..reading import parse_json, read_bytes
from .affine import Affine, linear_fit
from .block_forms import COUNTED_AS_EAGER, MEASURED_COMPILED
from .cost.timing import phase_affine
from .description import DType, ModelDescription, PhaseCost, Segment
from .files import plain, validated, write_whole
from .hardware import Hardware

PROFILE_VERSION = 8
_WORK_SAMPLES = 2
"""Samples for which the work of segments is compared."""
_SAME_WORK = 0.02
"""Relative difference of work up to which segments count as equal: traces of a short and a long model may differ by
a mask.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentWork:
    """Traced work for two samples.

    Attention, dropout or checkpointing change the work of segments with equal parameters.
    """

    forward_flops: float
    forward_bytes: float
    backward_flops: float
    backward_bytes: float

    @classmethod
    def of(cls, segment: Segment) -> SegmentWork:
        """Return the work of a traced segment."""
        return cls(
            forward_flops=segment.forward.flops(_WORK_SAMPLES),
            forward_bytes=segment.forward.traffic_bytes(_WORK_SAMPLES),
            backward_flops=segment.backward.flops(_WORK_SAMPLES),
            backward_bytes=segment.backward.traffic_bytes(_WORK_SAMPLES),
        )

    def difference(self, other: SegmentWork) -> float:
        """Return the largest difference of the four numbers, FLOPs relative to all FLOPs, bytes relative to all
        bytes.
        """
        highest = 0.0
        for names in (("forward_flops", "backward_flops"), ("forward_bytes", "backward_bytes")):
            mine, theirs = ([getattr(work, name) for name in names] for work in (self, other))
            differences = (abs(a - b) for a, b in zip(mine, theirs, strict=True))
            highest = max(highest, max(differences) / max(sum(mine), sum(theirs), 1.0))
        return highest


def segment_kind(
    description: ModelDescription, segment: Segment
) -> tuple[str, tuple[tuple[int, ...], ...], SegmentWork]:
    """Return what segments that take the same time have in common: the class of the unit, its shapes, the work."""
    unit = description.units[segment.unit]
    return unit.class_name, tuple(p.shape for p in unit.parameters), SegmentWork.of(segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePoint:
    """Seconds of a segment at one micro-batch size, on the slowest rank."""

    samples: int
    forward_s: float
    backward_s: float
    saved_bytes: int = 0
    """Bytes that forward leaves allocated on the device; 0 on the CPU, where they are not known."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"TimePoint.samples={self.samples} must be at least 1.")
        check_numbers(self, "forward_s", "backward_s", "saved_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTimes:
    """Measured times of one kind of segment, with the properties that identify the kind."""

    class_name: str
    parameter_shapes: tuple[tuple[int, ...], ...]
    sequence_length: int
    compute_dtype: DType
    work: SegmentWork
    points: tuple[TimePoint, ...]
    compiled: bool = False
    """Whether the segment ran compiled."""

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"The segment of {self.class_name} has no measured time; it needs at least one.")

    def fits(self, description: ModelDescription, segment: Segment) -> bool:
        """Return whether the segment is of this kind; one to be compiled may have been measured as it is."""
        class_name, shapes, work = segment_kind(description, segment)
        if self.compiled and not description.compiles(class_name):
            return False
        mine = (self.class_name, self.parameter_shapes, self.sequence_length, self.compute_dtype)
        theirs = (class_name, shapes, description.sequence_length, description.compute_dtype)
        return mine == theirs and self.work.difference(work) <= _SAME_WORK

    def linear(self, name: str) -> Affine:
        """Return `forward_s`, `backward_s` or `saved_bytes` against samples, fitted to the measured sizes."""
        constant, per_sample = linear_fit([(point.samples, max(getattr(point, name), 1e-9)) for point in self.points])
        return Affine(constant=constant, per_sample=per_sample)

    @property
    def saved_bytes(self) -> Affine | None:
        """What a compiled segment saves against samples; None if it was not compiled or measured on a device."""
        known = self.compiled and all(point.saved_bytes for point in self.points)
        return self.linear("saved_bytes") if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements of a machine, with place, versions and date."""

    hardware: Hardware
    segments: tuple[SegmentTimes, ...] = ()
    """Times of a model's blocks, embedding and head; empty if only the machine was measured."""
    device_names: tuple[str, ...] = ()
    """Device of each rank."""
    model: str = ""
    """Name of the model whose segments were timed."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package versions: hf_osdp, torch and others."""
    date: str = ""
    """ISO 8601, UTC."""
    version: int = PROFILE_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", MappingProxyType(dict(self.versions)))

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes at which segments were timed."""
        return tuple(sorted({point.samples for segment in self.segments for point in segment.points}))

    def to_json(self) -> str:
        """Return the profile as JSON."""
        return json.dumps(plain(self), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the profile to a file; ProfileError if writing fails."""
        try:
            write_whole(path, self.to_json())
        except OSError as error:
            raise ProfileError(f"Cannot write the profile {path}: {error.strerror}.") from None

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the profile") -> Profile:
        """Read a profile from JSON as `to_json` writes it; errors call it `source`.

        Raises:
            ProfileError: the text is not a valid profile.
        """
        data = parse_json(
            text, lambda problem: ProfileError(f"{source} {problem}. Profile again, or name another file.")
        )
        if isinstance(data, dict) and isinstance(version := data.get("version"), int) and version != PROFILE_VERSION:
            raise ProfileError(
                f"{source} has version {version}; this hf_osdp reads version {PROFILE_VERSION}. Profile again."
            )
        return validated(cls, data, lambda problem: ProfileError(f"{source} is not a valid profile: {problem}."))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile from a file; ProfileError if it is missing, too large, or not a valid profile."""
        return cls.from_json(read_bytes(path, "profile", ProfileError), source=str(path))


def with_block_times(description: ModelDescription, profile: Profile) -> ModelDescription:
    """Return the description with measured times instead of the roofline; unchanged if the profile has no blocks.

    Raises:
        ProfileError: the profile has blocks, but not all blocks of this model.
    """
    if not profile.segments:
        return description
    return BlockTimes.of(profile.segments, description, profile.hardware, "from the profile").on(description)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Measured times of a model's segments, for all descriptions of the model: whole, split, compiled."""

    segments: tuple[SegmentTimes, ...]
    hardware: Hardware
    seconds: tuple[tuple[float, float], ...]
    """Of each of these kinds, the seconds of all its segments in the whole model: as measured, and by the roofline."""
    source: str
    """Where the times are from, for `ModelDescription.timing`."""

    @classmethod
    def of(
        cls, segments: tuple[SegmentTimes, ...], description: ModelDescription, hardware: Hardware, source: str
    ) -> BlockTimes:
        """Compare the times with the roofline of a description; ProfileError if a segment of it was not timed."""
        seconds = [(0.0, 0.0) for _ in segments]
        for segment in description.segments:
            if (found := _nearest(segments, segment, description)) is None:
                raise ProfileError(_mismatch(segment, description, segments))
            samples, kind = max(point.samples for point in found.points), segments.index(found)
            measured_s, roofline_s = seconds[kind]
            measured_s += sum(found.linear(phase)(samples) for phase in ("forward_s", "backward_s"))
            phases = (segment.forward, segment.backward)
            roofline_s += sum(phase_affine(phase, description, hardware)(samples) for phase in phases)
            seconds[kind] = measured_s, roofline_s
        return cls(segments=segments, hardware=hardware, seconds=tuple(seconds), source=source)

    def on(self, description: ModelDescription) -> ModelDescription:
        """Return the description with measured times instead of the roofline.

        A segment takes the times of the measured segment with the same class, parameter shapes, sequence length and
        compute dtype, and the nearest work, at most 2 % apart. Other segments, such as those of a split block, take
        the roofline's seconds, times the ratio of measured and roofline seconds of what the description has no longer:
        of the whole blocks that are split, or of the head without chunks.
        """
        there = [_nearest(self.segments, segment, description) for segment in description.segments]
        gone = [seconds for kind, seconds in zip(self.segments, self.seconds, strict=True) if kind not in there]
        measured_s, roofline_s = map(sum, zip(*(gone or self.seconds), strict=True))
        slowdown = measured_s / roofline_s if roofline_s else 1.0
        segments = tuple(self._timed(segment, description, slowdown) for segment in description.segments)
        compiled = [s for s in description.segments if description.compiles(segment_kind(description, s)[0])]
        found = [_nearest(self.segments, segment, description) for segment in compiled]
        measured = bool(found) and all(times is not None and times.saved_bytes is not None for times in found)
        trace = description.trace.replace(COUNTED_AS_EAGER, MEASURED_COMPILED) if measured else description.trace
        return replace(description, segments=segments, timing=self.source, trace=trace)

    def _timed(self, segment: Segment, description: ModelDescription, slowdown: float) -> Segment:
        def scaled(phase: PhaseCost) -> PhaseCost:
            roofline = phase_affine(phase, description, self.hardware)
            return replace(phase, seconds=roofline.scaled(slowdown, constants=True))

        found = _nearest(self.segments, segment, description)
        if found is None:
            return segment.each(
                lambda costs: replace(costs, forward=scaled(costs.forward), backward=scaled(costs.backward))
            )
        forward, backward = found.linear("forward_s"), found.linear("backward_s")
        samples = max(point.samples for point in found.points)

        def again(costs: Segment) -> Segment:
            """Return the costs of a recomputed segment: backward adds the share of forward's time that runs again, by
            its work.
            """
            phases = (costs.backward, segment.backward, segment.recomputed[0].costs.backward)
            partly, none, whole = (phase_affine(phase, description, self.hardware)(samples) for phase in phases)
            share = max(0.0, (partly - none) / (whole - none)) if whole > none else 1.0
            backward_s = backward.plus(forward.scaled(share, constants=True))
            issued = costs.forward.operators(1) - segment.forward.operators(1)  # save and replay outputs
            overlaps = self.hardware.backend.overlaps
            modes = Affine(constant=0.0 if overlaps else issued * self.hardware.device.operator_s)
            return replace(
                costs,
                forward=replace(costs.forward, seconds=forward.plus(modes)),
                backward=replace(costs.backward, seconds=backward_s),
            )

        timed = replace(
            segment,
            forward=replace(segment.forward, seconds=forward),
            backward=replace(segment.backward, seconds=backward),
            recomputed=tuple(replace(policy, costs=again(policy.costs)) for policy in segment.recomputed),
        )
        return timed if found.saved_bytes is None else _with_saved(timed, found.saved_bytes)


def _with_saved(segment: Segment, saved: Affine) -> Segment:
    """Return a compiled segment with what it saves. Its own peaks stay those of the trace, which are higher; those of
    backward count from what forward saves.
    """
    less = Affine(
        constant=max(0.0, segment.saved_bytes.constant - saved.constant),
        per_sample=max(0.0, segment.saved_bytes.per_sample - saved.per_sample),
    )
    return replace(segment, saved_bytes=saved, backward=segment.backward.with_peaks(lambda peak: peak.plus(less)))


def _nearest(
    measured: tuple[SegmentTimes, ...], segment: Segment, description: ModelDescription
) -> SegmentTimes | None:
    """Return the times of the segment's kind with the nearest work; None if it was not timed."""
    fitting, work = [times for times in measured if times.fits(description, segment)], SegmentWork.of(segment)
    return min(fitting, key=lambda times: (not times.compiled, times.work.difference(work)), default=None)


def _mismatch(segment: Segment, description: ModelDescription, measured: tuple[SegmentTimes, ...]) -> str:
    unit, length, dtype = description.units[segment.unit], description.sequence_length, description.compute_dtype
    had = {(times.class_name, times.sequence_length, times.compute_dtype) for times in measured}
    there = "it has times for " + ", ".join(
        f"{name} at {tokens} tokens in {of.value}" for name, tokens, of in sorted(had)
    )
    if (unit.class_name, length, dtype) in had:
        there = "its segments of that class have other shapes, attention, dropout, checkpointing or compilation"
    return (
        f"The profile has no times for {unit.class_name} {unit.label!r} at {length} tokens in {dtype.value}; {there}."
        " Profile this model,"
        " or plan with the profile's hardware alone."
    )
