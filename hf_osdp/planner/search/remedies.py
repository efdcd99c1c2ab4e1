"""The error where no plan fits, with changes that would make a plan fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...errors import HardwareError, InfeasibleError, Price, Remedy
from ...quantities import format_bytes
from ..cost.memory import MemoryEstimate
from ..description import ModelDescription, Segment
from ..optimizers import SMALL_STATES
from ..placement import HOST_OPTIONS, STATE_OPTIONS
from ..plan import Plan
from ..problem import PlanningProblem, Strategy
from ..training_job import OptimizerSpec, Precision
from .candidates import Candidate, all_candidates

_FACTORS = (2, 4, 8)
"""Factors tried for more devices and for shorter sequences."""
_SIZES = ("saved_bytes", "own_saved_bytes", "sent_bytes", "gradient_bytes", "kept_bytes", "arrival_bytes")


def infeasible_error(problem: PlanningProblem, least: Plan, memory: MemoryEstimate) -> InfeasibleError:
    """Return the error with the tightest possible limit, the two largest parts of the `least` plan's peak, and
    remedies.
    """
    hardware, limit, room = problem.hardware, problem.memory_limit_bytes, problem.room_bytes
    peak, needed_bytes = memory.peak, memory.on(hardware)
    kinds = {name: getattr(peak.breakdown, name) for name in peak.breakdown.__slots__} | memory.outside(hardware)
    two = sorted(((nbytes, name) for name, nbytes in kinds.items()), reverse=True)[:2]
    largest = ", ".join(f"{name} {format_bytes(nbytes)}" for nbytes, name in two)
    enough = hardware.limit_for(needed_bytes)
    size = format_bytes(_rounded_up(enough))
    more_memory = Remedy(f"devices of {size}", price=Price.MEMORY)
    left = hardware.device.memory_bytes - hardware.beside_bytes
    if left < enough <= hardware.device.memory_bytes:
        more_memory = Remedy(f"{format_bytes(enough - left)} less for other programs (beside)", price=Price.MEMORY)
    elif enough <= left:
        more_memory = Remedy(f"a memory limit of {size}", f"--memory-limit {size.replace(' ', '')}", Price.MEMORY)
    ways = (*_remedies(problem), more_memory)
    margin = f", of which a margin of {format_bytes(limit - room)} stays free" if limit > room else ""
    missing = needed_bytes - room
    more = (
        f" ({missing:,} byte{'s' if missing > 1 else ''} more)"
        if format_bytes(needed_bytes) == format_bytes(room)
        else ""
    )
    message = (
        f"No plan fits {format_bytes(limit)} per device{margin}: the least that {problem.strategy.value} needs on"
        f" {hardware.world_size}"
        f" device{'s' if hardware.world_size > 1 else ''} is {format_bytes(needed_bytes)}{more}, at micro-batch size"
        f" {least.micro_batch_size} in {peak.phase} of {peak.unit} ({largest})."
    )
    return InfeasibleError(message, memory_limit_bytes=limit, least_peak_bytes=enough, remedies=ways)


def _remedies(problem: PlanningProblem) -> Iterator[Remedy]:
    """Yield changes with which some plan fits, as phrases that complete "Use ..."."""
    description, job = problem.description, problem.job
    yield from _settings(problem)
    # bf16 halves the bytes of activations and gradients
    half = replace(
        problem,
        description=_scaled(description, 0.5, constants=True),
        job=replace(job, precision=Precision.named("bf16")),
    )
    if job.precision.compute is None and fits_by_estimate(half):
        how = "(estimated from the float32 trace)"
        yield Remedy(f"mixed_precision bf16 {how}", f"--precision bf16 {how}")
    for factor in _FACTORS:
        length = description.sequence_length // factor  # activations shrink at least in this proportion
        shorter = replace(_scaled(description, 1 / factor), sequence_length=max(1, length))
        if length >= 1 and fits_by_estimate(replace(problem, description=shorter)):
            yield Remedy(f"sequence length {length}", f"--sequence-length {length}", Price.SIZE)
            break
    yield from _more_devices(problem)


def _more_devices(problem: PlanningProblem) -> Iterator[Remedy]:
    """Yield the fewest devices on which some plan fits: with the same global batch if they can share it."""
    hardware, job = problem.hardware, problem.job
    alone = hardware.world_size == 1
    for factor in _FACTORS:
        try:
            more = (
                hardware.scaled(devices_per_node=factor) if alone else hardware.scaled(nodes=hardware.nodes * factor)
            )
        except HardwareError:
            return  # links are unknown: the machine was measured alone
        flags = f"--devices-per-node {more.devices_per_node}" if alone else f"--num-nodes {more.nodes}"
        for samples in (job.global_batch_size, factor * job.global_batch_size):
            if samples % more.world_size:
                continue
            if fits_by_estimate(replace(problem, hardware=more, job=replace(job, global_batch_size=samples))):
                other = samples != job.global_batch_size
                yield Remedy(
                    f"{more.world_size} devices" + f" with a global batch of {samples}" * other,
                    flags + f" --global-batch-size {samples}" * other,
                    Price.DEVICES,
                )
                return


def _settings(problem: PlanningProblem) -> Iterator[Remedy]:
    """Yield settings of the user that exclude every plan, as phrases for the change that lets some plan fit."""
    job = problem.job
    if problem.strategy is not Strategy.OSDP and fits_by_estimate(replace(problem, strategy=Strategy.OSDP)):
        yield Remedy("strategy osdp, which fits", "--strategy osdp, which fits")
    changes: list[tuple[Remedy, bool, dict[str, Any]]] = [
        (
            Remedy(f"{name} left to the planner", f"no flag --no-{name.replace('_', '-')}"),
            getattr(job, name) is False and (name == "recompute" or problem.hardware.host is not None),
            {name: None},
        )
        for name in ("recompute", *HOST_OPTIONS)
    ]
    if job.micro_batch_size is not None:
        changes.append(
            (Remedy("a micro-batch of 1", "--micro-batch-size 1"), job.micro_batch_size > 1, {"micro_batch_size": 1})
        )
    element_wise = {"optimizer": OptimizerSpec(step=job.optimizer.step)}
    small, small_states = SMALL_STATES
    on_device = {"optimizer": small, **dict.fromkeys(STATE_OPTIONS, False)}
    plain = job.optimizer.name == "adamw" and not set(job.asked) & set(STATE_OPTIONS)
    sharded = "an element-wise optimizer, which may be sharded"
    adamw = Remedy(f"{sharded} (optim='adamw_torch')", f"{sharded} (--optimizer adamw)")
    changes += [(adamw, job.optimizer.needs_whole, element_wise), (small_states, plain, on_device)]
    for words, possible, change in changes:
        if possible and fits_by_estimate(replace(problem, job=replace(job, **change))):
            yield words


def fits_by_estimate(problem: PlanningProblem) -> bool:
    """Return whether the frugal plan of the smallest micro-batch fits, or else that with the lowest peak, where this
    may be low enough; both take far less time than a search.
    """
    limit = problem.hardware.tensor_bytes(problem.memory_limit_bytes)

    def fits(candidate: Candidate) -> bool:
        lower = candidate.floor_bytes <= limit
        return candidate.fits(candidate.frugal(), limit) or (lower and candidate.least(limit + 1) is not None)

    try:
        return any(map(fits, all_candidates(problem, smallest=True)))
    except ValueError:
        return False


def _rounded_up(nbytes: int) -> int:
    """Return the bytes rounded up to the printed precision (0.1 MiB, 0.1 GiB or 0.01 TiB), so that the printed
    limit is enough.
    """
    step = 2**40 / 100 if nbytes >= 2**40 else (2**30 if nbytes >= 2**30 else 2**20) / 10
    return int(-(-nbytes // step) * step) + 1


def _scaled(description: ModelDescription, factor: float, *, constants: bool = False) -> ModelDescription:
    """Return the description with activations and gradients of `factor` times the size."""

    def scaled(costs: Segment) -> Segment:
        changed: dict[str, Any] = {name: getattr(costs, name).scaled(factor, constants=constants) for name in _SIZES}
        for name, phase in (("forward", costs.forward), ("backward", costs.backward)):
            changed[name] = phase.with_peaks(lambda peak: peak.scaled(factor, constants=constants))
        return replace(costs, **changed)

    return replace(description, segments=tuple(segment.each(scaled) for segment in description.segments))
