"""Print the plan before a run, and estimate and measurement after it, on rank 0."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from ..distributed.mesh import rank
from ..measurement.step_meter import Observation
from ..planner.cost.evaluate import PlanEstimate
from ..planner.files import plain
from ..planner.hardware import Collective
from ..preparation.cache import MEASURED_EARLIER
from ..preparation.job import Job
from ..preparation.plan_run import PlannedRun, plan_run
from ..quantities import format_seconds
from ..report.content import report_content, write_report
from ..report.run_tables import Outcome, outcome_table, trials_table
from ..report.tables import comparison_table, plan_caption, plan_table

_WIDTH = 100
"""Columns if the output is not a terminal."""


def plan_and_announce(model: nn.Module, job: Job) -> PlannedRun:
    """Plan as `plan_run`, with a status line on rank 0's terminal if it has one; then print the plan on rank 0.

    Collective.
    """
    status: AbstractContextManager[object] = nullcontext()
    if rank() == 0 and sys.stderr.isatty():
        text = "Describing the model, measuring the machine, searching for a plan"
        status = Console(stderr=True, force_jupyter=False).status(
            text, refresh_per_second=2
        )  # a thread redraws it while measurements run
    with status:
        run = plan_run(model, job)
    announce_plan(run)
    return run


def announce_plan(run: PlannedRun) -> None:
    """Print the plan, other strategies, plans that were tried, and the findings of the preflight checks, on rank 0."""
    if rank():
        return
    console, description, estimate = _console(), run.inputs.description, run.inputs.estimate(run.plan)
    if run.rounds:
        console.print(trials_table(_rounds_content(run)))
    console.print(
        plan_table(run.plan, description, estimate), *plan_caption(run.plan, estimate, run.hardware), sep="\n"
    )
    if run.comparison is not None and run.plan.memory_limit_bytes is not None:
        console.print("", comparison_table(run.comparison, run.plan.memory_limit_bytes), sep="\n")
    if run.gain is not None:
        console.print(run.gain.line)
    where = "" if run.hardware is None else f" for {run.hardware.summary}"
    console.print(f"Planned{where} in {format_seconds(run.planning_s)}; activations: {description.trace}.")
    if run.hardware is not None:
        console.print(f"Times of blocks: {description.timing.rstrip('.')}.")
    if run.hardware is not None and run.hardware.device.source.startswith(MEASURED_EARLIER):
        console.print(f"The machine was {run.hardware.device.source}.")
    for finding in run.findings:
        console.print(finding.line, soft_wrap=True)


def announce_result(run: PlannedRun, measured: Observation, output_dir: str | Path | None) -> None:
    """Print estimated and measured peak, step time and collectives on rank 0; write `osdp_report.json` if a folder
    is given.
    """
    if rank():
        return
    console, estimate = _console(), run.inputs.estimate(run.plan)
    nbytes: list[Outcome] = [
        ("peak memory", estimate.memory.peak_bytes, measured.peak_bytes)
    ]  # of tensors, as measured
    if measured.reserved_bytes:
        nbytes.append(("peak reserved", None, measured.reserved_bytes))
    step_s = run.plan.step_s if estimate.time is None else estimate.time.step_s
    seconds: list[Outcome] = [
        ("step time", step_s, measured.median_step_s),
        ("first step", None, measured.first_step_s),
    ]
    console.print(outcome_table(nbytes, [*seconds, *_collectives(estimate, measured)]))
    if output_dir is None:
        return
    content = report_content(
        run.plan,
        run.inputs,
        estimate,
        planning_s=run.planning_s,
        comparison=run.comparison,
        measured=plain(measured),
        recalibration=_rounds_content(run),
    )
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        console.print(f"Report: {write_report(content, output_dir)}")
    except OSError as error:  # in the midst of a training, which goes on
        console.print(f"The report could not be written into {output_dir} ({error.strerror}).")


def _rounds_content(run: PlannedRun) -> list[dict[str, object]]:
    return [
        {
            "plan": past.plan.fingerprint,
            "estimated": {"peak_bytes": past.estimated_peak_bytes, "step_s": past.estimated_step_s},
            "measured": plain(past.observed),
            "correction": plain(past.correction),
            "fits": past.fits,
            "runs": past.plan.fingerprint == run.plan.fingerprint,
        }
        for past in run.rounds
    ]


def _collectives(estimate: PlanEstimate, measured: Observation) -> list[Outcome]:
    """Return the name and the estimated and measured seconds per step of each collective that the plan uses."""
    rows = []
    for kind in Collective:
        estimated = None if estimate.collectives is None else estimate.collectives[kind]
        measured_s = (
            sum(total.seconds for total in measured.collectives if total.collective is kind)
            if measured.collectives
            else None
        )
        if estimated or measured_s:
            rows.append((kind.value.replace("_", "-"), estimated, measured_s))
    return rows


def _console() -> Console:
    """Return the console for a run's tables; rich's notebook output does not work in processes that a notebook
    forks.
    """
    options: dict[str, Any] = {} if sys.stdout.isatty() else {"width": _WIDTH, "force_terminal": False}
    return Console(
        force_jupyter=False, markup=False, emoji=False, highlight=False, **options
    )  # print model names literally
