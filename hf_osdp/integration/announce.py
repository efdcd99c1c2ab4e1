"""What a person sees of a run, on rank 0: the plan before it, the estimate beside the measurement after it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ..planner.evaluate import PlanEstimate, estimate_plan
from ..quantities import format_seconds
from ..report.run_report import REPORT_FILE, report_content, write_report
from ..report.tables import comparison_table, outcome_table, plan_caption, plan_table
from ..runtime.measure import StepSummary
from .planning import PlannedRun

__all__ = ["REPORT_FILE", "announce_plan", "announce_result"]

_WIDTH = 100
"""Columns where the output is no terminal."""


def announce_plan(run: PlannedRun, *, is_rank_zero: bool) -> None:
    """Print the plan, with the other strategies beside it where they were estimated."""
    if not is_rank_zero:
        return
    console, estimate = _console(), _estimate(run)
    console.print(plan_table(run.plan, run.description, estimate))
    for line in plan_caption(run.plan, estimate):
        console.print(line, highlight=False)
    if run.comparison is not None and run.memory_limit_bytes is not None:
        console.print()
        console.print(comparison_table(run.comparison, run.memory_limit_bytes))
    where = "" if run.hardware is None else f" for {run.hardware.summary}"
    console.print(f"Planned{where} in {format_seconds(run.planning_s)}; activations: {run.description.trace}.", highlight=False)


def announce_result(run: PlannedRun, measured: StepSummary, *, output_dir: str | Path, is_rank_zero: bool) -> None:
    """Print estimated beside measured peak and step time, and write `osdp_report.json`.

    Args:
        run: what was planned.
        measured: summary of the step meter.
        output_dir: an existing folder.
        is_rank_zero: whether this process reports.
    """
    if not is_rank_zero:
        return
    console, estimate = _console(), _estimate(run)
    console.print(
        outcome_table(
            estimated_peak=estimate.memory.peak_bytes,  # of tensors, as the measurement is
            measured_peak=measured.peak_bytes,
            estimated_step_s=run.plan.step_s if estimate.time is None else estimate.time.step_s,
            measured_step_s=measured.median_step_s,
        )
    )
    content = report_content(
        plan=run.plan,
        description=run.description,
        estimate=estimate,
        hardware=run.hardware,
        comparison=run.comparison,
        planning_s=run.planning_s,
        measured=asdict(measured),
        job=run.job,
    )
    path = write_report(content, output_dir)
    console.print(f"Report: {path}", highlight=False)


def _estimate(run: PlannedRun) -> PlanEstimate:
    return estimate_plan(run.plan, run.description, run.job, run.hardware)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
