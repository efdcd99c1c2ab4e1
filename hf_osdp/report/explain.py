"""Why a plan is as it is: where bytes and seconds go, what other layouts would cost, and what binds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum

from ..errors import InfeasibleError
from ..planner.cost.evaluate import PlanEstimate
from ..planner.cost.memory import estimate_memory
from ..planner.cost.timing import TimeEstimate, UnitTimer
from ..planner.decision import UnitLayout
from ..planner.description import ModelDescription
from ..planner.hardware import Hardware
from ..planner.job import TrainingJob
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem, Strategy
from ..planner.search.search import search
from ..planner.search.strategies import search_spaces
from .plan_file import PlanInputs
from .tables import PlanRow, plan_rows

_GAIN = 1.001
"""Throughput ratio from which a change counts as a gain: smaller ones are rounding of the objective."""
_UNLIMITED = 2**60 - 1
_TRIPS = "activations"
"""The stream of copies to the host and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTime:
    """One kind of work in a step; `exposed_s` is what the step is longer by, and their sum over the streams its time."""

    name: str
    total_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.total_s - self.exposed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another layout for one row of the plan, all else left as it is."""

    choice: UnitLayout
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
    quicker: Alternative | None
    """The quickest other layout that would save time, if there is one."""
    next_fitting: Alternative | None
    """The other layout that costs least time among those that fit, where it is not the quicker one."""


class Binds(str, Enum):
    MEMORY = "memory"
    MICRO_BATCH = "micro-batch"
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
    plan: Plan
    description: ModelDescription
    estimate: PlanEstimate
    outside: Mapping[str, int] = field(default_factory=dict)
    """Device memory that no tensor can have, by kind."""
    margin_bytes: int = 0
    streams: tuple[StreamTime, ...] = ()
    """Empty where the hardware is not known."""
    reasons: tuple[RowReason, ...] = ()
    binding: Binding | None = None

    @property
    def outside_bytes(self) -> int:
        return sum(self.outside.values())


def explain(plan: Plan, inputs: PlanInputs) -> Explanation:
    """Return bytes, seconds, the layouts that were not taken, and what binds under the plan's memory limit.

    The plan must be for the inputs' description (`Plan.check`); without hardware there are no seconds and no reasons.
    """
    description, hardware, limit, estimate = inputs.description, inputs.hardware, plan.memory_limit_bytes, inputs.estimate(plan)
    found = Explanation(plan=plan, description=description, estimate=estimate)
    if hardware is None or estimate.time is None:
        return found
    problem = inputs.problem(limit or _UNLIMITED)
    reasons = _RowReasons(plan, problem)
    found = replace(
        found,
        outside=estimate.memory.outside(hardware),
        streams=stream_times(plan, description, inputs.job, hardware),
        reasons=tuple(map(reasons.of, plan_rows(plan, description))),
    )
    if limit is None:
        return found
    binding = _binding(plan.global_batch_size / estimate.time.step_s, replace(problem, strategy=Strategy.parse(plan.strategy)))
    return replace(found, margin_bytes=limit - hardware.room_bytes(limit), binding=binding)


def stream_times(plan: Plan, description: ModelDescription, job: TrainingJob, hardware: Hardware) -> tuple[StreamTime, ...]:
    """Return seconds of a step by kind of work; what a unit exposes is shared out among its collectives in proportion to their time."""
    batch, layouts = plan.batch, plan.layouts(description)
    timer, steps = UnitTimer(description, hardware, job, batch), batch.accumulation_steps
    totals = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce", _TRIPS), (0.0, 0.0))

    def add(times: int, hidden_s: float, **work: float) -> None:
        """Count work that runs `times` a step, of which compute hides `hidden_s` together."""
        whole = sum(work.values())
        share = max(0.0, whole - hidden_s) / whole if whole else 0.0
        for name, seconds in work.items():
            total, exposed = totals[name]
            totals[name] = total + times * seconds, exposed + times * seconds * share

    for index, choice in enumerate(layouts):
        terms, window = timer.terms(index, choice), timer.work(choice.activations.recomputation)[1][index]
        trip = timer.trips(choice.activations)[index]
        backward = {"all-gather": terms.gather_backward, _TRIPS: trip.back_beside}
        early = terms.reduce_scatter if batch.reduce_scatters(choice) > 1 else 0.0
        add(steps, window.forward, **{"all-gather": terms.gather_forward, _TRIPS: trip.out})
        add(steps, 0.0, **{_TRIPS: trip.back_before})
        add(steps - 1, window.backward, **backward, **{"reduce-scatter": early})
        beside = 0.0 if choice.step_in_backward else window.replicas  # hides replicas' reductions alone
        last = {"reduce-scatter": terms.reduce_scatter, "all-reduce": 0.0 if beside else terms.all_reduce}
        add(1, window.backward, **backward, **last)
        add(1, beside, **{"all-reduce": terms.all_reduce if beside else 0.0})
        for call in window.later:
            add(steps, call.forward, **{"all-gather": terms.gather_forward})
            add(steps, call.backward, **{"all-gather": terms.gather_backward})
    if not totals[_TRIPS][0]:
        del totals[_TRIPS]
    time = TimeEstimate(units=tuple(map(timer, range(len(layouts)), layouts)))
    compute, copies, optimizer = (time.total(term) for term in ("compute_s", "copy_s", "optimizer_s"))
    named = {"compute": (compute, compute), **totals, "copies": (copies, copies), "optimizer": (optimizer, optimizer)}
    return tuple(StreamTime(name=name, total_s=total, exposed_s=exposed) for name, (total, exposed) in named.items())


class _RowReasons:
    """The layouts that were nearly taken, for each row of a plan: a row changes as a whole, all other units and the batch stay."""

    def __init__(self, plan: Plan, problem: PlanningProblem) -> None:
        self._problem, self._batch, self._choices = problem, plan.batch, plan.layouts(problem.description)
        self._room = problem.room_bytes if plan.memory_limit_bytes else None
        self._timer = UnitTimer(problem.description, problem.hardware, problem.job, self._batch)
        *_, self._space = search_spaces(problem, self._batch)

    def of(self, row: PlanRow) -> RowReason:
        choice = self._choices[row.units[0]]
        others = [other for other in self._space[row.units[0]] if other != choice]
        added = {other: sum(self._timer(i, other).total_s - self._timer(i, choice).total_s for i in row.units) for other in others}
        ranked = sorted(added, key=added.__getitem__)
        quicker = next((other for other in ranked if added[other] < 0), None)
        fitting = next((other for other in ranked if other != quicker and self._fits(row.units, other)), None)
        first, second = (None if other is None else self._alternative(row, other, added[other]) for other in (quicker, fitting))
        return RowReason(row=row, quicker=first, next_fitting=second)

    def _alternative(self, row: PlanRow, choice: UnitLayout, added_s: float) -> Alternative:
        peak, *ends = (self._memory(units, choice)[0] for units in (row.units, row.units[:1], row.units[-1:]))
        over, single = (0 if self._room is None else nbytes - self._room for nbytes in (peak, min(ends)))
        return Alternative(choice=choice, added_s=added_s, peak_bytes=peak, over_bytes=over, single_over_bytes=single)

    def _fits(self, units: tuple[int, ...], choice: UnitLayout) -> bool:
        (peak, on_host), host = self._memory(units, choice), self._problem.hardware.host
        return (host is None or on_host <= host.memory_bytes) and (self._room is None or peak <= self._room)

    def _memory(self, units: tuple[int, ...], choice: UnitLayout) -> tuple[int, int]:
        """Return peak and bytes on the host where some units change."""
        problem, changed = self._problem, [choice if index in units else own for index, own in enumerate(self._choices)]
        memory = estimate_memory(problem.description, changed, problem.hardware.world_size, problem.job, self._batch)
        return memory.on(problem.hardware), memory.host_bytes


def _binding(samples_per_s: float, problem: PlanningProblem) -> Binding:
    """Return what keeps the plan's strategy from more samples a second: the first of memory, a fixed micro-batch, the global batch.

    Each is loosened alone: no limit; any micro-batch size; twice the global batch under the same limit.
    """
    job = problem.job
    loosened = {Binds.MEMORY: replace(problem, memory_limit_bytes=_UNLIMITED)}
    if job.micro_batch_size is not None:
        loosened[Binds.MICRO_BATCH] = replace(problem, job=replace(job, micro_batch_size=None))
    loosened[Binds.BATCH] = replace(problem, job=replace(job, global_batch_size=2 * job.global_batch_size))
    for kind, other in loosened.items():
        with suppress(InfeasibleError):
            plan = search(other).plan
            assert plan.samples_per_s is not None
            if (gain := plan.samples_per_s / samples_per_s) > _GAIN:
                peak = plan.peak_bytes if kind is Binds.MEMORY else None
                batch = {Binds.MICRO_BATCH: plan.micro_batch_size, Binds.BATCH: plan.global_batch_size}.get(kind)
                return Binding(kind=kind, gain=gain, peak_bytes=peak, batch_size=batch)
    return Binding(kind=Binds.NOTHING, gain=1.0)
