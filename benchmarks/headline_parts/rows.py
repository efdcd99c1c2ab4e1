"""What was planned and measured of one entry."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.headline_parts.lineup import Entry, Lineup, layout_text, recomputed, run_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps of one plan that really ran."""

    steps_s: tuple[float, ...] = ()
    """Timed steps; of rounds in which every plan took one, where they were interleaved. Empty where memory did not suffice."""
    peak_bytes: int | None = None
    """Most bytes that tensors had at once, on the fullest rank."""
    estimated_s: tuple[float, ...] = ()
    """Estimates from profiles that were taken between the rounds; empty where the plan's own stands."""

    @property
    def out_of_memory(self) -> bool:
        return not self.steps_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender at one batch."""

    case: str
    experiment: int
    rule: str
    contender: str
    baseline: bool
    limit_bytes: int
    run: str | None
    """Names the plan: equal ones are one run. None where nothing fits."""
    layout: str = ""
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    global_batch_size: int | None = None
    recomputed_units: int | None = None
    host_bytes: int = 0
    needs_bytes: int | None = None
    estimated_peak_bytes: int | None = None
    estimated_step_s: float | None = None
    """As the plan was chosen by; what stands beside a measurement is `measured_estimate_s`."""
    estimated_gain: float | None = None
    """Samples a second over the baseline's at the same rule, by estimate."""
    measured_peak_bytes: int | None = None
    steps_s: tuple[float, ...] = ()
    """Timed steps; where plans took turns, the n-th of each is of the same round."""
    measured_step_s: float | None = None
    """Their median."""
    fastest_step_s: float | None = None
    slowest_step_s: float | None = None
    measured_estimate_s: float | None = None
    measured_gain: float | None = None
    """As measured: the median over rounds in which both took a step."""
    out_of_memory: bool = False

    def rate(self, seconds: float | None) -> float | None:
        """Samples a second."""
        return None if seconds is None or self.global_batch_size is None else self.global_batch_size / seconds


def rows_of(lineup: Lineup, measured: Mapping[str, Measured] | None = None) -> tuple[Row, ...]:
    """A row an entry, in its order.

    Args:
        lineup: the plans.
        measured: of each distinct plan by `run_name`; None where nothing was.
    """
    rows = []
    for entry in lineup.entries:
        base = next((e for e in lineup.entries if e.rule is entry.rule and e.contender.baseline), None)
        rows.append(_row(lineup, entry, base, measured or {}))
    return tuple(rows)


def _row(lineup: Lineup, entry: Entry, base: Entry | None, measured: Mapping[str, Measured]) -> Row:
    about: dict[str, Any] = {
        "case": lineup.case.name, "experiment": lineup.case.experiment, "rule": entry.rule.value, "contender": entry.contender.name,
        "baseline": entry.contender.baseline, "limit_bytes": lineup.limit_bytes,
    }  # fmt: skip
    plan = entry.plan
    if plan is None:
        return Row(**about, run=None, needs_bytes=entry.needs_bytes)
    planned = {
        "run": run_name(plan), "layout": layout_text(plan), "micro_batch_size": plan.micro_batch_size,
        "accumulation_steps": plan.accumulation_steps, "global_batch_size": plan.global_batch_size,
        "recomputed_units": recomputed(plan), "host_bytes": entry.host_bytes, "estimated_peak_bytes": plan.peak_bytes,
        "estimated_step_s": plan.step_s,
    }  # fmt: skip
    other = None if base is None else base.plan
    if other is not None:
        planned["estimated_gain"] = plan.samples_per_s / other.samples_per_s
    found = measured.get(run_name(plan))
    return Row(**about, **planned, **({} if found is None else _seen(found, plan, other, measured)))


def _seen(found: Measured, plan: Any, other: Any, measured: Mapping[str, Measured]) -> dict[str, Any]:
    if found.out_of_memory:
        return {"out_of_memory": True}
    seen: dict[str, Any] = {
        "steps_s": found.steps_s, "measured_peak_bytes": found.peak_bytes, "measured_step_s": statistics.median(found.steps_s),
        "fastest_step_s": min(found.steps_s), "slowest_step_s": max(found.steps_s),
        "measured_estimate_s": statistics.median(found.estimated_s) if found.estimated_s else plan.step_s,
    }  # fmt: skip
    base = None if other is None else measured.get(run_name(other))
    if base is not None and not base.out_of_memory:
        samples = plan.global_batch_size / other.global_batch_size
        seen["measured_gain"] = samples * statistics.median(ratios(base.steps_s, found.steps_s))
    return seen


def ratios(base: Sequence[float], own: Sequence[float]) -> list[float]:
    """Round by round where there are as many, else of the medians."""
    if len(base) != len(own):
        return [statistics.median(base) / statistics.median(own)]
    return [one / other for one, other in zip(base, own, strict=True)]
