"""Rows with the estimates and measurements of entries."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .lineup import Entry, Lineup, layout_text, recomputed, run_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured steps of one plan."""

    steps_s: tuple[float, ...] = ()
    """Seconds of the timed steps; the n-th is of round n if plans were interleaved.

    Empty if memory did not suffice.
    """
    peak_bytes: int | None = None
    """Peak bytes of tensors, on the rank with the most."""

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
    """Name of the plan; equal plans share a run. None if nothing fits."""
    layout: str = ""
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    global_batch_size: int | None = None
    recomputed_units: int | None = None
    host_bytes: int = 0
    needs_bytes: int | None = None
    estimated_peak_bytes: int | None = None
    estimated_step_s: float | None = None
    """Estimate by which the plan was chosen; measurements are compared with `measured_estimate_s`."""
    estimated_gain: float | None = None
    """Estimated samples per second divided by the baseline's at the same rule."""
    measured_peak_bytes: int | None = None
    steps_s: tuple[float, ...] = ()
    """Seconds of the timed steps; the n-th is of round n if plans were interleaved."""
    measured_step_s: float | None = None
    """Median of `steps_s`."""
    fastest_step_s: float | None = None
    slowest_step_s: float | None = None
    measured_estimate_s: float | None = None
    measured_gain: float | None = None
    """Measured gain: the median over rounds in which both took a step."""
    out_of_memory: bool = False

    def rate(self, seconds: float | None) -> float | None:
        """Return the samples per second."""
        return None if seconds is None or self.global_batch_size is None else self.global_batch_size / seconds


def rows_of(lineup: Lineup, measured: Mapping[str, Measured] | None = None) -> tuple[Row, ...]:
    """Return one row per entry, in order.

    Args:
        lineup: the plans.
        measured: results of each distinct plan by `run_name`; None if nothing was measured.
    """
    rows = []
    for entry in lineup.entries:
        base = next((e for e in lineup.entries if e.rule is entry.rule and e.contender.baseline), None)
        rows.append(_row(lineup, entry, base, measured or {}))
    return tuple(rows)


def _row(lineup: Lineup, entry: Entry, base: Entry | None, measured: Mapping[str, Measured]) -> Row:
    about: dict[str, Any] = {
        "case": lineup.case.name, "experiment": lineup.case.experiment, "rule": entry.rule.value,
        "contender": entry.contender.name,
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
        "steps_s": found.steps_s, "measured_peak_bytes": found.peak_bytes,
        "measured_step_s": statistics.median(found.steps_s),
        "fastest_step_s": min(found.steps_s), "slowest_step_s": max(found.steps_s),
        "measured_estimate_s": plan.step_s,
    }  # fmt: skip
    base = None if other is None else measured.get(run_name(other))
    if base is not None and not base.out_of_memory:
        samples = plan.global_batch_size / other.global_batch_size
        seen["measured_gain"] = samples * statistics.median(ratios(base.steps_s, found.steps_s))
    return seen


def ratios(base: Sequence[float], own: Sequence[float]) -> list[float]:
    """Return ratios per round if both have the same number of rounds, else the ratio of medians."""
    if len(base) != len(own):
        return [statistics.median(base) / statistics.median(own)]
    return [one / other for one, other in zip(base, own, strict=True)]
