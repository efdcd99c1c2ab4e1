"""What a simulation or a measurement of a plan teaches about the plans to come."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .description import Affine, ModelDescription, PhaseCost
from .hardware import CollectiveTiming, Hardware
from .job import TrainingJob
from .timing import phase_affine


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How far an estimate was off, as far as the next one can be mended by it."""

    extra_bytes: int = 0
    """Observed less estimated peak of the same plan."""
    compute_factor: float = 1.0
    """Observed over estimated compute time of a step."""
    timings: tuple[CollectiveTiming, ...] = ()
    """Collectives as they were observed; they replace those of the same kind and group size."""

    def __post_init__(self) -> None:
        if not 0 < self.compute_factor < float("inf"):
            raise ValueError(f"compute_factor={self.compute_factor} must be positive and finite.")

    def of_job(self, job: TrainingJob) -> TrainingJob:
        """The job, with the extra bytes at every moment; what an earlier correction added stays."""
        return replace(job, correction_bytes=job.correction_bytes + self.extra_bytes)

    def of_hardware(self, hardware: Hardware) -> Hardware:
        """The hardware, with the observed collectives before those it had."""
        seen = {(timing.collective, timing.group_size) for timing in self.timings}
        kept = (timing for timing in hardware.timings if (timing.collective, timing.group_size) not in seen)
        return replace(hardware, timings=(*self.timings, *kept))

    def of_description(self, description: ModelDescription, hardware: Hardware) -> ModelDescription:
        """The description, with every phase's time on this hardware scaled by the factor."""

        def scaled(phase: PhaseCost) -> PhaseCost:
            line = phase_affine(phase, description, hardware)
            factor = self.compute_factor
            return replace(phase, seconds=Affine(constant=factor * line.constant, per_sample=factor * line.per_sample))

        segments = (replace(s, forward=scaled(s.forward), backward=scaled(s.backward)) for s in description.segments)
        return replace(description, segments=tuple(segments))
