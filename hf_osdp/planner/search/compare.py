"""Compare searches: strategies at their best batch, memory against throughput, ways to split a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import DescriptionError, InfeasibleError
from ...quantities import format_bytes
from ..description import ModelDescription
from ..grouping import SIZES, grouped
from ..hardware import DDP_OPERATORS, FSDP_OPERATORS
from ..placement import HOST_OPTIONS
from ..problem import PlanningProblem, Strategy
from ..split import ModelSplit
from ..training_job import EXACT
from .search import SearchResult, fastest_without_limit, least_memory, search, search_or_floor

_log = logging.getLogger(__name__)

POINTS = 8
"""Limits of a front: enough for a curve."""
NEAR = 1.01
"""Ratio of memory or time below which plans count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """A strategy's plan at its best batch, or the reason why there is none."""

    strategy: Strategy
    result: SearchResult | None
    reason: str = ""
    least_peak_bytes: int | None = None
    """The tightest limit that the strategy meets; only set if no plan fits."""
    variant: str = ""
    """Difference from the strategy's first row, such as `all recomputed`."""

    @property
    def label(self) -> str:
        """The name in tables."""
        return ", ".join(filter(None, (self.strategy.value, self.variant)))


def compare_strategies(problem: PlanningProblem, *, split: ModelDescription | None = None) -> Iterator[StrategyResult]:
    """Compare all strategies, each at its own best batch under the same limit, OSDP first; yield rows as they are
    found.

    A strategy that cannot run has a reason instead of a result. DDP costs the host what torch's costs under autocast,
    which is more than our replicas do. Two-stage has a row only for several nodes of several
    devices. If the job leaves recomputation open, FSDP has further rows as scripts run it (`as_scripts_run`). If the
    job allows fewer bits on the wire, OSDP and the strategy asked for use them and have a second row, `exact`, without
    them.

    Args:
        problem: the problem of the model without splits.
        split: description of the split model, which OSDP and the problem's strategy take instead.
    """
    several = 1 < problem.hardware.devices_per_node < problem.hardware.world_size
    takes_split = (Strategy.OSDP, problem.strategy)
    for one in Strategy:
        if several or one is not Strategy.TWO_STAGE:
            asked = replace(
                problem, strategy=one, description=split if split and one in takes_split else problem.description,
                hardware=problem.hardware.running(DDP_OPERATORS) if one is Strategy.DDP else problem.hardware,
            )  # fmt: skip
            exact = replace(asked, job=replace(asked.job, communication=EXACT))
            if exact != asked and one in (problem.strategy, Strategy.OSDP):
                yield best_of(asked)
                yield best_of(exact, "exact")
            else:
                yield best_of(exact)
        if one is Strategy.FSDP and problem.job.recompute is None and problem.description.recomputable:
            run = replace(problem, strategy=one)
            yield best_of(as_scripts_run(run, recompute=False), "as it comes")
            yield best_of(as_scripts_run(run, recompute=True), "all recomputed")


def as_scripts_run(problem: PlanningProblem, *, recompute: bool) -> PlanningProblem:
    """Return the problem of a script without a planner: all blocks recomputed or none, nothing on the host unless the
    job requires it.

    Without recomputation it has the defaults of Accelerate's FSDP2, which reduces gradients in the compute dtype.
    """
    job, precision = problem.job, problem.job.precision
    places: dict[str, Any] = {name: name in job.asked for name in HOST_OPTIONS}
    fixed = replace(
        job, recompute=recompute, **places, communication=EXACT,
        precision=precision if recompute else replace(precision, reduce=None),
    )  # fmt: skip
    return replace(problem, job=fixed, hardware=problem.hardware.running(FSDP_OPERATORS))


def best_of(problem: PlanningProblem, variant: str = "") -> StrategyResult:
    """Return the row of the problem's strategy: its plan at the best batch, or the reason why there is none."""
    strategy = problem.strategy
    try:
        return StrategyResult(strategy=strategy, result=search(problem), variant=variant)
    except InfeasibleError as error:
        least, reason = error.least_peak_bytes, f"needs {format_bytes(error.least_peak_bytes)}"
        return StrategyResult(strategy=strategy, result=None, reason=reason, least_peak_bytes=least, variant=variant)
    except ValueError:
        if strategy is not Strategy.HSDP and not problem.shards_whole:
            raise
        reason = (
            f"{problem.job.optimizer.name} needs whole parameters"
            if problem.shards_whole
            else "no group size between 1 and all"
        )
        return StrategyResult(strategy=strategy, result=None, reason=reason, variant=variant)


def frontier(
    problem: PlanningProblem, others: Iterable[SearchResult] = (), *, blocks_per_unit: int | None = 1
) -> tuple[SearchResult, ...]:
    """Return points of the Pareto front of peak memory and throughput, by rising peak, up to the problem's limit, with
    so many blocks a unit or, for None, at each limit with the fastest number (`choose_blocks_per_unit`).

    Each point is the fastest plan under some limit (the ε-constraint method: Haimes, Lasdon, Wismer 1971): `POINTS`
    limits in equal ratios, from the least that some plan meets to the peak of the fastest plan, and the peak of each
    plan in `others`, so that no plan of another strategy is above the front. Limits are without margin here.

    Raises:
        InfeasibleError: no plan fits the problem's limit.
    """
    description = grouped(problem.description, blocks_per_unit or 1)
    hardware = problem.hardware.with_margin(0.0)
    problem = replace(problem, hardware=hardware, simplicity=0.0, description=description)

    def fastest(limit: int) -> SearchResult:
        limited = replace(problem, memory_limit_bytes=limit)
        return search(limited if blocks_per_unit else replace(limited, description=choose_blocks_per_unit(limited)))

    most, least = fastest(problem.memory_limit_bytes).peak_bytes, least_memory(problem)
    ratio = (most / least) ** (1 / (POINTS - 1))
    limits = {most, *(int(least * ratio**step) for step in range(POINTS - 1))}
    limits |= {other.peak_bytes for other in others if other.peak_bytes > least}
    front: list[SearchResult] = []
    for limit in sorted(limits):
        found = fastest(limit)
        if not front or found.time.step_s < front[-1].time.step_s:
            front.append(found)
    return tuple(front)


def choose_description(
    problem: PlanningProblem,
    splits: Callable[[], Sequence[ModelSplit]],
    describe: Callable[[ModelSplit], ModelDescription],
) -> ModelDescription:
    """Return the description of the plain or a split model whose best plan is fastest; if no plan fits, the one that
    needs least memory.

    Splits save memory. They are tried only if the limit slows the plain model down. Single strategies take the plain
    model. A split for which `describe` raises a DescriptionError is left out.
    """
    plain = problem.description
    if problem.strategy is not Strategy.OSDP:
        return plain
    best, chosen = _rank(problem), plain
    if not best[0] and best[1] <= NEAR * fastest_without_limit(problem):
        return plain
    for split in splits():
        try:
            description = describe(split)
        except DescriptionError as error:
            _log.debug("%s", error)
            continue
        rank = _rank(replace(problem, description=description), cutoff_s=math.inf if best[0] else best[1])
        if rank < best:
            best, chosen = rank, description
    return chosen


def choose_blocks_per_unit(problem: PlanningProblem, asked: int | None = None) -> ModelDescription:
    """Return the description with as many blocks a unit as are asked for; for None with 1 or that number of `SIZES`
    whose best plan is fastest.

    Fewer blocks a unit take less memory, and are the simpler plan: more are taken only where a step is shorter by
    `NEAR`. Single strategies, a single process and models of which no plan fits keep single blocks.
    """
    chosen = problem.description
    if problem.hardware.world_size == 1 or (asked is None and problem.strategy is not Strategy.OSDP):
        return chosen
    if asked is not None:
        return grouped(chosen, asked)
    is_short_of_memory, best_s = _rank(problem)
    for blocks in () if is_short_of_memory else SIZES:
        if (description := grouped(problem.description, blocks)) is problem.description:
            break
        worse, step_s = _rank(replace(problem, description=description), cutoff_s=best_s / NEAR)
        if not worse:
            chosen, best_s = description, step_s
    return chosen


def _rank(problem: PlanningProblem, cutoff_s: float = math.inf) -> tuple[bool, float]:
    """Return a sort key: plans that fit first, by step time below the cutoff; then those that do not, by a bound on
    their memory.
    """
    found = search_or_floor(problem, cutoff_s=cutoff_s)
    return (True, float(found)) if isinstance(found, int) else (False, found.time.step_s)
