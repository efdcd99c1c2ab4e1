"""`hf-osdp plan`, `explain` and `compare`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..planner.problem import Strategy
from ..planner.search.compare import frontier
from ..quantities import format_seconds
from ..report.content import comparison_content, outcome_content, report_content
from ..report.explain import explain as explain_plan
from ..report.explain import prove
from ..report.explanations import explanation_parts, proof_lines
from ..report.plan_file import PlanInputs, plan_file_content, read_plan_file, write_json
from ..report.tables import comparison_table, plan_parts
from .cases import Case
from .options import JsonFile, PlotFile, Request, option
from .output import Output

_NEXT = (
    "Next: `hf-osdp compare` shows what other strategies reach; `--output PLAN` writes the plan, which"
    " `hf-osdp explain PLAN` explains and OSDPConfig(plan=PLAN) runs."
)


def plan(
    request: Request,
    output: Annotated[
        Path | None, option("FILE", "Write the plan, for OSDPConfig(plan=FILE) and for `hf-osdp explain FILE`.")
    ] = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Find the fastest plan that fits: a layout for each unit, and the micro-batch size.

    Needs no device and no weights.
    """
    screen = Output(json_file, plot=plot, output=output)
    started = time.perf_counter()
    with screen.working("Describing the model, searching"):
        case = Case(request)
        found, problem = case.found.plan, case.found.problem
    content = report_content(found, PlanInputs.of(problem), planning_s=time.perf_counter() - started)
    if output is not None:
        write_json(plan_file_content(found, PlanInputs.of(problem)), output)
    del content["inputs"]  # --output has them
    planned = f"Planned for {problem.hardware.summary} in {format_seconds(content['planning_s'])}, precision"
    screen.print(
        *plan_parts(content),
        f"{planned} {case.precision}; activations: {problem.description.trace}.",
        _NEXT if output is None else f"Plan: {output}",
    )
    screen.write(content)


def explain(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A file from `hf-osdp plan --output`, or a run's osdp_report.json.")
    ],
    proof: Annotated[
        bool, typer.Option("--proof", help="Print what is proven instead: bound, gap, moments at the limit.")
    ] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Explain a plan: bytes at the peak and by unit, seconds by stream, the cost of other layouts, the bottleneck."""
    if proof and plot is not None:
        raise ValueError("--proof has no chart; leave out --plot, or --proof.")
    screen = Output(json_file, plot=plot)
    with screen.working("Explaining the plan"):
        found, inputs = read_plan_file(plan_file)
        if inputs is None:
            raise ValueError(
                f"{plan_file} holds only a plan; give a file from `hf-osdp plan --output`, or a run's"
                " osdp_report.json, which also hold the plan's inputs."
            )
        if proof and (inputs.hardware is None or found.memory_limit_bytes is None):
            raise ValueError(f"{plan_file} has no hardware or no limit to prove; plan with `hf-osdp plan`.")
        content = prove(found, inputs) if proof else explain_plan(found, inputs)
    content.pop("inputs", None)  # the file has them
    screen.print(*(proof_lines(content) if proof else explanation_parts(content)))
    screen.write(content)


def compare(request: Request, json_file: JsonFile = None, plot: PlotFile = None) -> None:
    """Compare OSDP with every other strategy, each at its own best batch; --plot also draws the throughput for more
    or less memory.
    """
    screen = Output(json_file, plot=plot)
    with screen.working("Describing the model and searching"):
        case = Case(request)
        problem, rows = case.found.problem, list(case.found.compared())
    hardware, content = problem.hardware, comparison_content(problem, rows)
    screen.print(
        comparison_table(content),
        f"Estimated for {hardware.summary}, precision {case.precision}; activations: {problem.description.trace}.",
    )
    if plot is not None:
        most = hardware.room_bytes(hardware.device.memory_bytes)
        single = case.found.of_single_blocks
        asked = replace(problem, description=single, memory_limit_bytes=most, strategy=Strategy.OSDP)
        with screen.working("Searching for more and less memory"):
            others = [row.result for row in rows if row.result is not None]
            front = frontier(asked, others, blocks_per_unit=case.found.builder.blocks_per_unit)
        content["front"] = [outcome_content(result.plan) for result in front]
    screen.write(content)
