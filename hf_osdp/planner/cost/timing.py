"""Seconds of one optimizer step, by unit and by kind of work; docs/planner.md has the equations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from ..affine import Affine
from ..decision import Batch, UnitLayout
from ..description import GatherSpan, ModelDescription, PhaseCost, Recomputation, UnitDescription
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


def phases(
    description: ModelDescription, hardware: Hardware, samples: float, activations: Activations
) -> list[tuple[float, float]]:
    """Return the device's seconds and the CPU's seconds to issue them, of each segment's forward and backward in turn;
    all units have the same choice of activations.
    """
    costs = (segment.under(activations.recomputation) for segment in description.segments)
    return [
        (
            max(0.0, phase_affine(phase, description, hardware)(samples)),
            phase.operators(samples) * hardware.device.operator_s,
        )
        for segment in costs
        for phase in (segment.forward, segment.backward)
    ]


def passes(
    description: ModelDescription,
    hardware: Hardware,
    work: Sequence[tuple[float, float]],
    queued: Sequence[tuple[float, float]],
) -> list[tuple[float, float]]:
    """Return the seconds of each segment's forward and backward in one micro-step, including time in which a GPU waits
    for the CPU.

    `work` is that of `phases`. `queued` has the CPU's seconds for each unit beside its operators, which may be below 0
    where other work of the device leaves the CPU time.
    """
    if not hardware.backend.overlaps:
        return [(forward, backward) for (forward, _), (backward, _) in zip(work[::2], work[1::2], strict=True)]
    left = dict(enumerate(queued))
    more = [s for segment in description.segments for s in left.pop(segment.unit, (0.0, 0.0))]
    issued = [issue_s + more_s for (_, issue_s), more_s in zip(work, more, strict=True)]
    lacking = [max(0.0, issue_s - done) for issue_s, (done, _) in zip(issued, work, strict=True)]
    share = max(0.0, sum(issued) - sum(done for done, _ in work)) / (sum(lacking) or 1.0)
    seconds = [done + share * lack for (done, _), lack in zip(work, lacking, strict=True)]
    return list(zip(seconds[::2], seconds[1::2], strict=True))


def unit_work(
    description: ModelDescription,
    hardware: Hardware,
    samples: float,
    activations: Activations = Activations.SAVE,
    queued: Sequence[tuple[float, float]] = (),
    *,
    timed: Callable[[Activations], list[tuple[float, float]]] | None = None,
) -> tuple[tuple[float, ...], tuple[Windows, ...]]:
    """Return each unit's forward and backward compute in one micro-step, and the compute that its communication can
    overlap.

    `activations` is the choice of the unit itself; the forward of the preceding segment counts as if everything were
    saved. The first segment has no preceding one, so that its gather in forward overlaps nothing. `queued` is that of
    `passes`; `timed` is a cache of `phases` by choice of activations.
    """
    timed = timed or partial(phases, description, hardware, samples)
    compute_s = [0.0] * len(description.units)
    windows = [Windows() for _ in description.units]
    before, overlaps = 0.0, hardware.backend.overlaps
    own, plain = (passes(description, hardware, timed(choice), queued) for choice in (activations, Activations.SAVE))
    for segment, (forward, backward), (saved, _) in zip(description.segments, own, plain, strict=True):
        compute_s[segment.unit] += forward + backward
        if overlaps and description.units[segment.unit].span is GatherSpan.USE:
            windows[segment.unit] = Windows(forward=before, backward=backward)
        before = saved
    return tuple(compute_s), tuple(windows)


class UnitTimer:
    """Time of each unit of a description in an optimizer step, which does not depend on the layouts of other units."""

    def __init__(self, description: ModelDescription, hardware: Hardware, job: TrainingJob, batch: Batch) -> None:
        if job.lengths is not None:
            batch = job.lengths.expected(batch, hardware.world_size)
        self._description, self._hardware, self._job, self._batch = description, hardware, job, batch
        self.terms = once_per_shape(description.units, partial(unit_seconds, hardware=hardware, job=job))
        self.transfers = cache(partial(host_transfers, description, hardware, batch.micro_batch_size))
        """`host_transfers` by choice of activations."""
        self._queued = once_per_shape(description.units, self._queue_of)
        self._timed = cache(partial(phases, description, hardware, batch.micro_batch_size))
        self._known: dict[UnitLayout, tuple[tuple[float, ...], tuple[Windows, ...]]] = {}
        self._done = cache(self._done_by_device)

    def _done_by_device(self, policy: Recomputation | None) -> list[float]:
        """Return each unit's seconds of work on the device in one micro-step."""
        work, done_s = self._timed(Activations(recomputation=policy)), [0.0] * len(self._description.units)
        for segment, (forward, _), (backward, _) in zip(
            self._description.segments, work[::2], work[1::2], strict=True
        ):
            done_s[segment.unit] += forward + backward
        return done_s

    def work(self, layout: UnitLayout) -> tuple[tuple[float, ...], tuple[Windows, ...]]:
        """Return `unit_work` as if all units were replicas or sharded, recomputed, freed and reduced by this layout;
        those that are gathered for the whole step are never freed.
        """
        # the fields that count here; with others the result would depend on which layout came first
        world_size = self._hardware.world_size
        alike = UnitLayout(
            shard_size=1 if layout.is_replica else world_size,
            reshard_after_forward=layout.reshard_after_forward,
            reduce_every_micro_step=layout.reduce_every_micro_step,
            activations=Activations(recomputation=layout.activations.recomputation),
            on_host=layout.away and world_size == 1,  # else it would be a replica
        )
        if not self._hardware.backend.overlaps:
            alike = replace(alike, shard_size=1, on_host=False)
        if alike not in self._known:
            queued = [self._queued(index, alike) for index in range(len(self._description.units))]
            self._known[alike] = unit_work(
                self._description, self._hardware, self._batch.micro_batch_size, alike.activations, queued,
                timed=self._timed,
            )  # fmt: skip
        return self._known[alike]

    def _queue_of(self, unit: UnitDescription, layout: UnitLayout) -> tuple[float, float]:
        """Return `queue_seconds` of a unit, less the time in which the device copies: the CPU goes on meanwhile."""
        layout = replace(layout, reshard_after_forward=unit.span.reshards(layout.reshard_after_forward))
        forward, backward = queue_seconds(unit, layout, self._hardware, self._job, self._batch)
        if not forward + backward:
            return 0.0, 0.0
        terms = unit_seconds(unit, layout, self._hardware, self._job)
        return forward - terms.copy_forward, backward - terms.copy_backward

    def __call__(self, index: int, layout: UnitLayout) -> UnitTime:
        """Return the seconds of a unit under a layout."""
        compute_s, windows, transfer = self._parts(index, layout)
        time = unit_time(self.terms(index, layout), layout, windows, compute_s, self._batch, transfer)
        done_s = self._done(layout.activations.recomputation)[index]
        return replace(time, waits_s=self._batch.accumulation_steps * (compute_s - done_s))

    def estimate(self, layouts: Sequence[UnitLayout]) -> TimeEstimate:
        """Return the seconds of a step, by unit and kind; `layouts` has one layout per unit, in the description's
        order.
        """
        return TimeEstimate(units=tuple(map(self, range(len(layouts)), layouts)))

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
        # units that are kept for the whole step count as if the blocks were freed
        whole_step = self._description.units[index].span is GatherSpan.STEP
        compute_s, windows = self.work(replace(layout, reshard_after_forward=True) if whole_step else layout)
        return compute_s[index], windows[index], self.transfers(layout.activations)[index]


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
