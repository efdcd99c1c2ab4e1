"""Why a plan is as it is: where bytes and seconds go, what other layouts would cost, and what binds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ..errors import InfeasibleError
from ..planner.cost.evaluate import PlanEstimate, batch_of, choices_of, estimate_plan
from ..planner.cost.memory import MemoryEstimate, estimate_memory
from ..planner.cost.timing import UnitTimer
from ..planner.cost.units import Choice, UnitSeconds, unit_seconds
from ..planner.description import ModelDescription
from ..planner.hardware import Hardware
from ..planner.job import TrainingJob
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem, Strategy
from ..planner.search.search import search
from ..planner.search.strategies import search_spaces
from .tables import PlanRow, plan_rows

_GAIN = 1.001
"""Throughput ratio from which a change counts as a gain: smaller ones are rounding of the objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTime:
    """One kind of work in a step."""

    name: str
    """`compute`, `all-gather`, `reduce-scatter`, `all-reduce`, `copies` or `optimizer`."""
    total_s: float
    exposed_s: float
    """What the step is longer by; the rest is hidden behind compute. Their sum over the streams is the step's time."""

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.total_s - self.exposed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another layout for one row of the plan, all else left as it is."""

    choice: Choice
    added_s: float
    """Seconds that it adds to a step; negative where it is quicker."""
    peak_bytes: int
    over_bytes: int
    """Peak less limit; positive where it does not fit, and never so without a limit."""
    single_over_bytes: int
    """The same where the first or the last unit of the row alone changes, whichever peaks lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReason:
    """Why a row of equal units is laid out as it is."""

    row: PlanRow
    choice: Choice
    quicker: Alternative | None
    """The quickest other layout that would save time, if there is one."""
    next_fitting: Alternative | None
    """The other layout that costs least time among those that fit, where it is not the quicker one."""


class Binds(str, Enum):
    """What keeps a plan from being faster."""

    MEMORY = "memory"
    MICRO_BATCH = "micro-batch"
    """The micro-batch size that was asked for."""
    BATCH = "batch"
    """The global batch: more samples a step would share the step's communication and update."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What binds, and what loosening it would bring."""

    kind: Binds
    gain: float
    """Throughput without it over throughput now; 1 where nothing binds."""
    peak_bytes: int | None = None
    """Peak of the plan that has no memory limit, where memory binds."""
    batch_size: int | None = None
    """The larger global batch, or the better micro-batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan, taken apart."""

    plan: Plan
    description: ModelDescription
    estimate: PlanEstimate
    outside: Mapping[str, int]
    """Device memory that no tensor can have, by what it is."""
    margin_bytes: int
    """Of the limit, what stays free."""
    streams: tuple[StreamTime, ...]
    """Empty where the hardware is not known."""
    reasons: tuple[RowReason, ...]
    binding: Binding | None

    @property
    def outside_bytes(self) -> int:
        """Device memory that no tensor can have."""
        return sum(self.outside.values())


def explain(
    plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware | None, memory_limit_bytes: int | None
) -> Explanation:
    """Take a plan apart.

    Args:
        plan: what runs; it must be for this description (`Plan.check`).
        description: the model.
        job: precision, optimizer, global batch.
        hardware: devices and links; without them there are no seconds and no reasons.
        memory_limit_bytes: the limit that it was made for; None for none.

    Returns:
        Bytes, seconds, the layouts that were not taken, and what binds.
    """
    estimate = estimate_plan(plan, description, job, hardware)
    known = hardware is not None
    return Explanation(
        plan=plan,
        description=description,
        estimate=estimate,
        outside=estimate.memory.outside(hardware) if known else {},
        margin_bytes=memory_limit_bytes - hardware.room_bytes(memory_limit_bytes) if known and memory_limit_bytes is not None else 0,
        streams=stream_times(plan, description, job, hardware) if known else (),
        reasons=row_reasons(plan, description, job, hardware, memory_limit_bytes) if known else (),
        binding=what_binds(plan, description, job, hardware, memory_limit_bytes) if known and memory_limit_bytes is not None else None,
    )


def stream_times(plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware) -> tuple[StreamTime, ...]:
    """Seconds of a step by kind of work.

    The model knows how much communication of a unit's backward is exposed, not which collective it is that waits: it is
    shared out among them in proportion to their time.
    """
    choices, batch = choices_of(plan, description), batch_of(plan)
    timer = UnitTimer(description, hardware, job, batch)
    totals = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce", _TRIPS), (0.0, 0.0))
    for index, (unit, choice) in enumerate(zip(description.units, choices, strict=True)):
        terms, window = unit_seconds(unit, choice, hardware, job), timer.windows[choice.activations][index]
        trip = timer.trips(choice.activations)[index]
        out = {"all-gather": terms.gather_forward, _TRIPS: trip.out}
        phases = [(out, window.forward, batch.accumulation_steps), ({_TRIPS: trip.back_before}, 0.0, batch.accumulation_steps)]
        phases += _backward_phases(terms, trip.back_beside, window.backward, batch.accumulation_steps, batch.reduce_scatters(choice))
        for call in window.later:
            phases += [({"all-gather": terms.gather_forward}, call.forward, batch.accumulation_steps)]
            phases += [({"all-gather": terms.gather_backward}, call.backward, batch.accumulation_steps)]
        for work, hides, times in phases:
            whole = sum(work.values())
            share = max(0.0, whole - hides) / whole if whole else 0.0
            for name, seconds in work.items():
                total, exposed = totals[name]
                totals[name] = total + times * seconds, exposed + times * seconds * share
    time = estimate_plan(plan, description, job, hardware).time
    serial = {"compute": "compute_s", "copies": "copy_s", "optimizer": "optimizer_s"}
    rest = {name: (time.total(term), time.total(term)) for name, term in serial.items()}
    if not totals[_TRIPS][0]:
        del totals[_TRIPS]
    named = {"compute": rest.pop("compute"), **totals, **rest}
    return tuple(StreamTime(name=name, total_s=total, exposed_s=exposed) for name, (total, exposed) in named.items())


_TRIPS = "activations"
"""To the host and back."""


def _backward_phases(
    terms: UnitSeconds, back: float, window: float, micro_steps: int, scatters: int
) -> list[tuple[dict[str, float], float, int]]:
    """What shares the last micro-step's backward and the earlier ones', the compute beside it, and how often."""
    both = {"all-gather": terms.gather_backward, _TRIPS: back}
    earlier = {**both, "reduce-scatter": terms.reduce_scatter if scatters > 1 else 0.0}
    last = {**both, "reduce-scatter": terms.reduce_scatter, "all-reduce": terms.all_reduce}
    return [(earlier, window, micro_steps - 1), (last, window, 1)]


def row_reasons(
    plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware, memory_limit_bytes: int | None
) -> tuple[RowReason, ...]:
    """For each row of the plan, the layouts that were nearly taken.

    A row changes as a whole, and all other units and the batch stay. Where a quicker layout is over the limit by that, it
    also says by how much one unit alone would be.
    """
    question = _Question(plan, description, job, hardware, memory_limit_bytes)
    return tuple(question.reason(row) for row in plan_rows(plan, description))


class _Question:
    """What if one row of a plan were laid out otherwise."""

    def __init__(self, plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware, limit: int | None):
        self.plan, self.description, self.job, self.hardware = plan, description, job, hardware
        self.room = None if limit is None else hardware.room_bytes(limit)
        self.choices, self.batch = choices_of(plan, description), batch_of(plan)
        self.timer = UnitTimer(description, hardware, job, self.batch)

    def reason(self, row: PlanRow) -> RowReason:
        unit, choice = row.units[0], self.choices[row.units[0]]
        *_, space = search_spaces(Strategy.OSDP, self.description, self.hardware, self.job, self.batch)
        space = space[unit]
        added = {other: sum(self._seconds(i, other) - self._seconds(i, choice) for i in row.units) for other in space if other != choice}
        ranked = sorted(added, key=lambda other: (added[other], other))
        quicker = next((other for other in ranked if added[other] < 0), None)
        fitting = next((other for other in ranked if other != quicker and self._fits(row.units, other)), None)
        return RowReason(
            row=row,
            choice=choice,
            quicker=None if quicker is None else self._alternative(row, quicker, added[quicker]),
            next_fitting=None if fitting is None else self._alternative(row, fitting, added[fitting]),
        )

    def _alternative(self, row: PlanRow, choice: Choice, added_s: float) -> Alternative:
        peak = self._peak(row.units, choice)
        alone = min(self._peak((unit,), choice) for unit in {row.units[0], row.units[-1]})
        return Alternative(
            choice=choice, added_s=added_s, peak_bytes=peak, over_bytes=self._over(peak), single_over_bytes=self._over(alone)
        )

    def _over(self, peak_bytes: int) -> int:
        return 0 if self.room is None else peak_bytes - self.room

    def _fits(self, units: tuple[int, ...], choice: Choice) -> bool:
        """Within the limit, and within the host's memory."""
        memory, host = self._memory(units, choice), self.hardware.host
        there = host is None or memory.host_bytes <= host.memory_bytes
        return there and self._over(memory.on(self.hardware)) <= 0

    def _peak(self, units: tuple[int, ...], choice: Choice) -> int:
        return self._memory(units, choice).on(self.hardware)

    def _memory(self, units: tuple[int, ...], choice: Choice) -> MemoryEstimate:
        changed = [choice if index in units else own for index, own in enumerate(self.choices)]
        return estimate_memory(self.description, changed, self.plan.world_size, self.job, self.batch)

    def _seconds(self, index: int, choice: Choice) -> float:
        return self.timer(index, choice).total_s


def what_binds(plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware, memory_limit_bytes: int) -> Binding:
    """What keeps the plan's strategy from more samples a second: the first of memory, a fixed micro-batch, the global batch.

    Each is loosened alone: no limit; any micro-batch size; twice the global batch under the same limit.
    """
    now = plan.global_batch_size / estimate_plan(plan, description, job, hardware).time.step_s

    def found(job: TrainingJob, limit: int):
        try:
            return search(
                PlanningProblem(
                    description=description, hardware=hardware, job=job, memory_limit_bytes=limit, strategy=Strategy.parse(plan.strategy)
                )
            ).plan
        except InfeasibleError:
            return None

    unlimited = 2**60 - 1  # the most that a limit can be
    free = found(job, unlimited)
    if free is not None and free.samples_per_s > _GAIN * now:
        return Binding(kind=Binds.MEMORY, gain=free.samples_per_s / now, peak_bytes=free.peak_bytes)
    if job.micro_batch_size is not None:
        other = found(replace(job, micro_batch_size=None), memory_limit_bytes)
        if other is not None and other.samples_per_s > _GAIN * now:
            return Binding(kind=Binds.MICRO_BATCH, gain=other.samples_per_s / now, batch_size=other.micro_batch_size)
    twice = found(replace(job, global_batch_size=2 * plan.global_batch_size), memory_limit_bytes)
    if twice is not None and twice.samples_per_s > _GAIN * now:
        return Binding(kind=Binds.BATCH, gain=twice.samples_per_s / now, batch_size=twice.global_batch_size)
    return Binding(kind=Binds.NOTHING, gain=1.0)
