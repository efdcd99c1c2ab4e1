"""Explain a plan: its bytes and seconds, the cost of other layouts, and the bottleneck."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum

from ..errors import InfeasibleError
from ..planner.cost.evaluate import PlanEstimate
from ..planner.cost.memory import bytes_needed
from ..planner.cost.timing import ACTIVATIONS, UnitTimer
from ..planner.decision import UnitLayout
from ..planner.description import ModelDescription
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem, Strategy
from ..planner.search.search import search
from ..planner.search.strategies import search_spaces
from .plan_file import PlanInputs
from .tables import PlanRow, plan_rows

_GAIN = 1.001
"""Throughput ratio above which a change counts as a gain; smaller gains are rounding errors of the objective."""
_UNLIMITED = 2**60 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTime:
    """Time of one kind of work in a step; the sum of `exposed_s` over the streams is the time of the step."""

    name: str
    total_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.total_s - self.exposed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another layout for one row of the plan; everything else is unchanged."""

    choice: UnitLayout
    added_s: float
    """Seconds that it adds to a step; negative if it is faster."""
    peak_bytes: int
    over_bytes: int
    """Peak minus limit, positive if it does not fit; 0 without a limit."""
    single_over_bytes: int
    """The same if only the first or only the last unit of the row changes, whichever has the lower peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReason:
    """The reason for the layout of a row of equal units."""

    row: PlanRow
    faster: Alternative | None
    """The fastest other layout that would save time, if there is one."""
    next_fitting: Alternative | None
    """The layout with the least time among the others that fit, `faster` excluded."""


class BottleneckKind(str, Enum):
    MEMORY = "memory"
    MICRO_BATCH = "micro-batch"
    BATCH = "batch"
    """The global batch: more samples per step would share the step's communication and update."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The limit on throughput, and the gain without it."""

    kind: BottleneckKind
    gain: float
    """Throughput without it divided by throughput now; 1 if there is no bottleneck."""
    peak_bytes: int | None = None
    """Peak of the plan without a memory limit, if memory is the bottleneck."""
    batch_size: int | None = None
    """The larger global batch, or the better micro-batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    plan: Plan
    description: ModelDescription
    estimate: PlanEstimate
    outside: Mapping[str, int] = field(default_factory=dict)
    """Device memory that is not available to tensors, by kind."""
    margin_bytes: int = 0
    streams: tuple[StreamTime, ...] = ()
    """Empty if the hardware is not known."""
    reasons: tuple[RowReason, ...] = ()
    bottleneck: Bottleneck | None = None

    @property
    def outside_bytes(self) -> int:
        return sum(self.outside.values())


def explain(plan: Plan, inputs: PlanInputs) -> Explanation:
    """Return bytes, seconds, the layouts that were not chosen, and the bottleneck under the plan's memory limit.

    The plan must be for the inputs' description (`Plan.check`); without hardware there are no seconds and no reasons.
    """
    description, hardware, limit, estimate = (
        inputs.description,
        inputs.hardware,
        plan.memory_limit_bytes,
        inputs.estimate(plan),
    )
    found = Explanation(plan=plan, description=description, estimate=estimate)
    if hardware is None or estimate.time is None:
        return found
    problem = inputs.problem(limit or _UNLIMITED)
    reasons = _RowReasons(plan, problem)
    found = replace(
        found,
        outside=estimate.memory.outside(hardware),
        streams=stream_times(estimate),
        reasons=tuple(map(reasons.of, plan_rows(plan, description))),
    )
    if limit is None:
        return found
    bottleneck = _find_bottleneck(
        plan.global_batch_size / estimate.time.step_s, replace(problem, strategy=Strategy.parse(plan.strategy))
    )
    return replace(found, margin_bytes=limit - hardware.room_bytes(limit), bottleneck=bottleneck)


def stream_times(estimate: PlanEstimate) -> tuple[StreamTime, ...]:
    """Return seconds of a step by kind of work; collectives in two stages count as those in one."""
    time, streams = estimate.time, estimate.streams
    assert time is not None and streams is not None
    totals = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), (0.0, 0.0))
    for stream, (more_s, more_exposed_s) in streams.items():
        if more_s or stream != ACTIVATIONS:
            name = str.removeprefix(stream, "two_stage_").replace("_", "-")
            total_s, exposed_s = totals.get(name, (0.0, 0.0))
            totals[name] = total_s + more_s, exposed_s + more_exposed_s
    compute, copies, optimizer = (time.total(term) for term in ("compute_s", "copy_s", "optimizer_s"))
    named = {"compute": (compute, compute), **totals, "copies": (copies, copies), "optimizer": (optimizer, optimizer)}
    return tuple(StreamTime(name=name, total_s=total, exposed_s=exposed) for name, (total, exposed) in named.items())


class _RowReasons:
    """Find the next best layouts of each row of a plan: a row changes as a whole, all other units and the batch
    stay.
    """

    def __init__(self, plan: Plan, problem: PlanningProblem) -> None:
        self._problem, self._batch, self._choices = problem, plan.batch, plan.layouts(problem.description)
        self._room = problem.room_bytes if plan.memory_limit_bytes else None
        self._timer = UnitTimer(problem.description, problem.hardware, problem.job, self._batch)
        *_, self._space = search_spaces(problem, self._batch)

    def of(self, row: PlanRow) -> RowReason:
        choice = self._choices[row.units[0]]
        others = [other for other in self._space[row.units[0]] if other != choice]
        added = {
            other: sum(self._timer(i, other).total_s - self._timer(i, choice).total_s for i in row.units)
            for other in others
        }
        ranked = sorted(added, key=added.__getitem__)
        faster = next((other for other in ranked if added[other] < 0), None)
        fitting = next((other for other in ranked if other != faster and self._fits(row.units, other)), None)
        first, second = (
            None if other is None else self._alternative(row, other, added[other]) for other in (faster, fitting)
        )
        return RowReason(row=row, faster=first, next_fitting=second)

    def _alternative(self, row: PlanRow, choice: UnitLayout, added_s: float) -> Alternative:
        peak, *ends = (self._memory(units, choice)[0] for units in (row.units, row.units[:1], row.units[-1:]))
        over, single = (0 if self._room is None else nbytes - self._room for nbytes in (peak, min(ends)))
        return Alternative(choice=choice, added_s=added_s, peak_bytes=peak, over_bytes=over, single_over_bytes=single)

    def _fits(self, units: tuple[int, ...], choice: UnitLayout) -> bool:
        (peak, used), host = self._memory(units, choice), self._problem.hardware.host
        return (host is None or used <= host.memory_bytes) and (self._room is None or peak <= self._room)

    def _memory(self, units: tuple[int, ...], choice: UnitLayout) -> tuple[int, int]:
        """Return the peak and the bytes on the host if these units change."""
        problem = self._problem
        changed = [choice if index in units else own for index, own in enumerate(self._choices)]
        return bytes_needed(problem.description, changed, problem.hardware, problem.job, self._batch)


def _find_bottleneck(samples_per_s: float, problem: PlanningProblem) -> Bottleneck:
    """Return the first limit on the strategy's throughput: memory, a fixed micro-batch size, or the global batch.

    Each is relaxed alone: no memory limit; any micro-batch size; twice the global batch under the same limit.
    """
    job = problem.job
    relaxed = {BottleneckKind.MEMORY: replace(problem, memory_limit_bytes=_UNLIMITED)}
    if job.micro_batch_size is not None:
        relaxed[BottleneckKind.MICRO_BATCH] = replace(problem, job=replace(job, micro_batch_size=None))
    relaxed[BottleneckKind.BATCH] = replace(problem, job=replace(job, global_batch_size=2 * job.global_batch_size))
    for kind, other in relaxed.items():
        with suppress(InfeasibleError):
            plan = search(other).plan
            assert plan.samples_per_s is not None
            if (gain := plan.samples_per_s / samples_per_s) > _GAIN:
                peak = plan.peak_bytes if kind is BottleneckKind.MEMORY else None
                batch = {
                    BottleneckKind.MICRO_BATCH: plan.micro_batch_size,
                    BottleneckKind.BATCH: plan.global_batch_size,
                }.get(kind)
                return Bottleneck(kind=kind, gain=gain, peak_bytes=peak, batch_size=batch)
    return Bottleneck(kind=BottleneckKind.NOTHING, gain=1.0)
