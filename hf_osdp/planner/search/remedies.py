"""What would make an infeasible plan fit, the cheapest change first."""

from __future__ import annotations

from dataclasses import replace

from ...errors import HardwareError
from ...quantities import format_bytes
from ..cost.memory import estimate_memory
from ..description import ModelDescription, PhaseCost, Segment
from ..hardware import Hardware
from ..job import Precision, TrainingJob
from ..problem import PlanningProblem, Strategy
from .bounds import frugal_choices, in_order, peak_floor
from .solver import any_within
from .strategies import batches, search_spaces
from .timeline import build_line

_MORE_DEVICES = (2, 4, 8, 16, 32, 64)
_SHORTER = (2, 4, 8)


def remedies_for(problem: PlanningProblem, *, limit_bytes: int, needed_bytes: int) -> list[str]:
    """Return changes after which some plan fits the limit, as phrases that complete "Use ...".

    Those that cost nothing but a setting come first: another strategy, mixed precision, a shorter sequence, then more
    devices, then more memory.

    Args:
        problem: what nothing fits.
        limit_bytes: of its limit, what estimates may fill; less than its own where the allocator's gaps are known.
        needed_bytes: the least that any plan needs.
    """
    description, hardware, job, strategy = problem.description, problem.hardware, problem.job, problem.strategy
    fits = _Fits(limit_bytes)
    ways = []
    if strategy is not Strategy.OSDP and fits(description, hardware, job, Strategy.OSDP):
        ways.append("strategy osdp, which fits")
    for name in ("recompute", "host_offload", "offload_activations"):
        if getattr(job, name) is False and fits(description, hardware, replace(job, **{name: None}), strategy):
            ways.append(f"{name} left to the planner")
    half = replace(job, precision=Precision.named("bf16"))
    if job.precision.compute is None and fits(_in_half(description), hardware, half, strategy):
        ways.append("mixed_precision bf16 (estimated from the float32 trace)")
    for factor in _SHORTER:
        length = description.sequence_length // factor
        if length >= 1 and fits(_shortened(description, factor), hardware, job, strategy):
            ways.append(f"sequence length {length}")
            break
    for factor in _MORE_DEVICES:
        try:
            more = hardware.scaled(devices_per_node=factor) if hardware.world_size == 1 else hardware.scaled(nodes=hardware.nodes * factor)
        except HardwareError:
            break  # a machine that was measured alone says nothing about links
        grown = replace(job, global_batch_size=job.global_batch_size * factor)
        if fits(description, more, grown, strategy):
            ways.append(f"{more.world_size} devices with a global batch of {grown.global_batch_size}")
            break
    ways.append(f"a memory limit of {format_bytes(_rounded_up(hardware.limit_for(needed_bytes)))}")
    return ways


def fits_by_estimate(problem: PlanningProblem) -> bool:
    """Return whether some plan stays within the limit by its estimate; quicker than searching for the best one."""
    return _Fits(problem.memory_limit_bytes)(problem.description, problem.hardware, problem.job, problem.strategy)


class _Fits:
    """Whether some plan stays within the limit."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes

    def __call__(self, description: ModelDescription, hardware: Hardware, job: TrainingJob, strategy: Strategy) -> bool:
        limit = hardware.tensor_bytes(self.limit_bytes)
        smallest_first = list(batches(job, hardware.world_size))[::-1]
        try:
            return any(
                self._line_fits(description, hardware, job, batch, build_line(description, hardware, job, batch, space), limit)
                for batch in smallest_first
                for space in search_spaces(strategy, description, hardware, job, batch)
            )
        except ValueError:
            return False

    @staticmethod
    def _line_fits(description, hardware, job, batch, line, limit: int) -> bool:
        if peak_floor(description, line, job, batch) > limit:
            return False
        frugal = frugal_choices(line)
        memory = estimate_memory(description, in_order(frugal), hardware.world_size, job, batch)
        if memory.on(hardware) - hardware.unavoidable_bytes <= limit and line.fits_host(frugal):
            return True
        return any_within(line, job, limit) is not None


def _rounded_up(nbytes: int) -> int:
    """To the next tenth of a MiB or GiB, or hundredth of a TiB, as it is printed, so that what is printed suffices."""
    step = 2**40 / 100 if nbytes >= 2**40 else (2**30 if nbytes >= 2**30 else 2**20) / 10
    return int(-(-nbytes // step) * step) + 1


def _shortened(description: ModelDescription, factor: int) -> ModelDescription:
    """Activations shrink at least in proportion to the sequence."""
    return replace(
        description,
        sequence_length=max(1, description.sequence_length // factor),
        segments=tuple(_scaled(segment, 1 / factor) for segment in description.segments),
    )


def _in_half(description: ModelDescription) -> ModelDescription:
    """A float32 trace as it would be in 16 bit: half the bytes of activations and gradients."""
    return replace(description, segments=tuple(_scaled(segment, 0.5, constants=True) for segment in description.segments))


def _scaled(segment: Segment, factor: float, *, constants: bool = False) -> Segment:
    def phase(cost: PhaseCost) -> PhaseCost:
        return replace(cost, peak_bytes=cost.peak_bytes.scaled(factor, constants=constants))

    def scaled(costs: Segment) -> Segment:
        return replace(
            costs,
            saved_bytes=costs.saved_bytes.scaled(factor, constants=constants),
            own_saved_bytes=costs.own_saved_bytes.scaled(factor, constants=constants),
            sent_bytes=costs.sent_bytes.scaled(factor, constants=constants),
            gradient_bytes=costs.gradient_bytes.scaled(factor, constants=constants),
            forward=phase(costs.forward),
            backward=phase(costs.backward),
        )

    return segment.each(scaled)
