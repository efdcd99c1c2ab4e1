"""Seconds of one optimizer step, by unit and by kind of work; docs/planner.md has the equations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from ..affine import Affine
from ..decision import Batch, UnitLayout
from ..description import GatherSpan, ModelDescription, PhaseCost, UnitDescription
from ..hardware import Collective, Hardware
from ..placement import Activations
from ..token_budget import TokenBudget
from ..training_job import TrainingJob
from .collectives import TWO_STAGE
from .placement import NO_TRANSFER, HostTransfer, host_transfers
from .units import UnitSeconds, once_per_shape, queue_seconds, unit_seconds

_LARGE = 2**16
"""Samples of a micro-batch that waits for nothing but compute."""
_LEAST_OF_TOKEN_S = 1e-12
"""Seconds of a token where they are too few to be known."""
ACTIVATIONS = "activations"
"""The stream that copies activations to the host and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Compute that a unit's communication can overlap, in seconds of one micro-step."""

    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTime:
    """Seconds of one unit in one optimizer step."""

    compute_s: float
    communication_s: float
    """All collectives and host copies, overlapped or not."""
    exposed_s: float
    """The part of communication that compute waits for."""
    copy_s: float
    optimizer_s: float
    update_gathers_s: float = 0.0
    """The part of `optimizer_s` in which updates of matrices are gathered."""
    issued_s: float = 0.0
    """The CPU's seconds to issue everything to a GPU, and `optimizer_s`, which follows; 0 if no plan waits for it."""
    waits_s: float = 0.0
    """The part of `compute_s` in which a GPU waits for the CPU to issue work."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.copy_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Seconds of one optimizer step by unit; units are in the description's order."""

    units: tuple[UnitTime, ...]

    @property
    def step_s(self) -> float:
        return sum(unit.total_s for unit in self.units)

    def total(self, term: str) -> float:
        """Return the sum of one term over the units, for example `total("exposed_s")`."""
        return float(sum(getattr(unit, term) for unit in self.units))


def step_seconds(units: Sequence[UnitTime]) -> float:
    """Return the seconds of a step: a GPU works while the CPU issues what follows, and the longer of both counts."""
    return max(sum(unit.total_s for unit in units), sum(unit.issued_s for unit in units))


def phase_affine(phase: PhaseCost, description: ModelDescription, hardware: Hardware) -> Affine:
    """Return the seconds of a phase on one device as a function of samples: as measured, else by a roofline, on the
    CPU plus dispatch.
    """
    if phase.seconds is not None:
        return phase.seconds
    device = hardware.device
    parts = (
        (phase.matmul_flops, 1 / device.rate(description.compute_dtype)),
        (phase.attention_flops, 1 / device.attention_rate(description.compute_dtype)),
        (phase.product_bytes, device.product_traffic / device.memory_bytes_per_s),
        (phase.traffic_bytes, 1 / device.memory_bytes_per_s),
        (phase.operators, 0.0 if hardware.backend.overlaps else device.operator_s),
    )
    return Affine(
        constant=sum(part.constant * seconds for part, seconds in parts),
        per_sample=sum(part.per_sample * seconds for part, seconds in parts),
    )


def unit_work(
    description: ModelDescription, hardware: Hardware, samples: float, activations: Activations = Activations.SAVE
) -> tuple[tuple[float, ...], tuple[Windows, ...]]:
    """Return each unit's forward and backward compute in one micro-step, and the compute that its communication can
    overlap.

    `activations` is the choice of the unit itself; the forward of the preceding segment counts as if everything were
    saved. The first segment has no preceding one, so that its gather in forward overlaps nothing.
    """

    def seconds(phase: PhaseCost) -> float:
        return max(0.0, phase_affine(phase, description, hardware)(samples))

    compute_s = [0.0] * len(description.units)
    windows = [Windows() for _ in description.units]
    before = 0.0
    for segment in description.segments:
        own = segment.under(activations.recomputation)
        forward, backward = seconds(own.forward), seconds(own.backward)
        compute_s[segment.unit] += forward + backward
        if hardware.backend.overlaps and description.units[segment.unit].span is GatherSpan.USE:
            windows[segment.unit] = Windows(forward=before, backward=backward)
        before = seconds(segment.forward)
    return tuple(compute_s), tuple(windows)


def issue_seconds(
    description: ModelDescription, hardware: Hardware, samples: float, activations: Activations
) -> tuple[float, ...]:
    """Return the CPU's seconds to issue each unit's operators in one micro-step."""
    operators = [0.0] * len(description.units)
    for segment in description.segments:
        own = segment.under(activations.recomputation)
        operators[segment.unit] += own.forward.operators(samples) + own.backward.operators(samples)
    return tuple(number * hardware.device.operator_s for number in operators)


class UnitTimer:
    """Time of each unit of a description in an optimizer step, which does not depend on the layouts of other units."""

    def __init__(self, description: ModelDescription, hardware: Hardware, job: TrainingJob, batch: Batch) -> None:
        if job.lengths is not None:
            batch = job.lengths.expected(batch, hardware.world_size)
        self._description, self._hardware, self._job, self._batch = description, hardware, job, batch
        samples = batch.micro_batch_size
        self.terms = once_per_shape(description.units, partial(unit_seconds, hardware=hardware, job=job))
        self.transfers = cache(partial(host_transfers, description, hardware, samples))
        """`host_transfers` by choice of activations."""
        self.work = cache(partial(unit_work, description, hardware, samples))
        """`unit_work` by choice of activations, without what is on the host."""
        self._operators = cache(partial(issue_seconds, description, hardware, samples))
        self._queue = once_per_shape(description.units, self._queue_of)
        self._run = {segment.unit for segment in description.segments}
        self._may_wait = hardware.backend.overlaps and self._plans_may_wait()

    def _plans_may_wait(self) -> bool:
        """Return whether the CPU may need longer to issue a micro-step of some plan than the device computes."""
        policies = {one.recomputation: None for segment in self._description.segments for one in segment.recomputed}
        kept = [Activations(recomputation=policy) for policy in (None, *policies)]
        issued_s, done_s = 0.0, 0.0
        for index in range(len(self._description.units)):
            layouts = [
                UnitLayout(shard_size=size, reshard_after_forward=True, activations=one)
                for size in {1, self._hardware.world_size}
                for one in kept
            ]
            issued_s += max(self._issued(index, layout) for layout in layouts)
            done_s += min(self.work(one)[0][index] for one in kept)
        return issued_s > done_s

    def _issued(self, index: int, layout: UnitLayout) -> float:
        """Return the CPU's seconds to issue a unit's micro-step; a unit that never runs is not gathered."""
        return self._operators(_on_device(layout))[index] + self._queue(index, layout) if index in self._run else 0.0

    def _queue_of(self, unit: UnitDescription, layout: UnitLayout) -> float:
        layout = replace(layout, reshard_after_forward=unit.span.reshards(layout.reshard_after_forward))
        return queue_seconds(unit, layout, self._hardware, self._job, self._batch)

    def __call__(self, index: int, layout: UnitLayout) -> UnitTime:
        """Return the seconds of a unit under a layout, without waits for the CPU."""
        compute_s, windows, transfer = self._parts(index, layout)
        time = unit_time(self.terms(index, layout), layout, windows, compute_s, self._batch, transfer)
        if not self._may_wait:
            return time
        issued_s = self._batch.accumulation_steps * self._issued(index, layout)
        return replace(time, issued_s=issued_s + time.optimizer_s)

    def estimate(self, layouts: Sequence[UnitLayout]) -> TimeEstimate:
        """Return the seconds of a step, by unit and kind; `layouts` has one layout per unit, in the description's
        order. A wait for the CPU is divided among units in proportion to what it issues for them.
        """
        units = tuple(map(self, range(len(layouts)), layouts))
        waits_s = step_seconds(units) - sum(unit.total_s for unit in units)
        if waits_s <= 0:
            return TimeEstimate(units=units)
        issued_s = sum(unit.issued_s for unit in units)
        shares = [waits_s * unit.issued_s / issued_s for unit in units]
        return TimeEstimate(
            units=tuple(
                replace(unit, compute_s=unit.compute_s + share, waits_s=share)
                for unit, share in zip(units, shares, strict=True)
            )
        )

    def streams(self, layouts: Sequence[UnitLayout]) -> dict[str, tuple[float, float]]:
        """Return seconds of a step in each collective and in copies (`ACTIVATIONS`), all and exposed; what a unit's
        collectives expose together is divided among them in proportion to their time.
        """
        totals = dict.fromkeys((*Collective, ACTIVATIONS), (0.0, 0.0))
        for index, layout in enumerate(layouts):
            _, windows, transfer = self._parts(index, layout)
            terms = self.terms(index, layout)
            for times, hidden_s, seconds in overlaps_of(terms, layout, windows, self._batch, transfer):
                whole_s = sum(seconds.values())
                share = max(0.0, whole_s - hidden_s) / whole_s if whole_s else 0.0
                for name, own_s in seconds.items():
                    total_s, exposed_s = totals[name]
                    totals[name] = total_s + times * own_s, exposed_s + times * own_s * share
        return totals

    def _parts(self, index: int, layout: UnitLayout) -> tuple[float, Windows, HostTransfer]:
        compute_s, windows = self.work(_on_device(layout))
        return compute_s[index], windows[index], self.transfers(layout.activations)[index]


def _on_device(layout: UnitLayout) -> Activations:
    """Return a layout's choice of activations without what is on the host."""
    return Activations(recomputation=layout.activations.recomputation)


class Overlap(NamedTuple):
    """Collectives and copies of a unit that run together, so many times in a step, each time beside `hidden_s` of
    compute.
    """

    times: float
    hidden_s: float
    seconds: Mapping[str, float]
    """Seconds of one time, by collective, and of copies (`ACTIVATIONS`)."""


def overlaps_of(
    terms: UnitSeconds, layout: UnitLayout, windows: Windows, batch: Batch, transfer: HostTransfer = NO_TRANSFER
) -> Iterator[Overlap]:
    """Yield a unit's communication in an optimizer step, in the order of a step."""
    (gather, scatter), reduce = TWO_STAGE.values() if layout.two_stage else TWO_STAGE.keys(), Collective.ALL_REDUCE
    steps, early_s = batch.accumulation_steps, terms.reduce_scatter if batch.reduce_scatters(layout) > 1 else 0.0
    back = {gather: terms.gather_backward, ACTIVATIONS: transfer.back_beside}
    yield Overlap(steps, windows.forward, {gather: terms.gather_forward, ACTIVATIONS: transfer.out})
    yield Overlap(steps, 0.0, {ACTIVATIONS: transfer.back_before})
    yield Overlap(steps - 1, windows.backward, {**back, scatter: early_s})
    yield Overlap(1, windows.backward, {**back, scatter: terms.reduce_scatter, reduce: terms.all_reduce})


def unit_time(
    terms: UnitSeconds,
    layout: UnitLayout,
    windows: Windows,
    compute_s: float,
    batch: Batch,
    transfer: HostTransfer = NO_TRANSFER,
) -> UnitTime:
    """Return one unit's time in an optimizer step, from the terms of its layout."""
    found = [
        (times, sum(seconds.values()), hidden_s)
        for times, hidden_s, seconds in overlaps_of(terms, layout, windows, batch, transfer)
    ]
    return UnitTime(
        compute_s=batch.accumulation_steps * compute_s,
        communication_s=sum(times * whole for times, whole, _ in found),
        exposed_s=sum(times * max(0.0, whole - hidden_s) for times, whole, hidden_s in found),
        copy_s=batch.accumulation_steps * (terms.copy_forward + terms.copy_backward + transfer.traffic),
        optimizer_s=terms.optimizer,
        update_gathers_s=terms.update_gathers,
    )


def estimate_time(
    description: ModelDescription, layouts: Sequence[UnitLayout], hardware: Hardware, job: TrainingJob, batch: Batch
) -> TimeEstimate:
    """Return the seconds of one optimizer step, as `UnitTimer.estimate`."""
    return UnitTimer(description, hardware, job, batch).estimate(layouts)


def price_micro_batches(
    description: ModelDescription, layouts: Sequence[UnitLayout], hardware: Hardware, job: TrainingJob
) -> TokenBudget:
    """Return a budget of one longest row, with what a micro-batch costs under these layouts beside its tokens.

    Its seconds are a line where it is large, and more than that where a small one waits for the CPU or for gathers.
    """
    longest = description.sequence_length

    def seconds(samples: int) -> float:
        two, three = (
            estimate_time(description, layouts, hardware, replace(job, lengths=None), batch).step_s
            for batch in (Batch(micro_batch_size=samples, accumulation_steps=steps) for steps in (2, 3))
        )
        return three - two

    large = [seconds(samples) for samples in (_LARGE, 2 * _LARGE)]
    of_token = max((large[1] - large[0]) / (_LARGE * longest), _LEAST_OF_TOKEN_S)
    fixed = max(0.0, 2 * large[0] - large[1])
    least = max(0.0, seconds(0) - fixed)
    return TokenBudget(
        tokens=longest, shortest=longest, longest=longest, overhead=round(fixed / of_token),
        least=round(least / of_token),
    )  # fmt: skip
