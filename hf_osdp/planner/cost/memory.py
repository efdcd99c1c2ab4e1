"""Peak memory as the highest moment of a step; docs/planner.md has the equations of the moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap

from ..decision import Batch, UnitLayout, communicators_of
from ..description import GatherSpan, ModelDescription, Segment
from ..hardware import Hardware
from ..placement import Activations
from ..training_job import OptimizerStep, TrainingJob
from .placement import saved_bytes
from .units import UnitBytes, gradients_arriving, merged_gradients, once_per_shape, unit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on one rank at one moment, by kind."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Saved activations, workspace of the running segment, logits, loss, unsharded gradients of the running
    segment.
    """
    gathered: int = 0
    """Unsharded parameters and gather buffers."""
    buffers: int = 0
    """Reduce buffers, casts and optimizer scratch."""
    model_buffers: int = 0
    """The module's own buffers, the batch, and other models."""
    held_outputs: int = 0
    """Outputs of the model that the loop keeps through backward, such as logits."""
    correction: int = 0
    """Error of the estimate, from a simulation or a measurement."""

    @property
    def total(self) -> int:
        held = self.parameters + self.gradients + self.optimizer + self.correction
        return held + self.model_buffers + self.held_outputs + self.activations + self.gathered + self.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point of the step at which memory may peak."""

    phase: str
    """`forward: gather`, `forward`, `backward: gather`, `backward`, `backward: reduce`, `reduce` or `optimizer
    step`.
    """
    unit: str
    breakdown: MemoryBreakdown

    @property
    def total_bytes(self) -> int:
        return self.breakdown.total


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBytes:
    """Memory terms of one segment of one micro-batch, in bytes; `Segment` and `PhaseCost` define them."""

    saved: int
    """Negative for a segment of the root that frees more than it saves, such as the output of the preceding unit."""
    gradient: int
    forward_peak: int
    backward_peak: int
    host: int

    @classmethod
    def of(
        cls,
        segment: Segment,
        span: GatherSpan,
        samples: int,
        activations: Activations = Activations.SAVE,
        *,
        recomputes: bool = False,
    ) -> SegmentBytes:
        """Return the terms at a micro-batch size under a choice of activations; `recomputes`: some block is
        recomputed.
        """
        form = segment.under(activations.recomputation)
        saved = form.saved_bytes.change(samples) if span is GatherSpan.STEP else form.saved_bytes.bytes(samples)
        saved += form.held_bytes.bytes(samples) if recomputes else 0
        left, host = saved_bytes(form, saved, samples, activations)
        return cls(
            saved=left,
            gradient=form.gradient_bytes.bytes(samples),
            forward_peak=form.forward.peak_bytes.bytes(samples),
            backward_peak=form.backward.peak_bytes.bytes(samples) + saved - left,
            host=host,
        )

    @classmethod
    def least(cls, segment: Segment, span: GatherSpan, samples: int, choices: Iterable[Activations]) -> SegmentBytes:
        """Return the least of each term over these choices of activations."""
        forms = [cls.of(segment, span, samples, activations) for activations in choices]
        return cls(**{name: min(getattr(form, name) for form in forms) for name in cls.__slots__})


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


def estimate_memory(
    description: ModelDescription, layouts: Sequence[UnitLayout], world_size: int, job: TrainingJob, batch: Batch
) -> MemoryEstimate:
    """Return every moment of one optimizer step on the fullest rank; `layouts` has one layout per unit, in the
    description's order.
    """
    away = any(layout.away for layout in layouts)
    unit_terms = partial(unit_bytes, world_size=world_size, job=job, batch=batch, beside_host=away)
    pairs = zip(range(len(description.units)), layouts, strict=True)
    units = [*starmap(once_per_shape(description.units, unit_terms), pairs)]
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
    host_bytes = sum(unit.host for unit in units) + max((unit.host_moment for unit in units), default=0)
    return MemoryEstimate(
        moments=tuple(
            Moment(phase=phase, unit=unit, breakdown=MemoryBreakdown(**level))
            for phase, unit, level in _Walk(description, units, segments, job, batch).moments()
        ),
        units=tuple(units),
        segments=tuple(segments),
        host_bytes=host_bytes + sum(segment.host for segment in segments),
        communicators=communicators_of(layouts, world_size),
    )


def peak_of_terms(
    description: ModelDescription,
    units: Sequence[UnitBytes],
    segments: Sequence[SegmentBytes],
    job: TrainingJob,
    batch: Batch,
) -> int:
    """Return the peak of a step whose units and segments have these terms, which need not come from one plan."""
    return max(sum(level.values()) for _, _, level in _Walk(description, units, segments, job, batch).moments())


def combined_scratch(job: TrainingJob, scratch: Sequence[int]) -> int:
    """Return the temporaries of one optimizer step: those of all units together, or in a loop those of the largest."""
    return max(scratch, default=0) if job.optimizer.step is OptimizerStep.FOR_LOOP else sum(scratch)


def resident_bytes(description: ModelDescription, job: TrainingJob, samples: int) -> int:
    """Return the bytes that do not depend on layouts: the module's buffers, the batch, outputs that the loop holds,
    and the correction.
    """
    outputs = _held_outputs(description, job, samples)
    return _model_buffers(description, samples) + outputs + job.correction_bytes


def _model_buffers(description: ModelDescription, samples: int) -> int:
    return description.buffer_bytes + description.other_bytes + description.input_bytes.bytes(samples)


def _held_outputs(description: ModelDescription, job: TrainingJob, samples: int) -> int:
    return description.output_bytes.bytes(samples) if job.holds_outputs else 0


def first_uses(description: ModelDescription) -> dict[int, int]:
    """Return the index of each unit's first segment."""
    return {segment.unit: index for index, segment in reversed(list(enumerate(description.segments)))}


def merging_segments(description: ModelDescription, job: TrainingJob) -> dict[int, int]:
    """Return the bytes of the sum of a shared parameter's gradients, by segment: each call of the unit adds its own,
    but for the last, whose backward comes first.
    """
    found: dict[int, int] = {}
    for number, unit in enumerate(description.units):
        calls = [index for index, segment in enumerate(description.segments) if segment.unit == number]
        if nbytes := merged_gradients(unit, job):
            found |= dict.fromkeys(calls[:-1] or calls, nbytes)
    return found


def gathered_ahead(description: ModelDescription) -> tuple[int | None, ...]:
    """Return for each segment the unit whose gather is prefetched while the segment's backward computes, or None.

    FSDP2 prefetches the group whose forward ended before (`FSDPParamGroup._backward_prefetch`). The root's forward
    ends last, so that its segments are not in this order. Segments of shared weights are not in it either if one of
    the modules never runs (T5's `shared`). If all run, nothing is prefetched where the shared weights are next,
    because they are still gathered.
    """
    runs = Counter(segment.unit for segment in description.segments)
    ahead: list[int | None] = []
    before: int | None = None
    for segment in description.segments:
        ahead.append(before)
        unit = description.units[segment.unit]
        if unit.span is not GatherSpan.STEP:
            before = segment.unit
        elif unit.fqn and runs[segment.unit] >= len(unit.module_names):
            before = None
    return tuple(ahead)


class _Walk:
    """A walk through one micro-step in FSDP2's order, which records every moment."""

    def __init__(
        self,
        description: ModelDescription,
        units: Sequence[UnitBytes],
        segments: Sequence[SegmentBytes],
        job: TrainingJob,
        batch: Batch,
    ) -> None:
        self.description, self.units, self.segments, self.job = description, units, segments, job
        self.first_use = first_uses(description)
        self.whole_step = [i for i, unit in enumerate(description.units) if unit.span is GatherSpan.STEP]
        self.at_end = [i for i, unit in enumerate(description.units) if unit.reduced_at_end]
        self.merging, self.ahead = merging_segments(description, job), gathered_ahead(description)
        self.arriving = gradients_arriving(description, job)
        self.found: list[tuple[str, str, dict[str, int]]] = []
        self.level = dict.fromkeys(MemoryBreakdown.__slots__, 0)
        """Bytes by kind that are held between moments."""
        self._add(
            parameters=sum(u.parameters for u in units),
            optimizer=sum(u.optimizer for u in units),
            gradients=sum(u.gradients_held for u in units),
            gathered=sum(units[i].gathered for i in self.whole_step),
            model_buffers=_model_buffers(description, batch.micro_batch_size),
            held_outputs=_held_outputs(description, job, batch.micro_batch_size),
            correction=job.correction_bytes,
        )

    def moments(self) -> list[tuple[str, str, dict[str, int]]]:
        """Return every moment in its order: phase, unit, and bytes by kind."""
        self._forward()
        self._backward()
        self._finish()
        return self.found

    def _moment(
        self, phase: str, unit: int | None, *, activations: int = 0, gathered: int = 0, buffers: int = 0
    ) -> None:
        level = self.level.copy()
        level["activations"] += activations
        level["gathered"] += gathered
        level["buffers"] += buffers
        label = "(all)" if unit is None else self.description.units[unit].label
        self.found.append((phase, label, level))

    def _add(self, **changes: int) -> None:
        for name, nbytes in changes.items():
            self.level[name] += nbytes

    def _forward(self) -> None:
        """Record the moments of forward, and add the bytes that it leaves to the level."""
        buffer = max((self.units[i].gather_buffer for i in self.whole_step), default=0)
        for i in self.whole_step:
            if copy_out := self.units[i].copy_out:
                self._moment("forward: gather", i, gathered=buffer + copy_out)
        for index, (segment, terms) in enumerate(zip(self.description.segments, self.segments, strict=True)):
            number, unit = segment.unit, self.units[segment.unit]
            if number in self.whole_step:
                self._moment("forward", number, activations=terms.forward_peak, gathered=buffer)
            else:
                # FSDP2 frees the gather buffer of the preceding unit only after this unit has been copied out of its
                # own
                own = unit.gather_buffer + unit.gathered + unit.copy_out
                self._moment("forward: gather", number, gathered=buffer + own)
                buffer = unit.gather_buffer
                self._moment("forward", number, activations=terms.forward_peak, gathered=buffer + unit.gathered)
                if index == self.first_use[number]:
                    self._add(gathered=unit.kept)
            self._add(activations=terms.saved)

    def _backward(self) -> None:
        """Record the moments of backward, segments in reverse order."""
        segments = self.description.segments
        in_flight = 0  # reduce input of the unit whose backward ended before
        waiting: set[int] = set()
        for index in range(len(segments) - 1, -1, -1):
            number, terms, before = segments[index].unit, self.segments[index], self.ahead[index]
            unit = self.units[number]
            compute = terms.backward_peak + self.merging.get(index, 0)
            ahead = 0 if before is None else self.units[before].prefetched
            if number in self.whole_step:
                self._moment("backward", number, activations=compute, gathered=ahead, buffers=in_flight)
                self._add(activations=-terms.saved, gradients=self.arriving[index])
                continue
            own, cast = (0, 0) if unit.kept else (unit.gathered, unit.cast_buffer)
            self._moment("backward: gather", number, gathered=own + unit.prefetched, buffers=in_flight + cast)
            self._moment("backward", number, activations=compute, gathered=own + ahead, buffers=in_flight)
            self._add(activations=-terms.saved)
            if index != self.first_use[number]:
                self._add(gradients=0 if number in waiting else unit.waiting_gradients)
                waiting.add(number)
                continue
            self._add(gradients=-unit.waiting_gradients if number in waiting else 0)
            if number in self.at_end:
                self._add(gathered=own, gradients=unit.unsharded_gradients)
                continue
            self._add(gathered=-unit.kept)
            self._reduce(
                "backward: reduce",
                number,
                unit.gradients_after,
                unit.unsharded_gradients,
                gathered=ahead,
                activations=terms.gradient,
            )
            in_flight = unit.reduce_tail
        idle = set(self.whole_step) - {segment.unit for segment in segments}
        self._add(gradients=sum(self.units[i].unsharded_gradients for i in idle))

    def _reduce(
        self, phase: str, number: int, left: int, whole: int = 0, *, gathered: int = 0, activations: int = 0
    ) -> None:
        """Record a reduction that adds `left` bytes of gradients; `whole` are bytes of unreduced gradients that are
        not in the level.
        """
        unit = self.units[number]
        filled, buffers = unit.reduce_input + unit.reduce_copy, unit.reduce_input + unit.reduce_work
        self._moment(phase, number, activations=activations + whole, gathered=gathered, buffers=filled)
        self._add(gradients=left, buffers=unit.reduced_after)
        self._moment(phase, number, activations=activations, gathered=gathered, buffers=buffers)

    def _finish(self) -> None:
        """Record the last reductions and the optimizer step."""
        running = {segment.unit for segment in self.description.segments} - set(self.at_end)
        self._add(gradients=sum(self.units[i].gradients_settled for i in running))
        for number in self.at_end:
            unit = self.units[number]
            self._add(gathered=-unit.gathered, gradients=-unit.joined)
            self._reduce("reduce", number, unit.left_at_end)
        self.level["buffers"] = 0
        scratch = combined_scratch(self.job, [unit.step_scratch for unit in self.units])
        self._moment("optimizer step", None, buffers=max(scratch, *(unit.states_passing for unit in self.units), 0))
