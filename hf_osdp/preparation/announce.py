"""Print the plan before a run, and estimate and measurement after it, on rank 0."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from ..distributed.mesh import rank
from ..measurement.step_meter import Observation
from ..planner.files import plain
from ..quantities import format_seconds
from ..report.content import REPORT_FILE, Content, report_content
from ..report.plan_file import write_json
from ..report.tables import comparison_table, outcome_table, plan_lines, plan_table
from .job import Job
from .plan_run import PlannedRun, plan_run

_WIDTH = 100
"""Columns if the output is not a terminal."""


def plan_and_announce(model: nn.Module, job: Job) -> PlannedRun:
    """Plan as `plan_run`, with a status line on rank 0's terminal if it has one; then print the plan on rank 0.

    Collective.
    """
    text = "Describing the model, measuring the machine, searching for a plan"
    shows = rank() == 0 and sys.stderr.isatty()
    console = Console(stderr=True, force_jupyter=False)
    # a thread redraws it while measurements run
    with console.status(text, refresh_per_second=2) if shows else nullcontext():
        run = plan_run(model, job)
    announce_plan(run)
    return run


def announce_plan(run: PlannedRun) -> None:
    """Print the plan and the findings of the preflight checks, on rank 0; `hf-osdp explain` has the details."""
    if rank():
        return
    console, content = _console(), _content(run)
    console.print(plan_table(content), *plan_lines(content, proof=False), sep="\n")
    if run.comparison is not None and run.plan.memory_limit_bytes is not None:
        console.print("", comparison_table({**content, "memory_limit_bytes": run.plan.memory_limit_bytes}), sep="\n")
    planned = f" in {format_seconds(run.planning_s)}"
    if run.hardware is not None:
        planned = f" for {run.hardware.summary}{planned}; times of blocks: {run.inputs.description.timing.rstrip('.')}"
    console.print(f"Planned{planned}.")
    if run.evaluation is not None:
        console.print(run.evaluation.line, soft_wrap=True)
    if run.budget is not None:
        console.print(
            "Samples of a step are sorted by length and cut into micro-batches of at most"
            f" {run.budget.tokens:,} tokens, padding included.", soft_wrap=True,
        )  # fmt: skip
    for finding in run.findings:
        console.print(f"warning: {finding.message}", soft_wrap=True)


def announce_result(run: PlannedRun, measured: Observation, output_dir: str | Path | None) -> None:
    """Print estimated and measured peak and step time on rank 0; write `osdp_report.json` if a folder is given."""
    if rank():
        return
    console, content = _console(), _content(run, measured=plain(measured))
    console.print(outcome_table(content))
    if output_dir is None:
        return
    try:
        (path := Path(output_dir) / REPORT_FILE).parent.mkdir(parents=True, exist_ok=True)
        write_json(content, path)
        console.print(f"Report: {path}")
    except OSError as error:  # in the midst of a training, which goes on
        console.print(f"The report could not be written into {output_dir} ({error.strerror}).")


def _content(run: PlannedRun, **measured: Any) -> Content:
    return report_content(run.plan, run.inputs, planning_s=run.planning_s, comparison=run.comparison, **measured)


def _console() -> Console:
    """Return the console for a run's tables; rich's notebook output does not work in processes that a notebook
    forks.
    """
    options: dict[str, Any] = {} if sys.stdout.isatty() else {"width": _WIDTH, "force_terminal": False}
    return Console(
        force_jupyter=False, markup=False, emoji=False, highlight=False, **options
    )  # print model names literally
