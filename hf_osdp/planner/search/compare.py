"""Compare searches: strategies at their best batch, memory against throughput, ways to split a model."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import DescriptionError, InfeasibleError
from ...quantities import format_bytes
from ..description import ModelDescription
from ..placement import HOST_OPTIONS
from ..problem import PlanningProblem, Strategy
from ..split import ModelSplit
from ..training_job import EXACT
from .search import SearchResult, fastest_without_limit, least_memory, search, search_or_floor

_log = logging.getLogger(__name__)

POINTS = 8
"""Default number of searches for a front: enough for a curve."""
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
    """Difference from the strategy's first row, such as `eager, all recomputed`."""

    @property
    def label(self) -> str:
        """The name in tables."""
        return ", ".join(filter(None, (self.strategy.value, self.variant)))


def compare_strategies(
    problem: PlanningProblem, *, split: ModelDescription | None = None, eager: ModelDescription | None = None
) -> Iterator[StrategyResult]:
    """Compare all strategies, each at its own best batch under the same limit, OSDP first; yield rows as they are
    found.

    A strategy that cannot run has a reason instead of a result. Two-stage has a row only for several nodes of several
    devices. If the job leaves recomputation open, FSDP has further rows as scripts run it (`as_scripts_run`). If the
    job allows fewer bits on the wire, OSDP and the strategy asked for use them and have a second row, `exact`, without
    them.

    Args:
        problem: the problem of the model without splits.
        split: description of the split model, which OSDP takes instead.
        eager: the model with its blocks as they are, if the problem's have another form, which adds rows.
    """
    several = 1 < problem.hardware.devices_per_node < problem.hardware.world_size
    for one in Strategy:
        if several or one is not Strategy.TWO_STAGE:
            asked = replace(
                problem, strategy=one, description=split if split and one is Strategy.OSDP else problem.description
            )
            exact = replace(asked, job=replace(asked.job, communication=EXACT))
            if exact != asked and one in (problem.strategy, Strategy.OSDP):
                yield best_of(asked)
                yield best_of(exact, "exact")
            else:
                yield best_of(exact)
        if eager is not None and one is problem.strategy:
            yield best_of(replace(problem, description=eager), "eager")
        if one is Strategy.FSDP and problem.job.recompute is None:
            for model, kind in ((problem.description, ""), (eager, "eager, ")):
                if model is not None and model.recomputable:
                    run = replace(problem, strategy=one, description=model)
                    yield best_of(as_scripts_run(run, recompute=False), f"{kind}as it comes")
                    yield best_of(as_scripts_run(run, recompute=True), f"{kind}all recomputed")


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
    return replace(problem, job=fixed)


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
    problem: PlanningProblem,
    *,
    points: int = POINTS,
    known: Mapping[int, SearchResult] | None = None,
    others: Iterable[SearchResult] = (),
    search_all: Callable[..., Iterable[SearchResult]] = map,
    at_once: int = 1,
) -> tuple[SearchResult, ...]:
    """Return points of the Pareto front of peak memory and throughput, by rising peak, up to the problem's limit.

    Each point is the fastest plan under some limit (the ε-constraint method: Haimes, Lasdon, Wismer 1971). The next
    limit is the geometric mean of the two limits whose gap has the largest product of memory and throughput, by
    ratios, until no gap has 1 % of both. Limits are without margin here.

    Args:
        problem: the problem, whose limit is the right end of the front.
        points: the most points, without those for `others`.
        known: the problem's fastest plans under some limits, by limit.
        others: plans of other strategies; under the peak of each that is better than the front, one more is searched.
        search_all: applies `search` to several problems, like `map`.
        at_once: how many it searches at the same time.

    Raises:
        InfeasibleError: no plan fits the problem's limit.
        ValueError: fewer than two points, or an error of `search`.
    """
    if points < 2:
        raise ValueError(f"points={points} must be at least 2, the two ends of the front.")
    problem = replace(problem, hardware=problem.hardware.with_margin(0.0), simplicity=0.0)
    found = dict(known or {})

    def add(*limits: int) -> None:
        new = [limit for limit in limits if limit not in found]
        found.update(zip(new, search_all(search, [replace(problem, memory_limit_bytes=n) for n in new]), strict=True))

    add(problem.memory_limit_bytes)
    least = least_memory(problem)
    add(least)
    while len(found) < points:
        pairs = itertools.pairwise(sorted(found.items(), key=lambda point: point[0]))
        gaps = sorted(((_unknown(low, below, above), low, above.peak_bytes) for (low, below), (_, above) in pairs))
        largest = [gap for gap in gaps[-min(at_once, points - len(found)) :] if gap[0]]
        if not largest:
            break
        add(*(int(math.sqrt(low * high)) for _, low, high in largest))
    for other in sorted(others, key=lambda result: result.peak_bytes):
        if other.peak_bytes > least and not any(_is_no_worse(one, other) for one in found.values()):
            add(other.peak_bytes)
    return not_dominated(list(found.values()))


def _is_no_worse(one: SearchResult, other: SearchResult) -> bool:
    return one.peak_bytes <= other.peak_bytes and one.time.step_s <= other.time.step_s


def _unknown(low_bytes: int, below: SearchResult, above: SearchResult) -> float:
    """Return the area, by ratios, in which the front may lie between a limit and a later plan; 0 if it is too
    narrow to search.
    """
    memory, rate = above.peak_bytes / low_bytes, below.time.step_s / above.time.step_s
    return 0.0 if min(memory, rate) < NEAR else math.log(memory) * math.log(rate)


def not_dominated(results: Sequence[SearchResult]) -> tuple[SearchResult, ...]:
    """Return the results that no other result equals or betters in both peak and step time, by rising peak."""
    front: list[SearchResult] = []
    for result in sorted(results, key=lambda r: (r.peak_bytes, r.time.step_s)):
        if not front or result.time.step_s < front[-1].time.step_s:
            front.append(result)
    return tuple(front)


def choose_description(
    problem: PlanningProblem,
    splits: Callable[[], Sequence[ModelSplit]],
    describe: Callable[[ModelSplit], ModelDescription],
) -> ModelDescription:
    """Return the description of the plain or a split model whose best plan is fastest; if no plan fits, the one that
    needs least memory.

    Splits save memory. They are tried only if the limit slows the plain model down, or if blocks have another form,
    which the loss in chunks then has, too. Single strategies take the plain model. A split for which `describe` raises
    a DescriptionError is left out.
    """
    plain = problem.description
    if problem.strategy is not Strategy.OSDP:
        return plain
    best, chosen = _rank(problem), plain
    if not best[0] and not plain.changed_blocks and best[1] <= NEAR * fastest_without_limit(problem):
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


def _rank(problem: PlanningProblem, cutoff_s: float = math.inf) -> tuple[bool, float]:
    """Return a sort key: plans that fit first, by step time below the cutoff; then those that do not, by a bound on
    their memory.
    """
    found = search_or_floor(problem, cutoff_s=cutoff_s)
    return (True, float(found)) if isinstance(found, int) else (False, found.time.step_s)
