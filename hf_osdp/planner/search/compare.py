"""Compare searches: strategies at their best batch, memory against throughput, ways to split a model."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...errors import DescriptionError, InfeasibleError
from ...quantities import format_bytes
from ..description import ModelDescription
from ..problem import PlanningProblem, Strategy
from ..split import ModelSplit
from .search import SearchResult, fastest_without_limit, least_memory, search, search_or_floor

_log = logging.getLogger(__name__)

POINTS = 16
"""Default number of searches for a front: enough for a curve, and at most a few seconds."""
_NEAR = 1.01
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
    problem: PlanningProblem, *, split: ModelDescription | None = None, other: ModelDescription | None = None
) -> tuple[StrategyResult, ...]:
    """Compare all strategies, each at its own best batch under the same limit, OSDP first.

    A strategy that cannot run has a reason instead of a result. Two-stage has a row only for several nodes of several
    devices. If the job leaves recomputation open, FSDP has further rows as scripts run it (`as_scripts_run`). If the
    job allows fewer bits on the wire, OSDP and the strategy asked for use them and have a second row, `exact`, without
    them.

    Args:
        problem: the problem of the model without splits.
        split: description of the split model, which OSDP takes instead.
        other: the model with compiled blocks (or eager blocks, if the problem's are compiled), which adds rows.
    """
    several = 1 < problem.hardware.devices_per_node < problem.hardware.world_size
    blocks = "eager" if problem.description.compiled_classes else "compiled"
    rows = []
    for one in Strategy:
        if several or one is not Strategy.TWO_STAGE:
            asked = replace(
                problem, strategy=one, description=split if split and one is Strategy.OSDP else problem.description
            )
            exact = replace(asked, job=replace(asked.job, communication=None))
            if exact != asked and one in (problem.strategy, Strategy.OSDP):
                rows += [best_of(asked), best_of(exact, "exact")]
            else:
                rows.append(best_of(exact))
        if other is not None and one is problem.strategy:
            rows.append(best_of(replace(problem, description=other), blocks))
        if one is Strategy.FSDP and problem.job.recompute is None:
            for model, kind in ((problem.description, ""), (other, f"{blocks}, ")):
                if model is not None and model.recomputable:
                    run = replace(problem, strategy=one, description=model)
                    rows.append(best_of(as_scripts_run(run, recompute=False), f"{kind}as it comes"))
                    rows.append(best_of(as_scripts_run(run, recompute=True), f"{kind}all recomputed"))
    return tuple(rows)


def as_scripts_run(problem: PlanningProblem, *, recompute: bool) -> PlanningProblem:
    """Return the problem of a script without a planner: all blocks recomputed or none, nothing on the host unless the
    job requires it.

    Without recomputation it has the defaults of Accelerate's FSDP2, which reduces gradients in the compute dtype.
    """
    job, precision = problem.job, problem.job.precision
    fixed = replace(
        job, recompute=recompute, host_offload=bool(job.host_offload), offload_optimizer=bool(job.offload_optimizer),
        offload_activations=bool(job.offload_activations),
        communication=None, precision=precision if recompute else replace(precision, reduce=None),
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


def frontier(problem: PlanningProblem, *, points: int = POINTS, at: Sequence[int] = ()) -> tuple[SearchResult, ...]:
    """Return points of the Pareto front of peak memory and throughput, by rising peak, up to the problem's limit.

    Each point is the fastest plan under some limit (the ε-constraint method: Haimes, Lasdon, Wismer 1971). The next
    limit is the geometric mean of the two limits whose gap has the largest product of memory and throughput, by
    ratios. Limits are without margin here.

    Args:
        problem: the problem, whose limit is the right end of the front.
        points: the most searches.
        at: further limits to search, such as the peaks of other plans, so that the front is not below these plans.

    Raises:
        InfeasibleError: no plan fits the problem's limit.
        ValueError: fewer than two points, or an error of `search`.
    """
    if points < 2:
        raise ValueError(f"points={points} must be at least 2, the two ends of the front.")
    problem = replace(problem, hardware=problem.hardware.with_margin(0.0), simplicity=0.0)

    def fastest(limit: int) -> tuple[int, SearchResult]:
        return limit, search(replace(problem, memory_limit_bytes=limit))

    last, least = fastest(problem.memory_limit_bytes), least_memory(problem)
    known = [fastest(least), last]
    for limit in at:
        gaps = (
            gap for gap, ((low, _), (_, high)) in enumerate(itertools.pairwise(known)) if low < limit < high.peak_bytes
        )
        if (gap := next(gaps, None)) is not None:
            known.insert(gap + 1, fastest(limit))
    for _ in range(points - 2):
        sizes = [_unknown(low, below, above) for (low, below), (_, above) in itertools.pairwise(known)]
        if not any(sizes):
            break
        gap = sizes.index(max(sizes))
        known.insert(gap + 1, fastest(int(math.sqrt(known[gap][0] * known[gap + 1][1].peak_bytes))))
    return not_dominated([result for _, result in known])


def _unknown(low_bytes: int, below: SearchResult, above: SearchResult) -> float:
    """Return the area, by ratios, in which the front may lie between a limit and a later plan; 0 if it is too
    narrow to search.
    """
    memory, rate = above.peak_bytes / low_bytes, below.time.step_s / above.time.step_s
    return 0.0 if memory < _NEAR or rate <= 1 else math.log(memory) * math.log(rate)


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

    Splits save memory. They are tried only if the limit slows the plain model down, or if blocks are compiled, because
    a loss in pieces is then compiled too. Single strategies take the plain model. A split for which `describe` raises
    a DescriptionError is left out.
    """
    plain = problem.description
    if problem.strategy is not Strategy.OSDP:
        return plain
    best, chosen = _rank(problem), plain
    if not best[0] and not plain.compiled_classes and best[1] <= _NEAR * fastest_without_limit(problem):
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
