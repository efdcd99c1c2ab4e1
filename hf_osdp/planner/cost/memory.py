"""Peak memory as the highest moment of a step; docs/planner.md has the equations of the moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import NamedTuple

from ..decision import Batch, UnitLayout, communicators_of
from ..description import ModelDescription
from ..hardware import Hardware
from ..training_job import TrainingJob
from .moments import EARLIER, MemoryBreakdown, SegmentBytes, all_kinds, step_moments
from .units import UnitBytes, once_per_shape, unit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point of the step at which memory may peak."""

    phase: str
    """`forward: gather`, `forward`, `backward: gather`, `backward`, `backward: reduce`, `reduce` or `optimizer
    step`; `earlier backward` and so on in an earlier micro-step.
    """
    unit: str
    breakdown: MemoryBreakdown

    @property
    def total_bytes(self) -> int:
        return self.breakdown.total


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """All moments of a step in their order."""

    moments: tuple[Moment, ...]
    units: tuple[UnitBytes, ...] = ()
    """Memory terms of each unit, in the description's order."""
    segments: tuple[SegmentBytes, ...] = ()
    host_bytes: int = 0
    """States and offloaded activations of one rank on the host."""
    communicators: int = 0
    """Number of NCCL communicators.

    Their memory is not in the moments; `DeviceSpec.communicator_bytes` is the memory of each.
    """

    @property
    def peak(self) -> Moment:
        """The highest moment, the first of equals."""
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of tensors."""
        return self.peak.total_bytes

    def on(self, hardware: Hardware) -> int:
        """Return the peak on a device: tensors, reserved memory and communicators."""
        return self.peak_bytes + hardware.outside_bytes(self.communicators)

    def outside(self, hardware: Hardware) -> dict[str, int]:
        """Return the device memory outside tensors, by kind."""
        taken = self.communicators * hardware.device.communicator_bytes
        communicators = f"{self.communicators} communicator{'s' if self.communicators > 1 else ''}"
        return {"reserved by the device": hardware.device.reserved_bytes, communicators: taken}


class Needed(NamedTuple):
    """What a plan needs, in bytes."""

    device: int
    """Its peak, with memory outside tensors."""
    host: int
    moments: Mapping[int | None, int]
    """The highest moment of each unit, and for None of the optimizer's step."""
    earlier: int = 0
    """The highest moment of an earlier micro-step."""

    def less(self, nbytes: int) -> Needed:
        """Return the same without so many bytes on the device."""
        moments = {unit: one - nbytes for unit, one in self.moments.items()}
        return Needed(self.device - nbytes, self.host, moments, self.earlier - nbytes)


def estimate_memory(
    description: ModelDescription, layouts: Sequence[UnitLayout], world_size: int, job: TrainingJob, batch: Batch
) -> MemoryEstimate:
    """Return every moment of one optimizer step on the fullest rank; `layouts` has one layout per unit, in the
    description's order.
    """
    units, segments = layout_terms(description, layouts, world_size, job, batch)
    walk = step_moments(description, units, segments, job, batch, MemoryBreakdown)
    return MemoryEstimate(
        moments=tuple(
            Moment(phase=phase, unit="(all)" if unit is None else description.units[unit].label, breakdown=level)
            for phase, unit, level in walk
        ),
        units=tuple(units),
        segments=tuple(segments),
        host_bytes=_host_bytes(units, segments),
        communicators=communicators_of(layouts, world_size),
    )


def bytes_needed(
    description: ModelDescription, layouts: Sequence[UnitLayout], hardware: Hardware, job: TrainingJob, batch: Batch
) -> Needed:
    """Return what a plan needs, as `estimate_memory` has it, in less time."""
    units, segments = layout_terms(description, layouts, hardware.world_size, job, batch)
    outside = hardware.outside_bytes(communicators_of(layouts, hardware.world_size))
    highest: dict[int | None, int] = {}
    before = 0
    for phase, unit, level in step_moments(description, units, segments, job, batch, all_kinds):
        highest[unit] = max(highest.get(unit, 0), level + outside)
        before = max(before, level + outside) if phase.startswith(EARLIER) else before
    return Needed(max(highest.values()), _host_bytes(units, segments), highest, before)


def layout_terms(
    description: ModelDescription, layouts: Sequence[UnitLayout], world_size: int, job: TrainingJob, batch: Batch
) -> tuple[list[UnitBytes], list[SegmentBytes]]:
    """Return the memory terms of each unit and of each segment."""
    recomputes = any(layout.activations.recomputes for layout in layouts)
    segments = [
        SegmentBytes.of(
            s,
            description.units[s.unit].span,
            batch.micro_batch_size,
            layouts[s.unit].activations,
            recomputes=recomputes,
        )
        for s in description.segments
    ]
    terms = once_per_shape(description.units, partial(unit_bytes, world_size=world_size, job=job, batch=batch))
    return [*starmap(terms, zip(range(len(description.units)), layouts, strict=True))], segments


def _host_bytes(units: Sequence[UnitBytes], segments: Sequence[SegmentBytes]) -> int:
    """Return the bytes on the host: all states, one gradient that is added there at a time, and activations."""
    held = sum(unit.host for unit in units) + max((unit.host_moment for unit in units), default=0)
    return held + sum(segment.host for segment in segments)


def peak_of_terms(
    description: ModelDescription,
    units: Sequence[UnitBytes],
    segments: Sequence[SegmentBytes],
    job: TrainingJob,
    batch: Batch,
) -> int:
    """Return the peak of a step whose units and segments have these terms, which need not come from one plan."""
    return max(level for _, _, level in step_moments(description, units, segments, job, batch, all_kinds))
