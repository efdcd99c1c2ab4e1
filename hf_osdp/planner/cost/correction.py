"""Correct estimates by what a simulation or a measurement of a plan has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..description import ModelDescription, PhaseCost
from ..hardware import CollectiveTiming, Hardware
from ..job import TrainingJob
from ..plan import Plan
from .evaluate import estimate_plan
from .timing import estimate_time, phase_affine

_LEAST_FACTOR, _MOST_FACTOR = 0.05, 20.0
"""Compute that is further off than this has another cause than a rate: the factor stops here."""
_HALVINGS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How far an estimate was off, as far as the next one can be mended by it."""

    extra_bytes: int = 0
    """Observed less estimated peak of the same plan."""
    compute_factor: float = 1.0
    """Observed over estimated compute time of a step."""
    timings: tuple[CollectiveTiming, ...] = ()
    """Collectives as they were observed; they replace those of the same kind, group size and place."""

    def of_job(self, job: TrainingJob) -> TrainingJob:
        """Return the job with the extra bytes at every moment; what an earlier correction added stays."""
        return replace(job, correction_bytes=job.correction_bytes + self.extra_bytes)

    def of_hardware(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the observed collectives before those it had."""
        seen = {timing.key for timing in self.timings}
        return replace(hardware, timings=(*self.timings, *(timing for timing in hardware.timings if timing.key not in seen)))

    def of_description(self, description: ModelDescription, hardware: Hardware) -> ModelDescription:
        """Return the description with every phase's time on this hardware scaled by the factor."""

        def scaled(phase: PhaseCost) -> PhaseCost:
            work = phase_affine(phase, description, hardware)  # and operators, which a GPU may wait for
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
    """Return the correction that an observation of a plan gives, to be applied to the same description, hardware and job.

    The peak gives `extra_bytes`. Collectives count as observed; the compute factor is the one with which the estimated step
    then takes as long as the observed one:  step(factor) = step_s, and step rises with factor, exposed communication included.

    Description, hardware and job are what the plan was made from, with earlier corrections in them; an observation that is None says
    nothing.
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
