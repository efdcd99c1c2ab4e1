"""Correct estimates by a simulation or a measurement of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..description import ModelDescription, PhaseCost
from ..hardware import CollectiveTiming, Hardware
from ..plan import Plan
from ..training_job import TrainingJob
from .evaluate import estimate_plan
from .timing import estimate_time, phase_affine

_LEAST_FACTOR, _MOST_FACTOR = 0.05, 20.0
"""Bounds of the compute factor; a larger error has another cause than the rate of compute."""
_HALVINGS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Errors of an estimate, which correct the next one."""

    extra_bytes: int = 0
    """Observed minus estimated peak of the same plan."""
    compute_factor: float = 1.0
    """Observed divided by estimated compute time of a step."""
    timings: tuple[CollectiveTiming, ...] = ()
    """Observed collectives; they replace timings with the same `key`."""

    def of_job(self, job: TrainingJob) -> TrainingJob:
        """Return the job with the extra bytes added at every moment, on top of earlier corrections."""
        return replace(job, correction_bytes=job.correction_bytes + self.extra_bytes)

    def of_hardware(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the observed collectives, which take precedence."""
        seen = {timing.key for timing in self.timings}
        return replace(
            hardware, timings=(*self.timings, *(timing for timing in hardware.timings if timing.key not in seen))
        )

    def of_description(self, description: ModelDescription, hardware: Hardware) -> ModelDescription:
        """Return the description with every phase's time on this hardware multiplied by the factor."""

        def scaled(phase: PhaseCost) -> PhaseCost:
            work = phase_affine(phase, description, hardware)  # operators too, because a GPU may wait for their launch
            seconds, operators = (part.scaled(self.compute_factor, constants=True) for part in (work, phase.operators))
            return replace(phase, seconds=seconds, operators=operators)

        segments = (
            segment.each(lambda costs: replace(costs, forward=scaled(costs.forward), backward=scaled(costs.backward)))
            for segment in description.segments
        )
        return replace(description, segments=tuple(segments))


def correction_of(
    plan: Plan,
    description: ModelDescription,
    hardware: Hardware,
    job: TrainingJob,
    *,
    peak_bytes: int | None,
    step_s: float | None,
    timings: Sequence[CollectiveTiming] = (),
) -> Correction:
    """Return the correction that follows from an observation of a plan.

    The peak gives `extra_bytes`. With the observed collectives, the compute factor solves  step(factor) = step_s;
    step rises with the factor, exposed communication included.

    Args:
        plan: the plan that was observed.
        description: the description from which the plan was made, earlier corrections included.
        hardware: the hardware, likewise.
        job: the training job, likewise.
        peak_bytes: observed peak; None if not observed.
        step_s: observed step time; None if not observed.
        timings: observed collectives.
    """
    extra_bytes = 0 if peak_bytes is None else peak_bytes - estimate_plan(plan, description, job).memory.peak_bytes
    observed = Correction(extra_bytes=extra_bytes, timings=tuple(timings))
    if step_s is None:
        return observed
    layouts, batch, measured = plan.layouts(description), plan.batch, observed.of_hardware(hardware)

    def seconds(factor: float) -> float:
        scaled = replace(observed, compute_factor=factor).of_description(description, hardware)
        return estimate_time(scaled, layouts, measured, job, batch).step_s

    low, high = _LEAST_FACTOR, _MOST_FACTOR
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) < step_s else (low, middle)
    return replace(observed, compute_factor=(low * high) ** 0.5)
