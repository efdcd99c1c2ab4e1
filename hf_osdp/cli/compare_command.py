"""`hf-osdp compare`: all strategies side by side, and the Pareto front of memory and throughput."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..planner.problem import Strategy
from ..planner.search.frontier import POINTS, frontier
from .cases import case_of, plain_of
from .options import JsonFile, PlotFile, Request
from .output import Output
from .plan_command import check_outputs


def compare(
    request: Request,
    points: Annotated[int, typer.Option(min=2, metavar="N", help="Points of the front, each one search.")] = POINTS,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Set every strategy at its own best batch beside OSDP, and show what more or less memory would buy."""
    screen = Output(json_file)
    check_outputs(None, plot)
    with screen.working("Describing the model"):
        case, config, request = case_of(request)
        plain = case.description if case.description.cut.is_none else plain_of(request, case.hardware, config)
    from ..planner.search.search import compare_strategies
    from ..report.content import comparison_content
    from ..report.tables import comparison_table, frontier_table

    with screen.working("Searching"):
        rows = compare_strategies(replace(case, description=plain), cut=case.description)
        peaks = [row.result.plan.peak_bytes for row in rows if row.result is not None]
        front = frontier(
            replace(case, memory_limit_bytes=case.hardware.room_bytes(case.hardware.device.memory_bytes), strategy=Strategy.OSDP),
            points=points,
            at=[case.room_bytes, *peaks],
        )
    screen.print(comparison_table(rows, case.memory_limit_bytes), frontier_table(front, case.room_bytes))
    screen.print(f"Estimated for {case.hardware.summary}; activations: {case.description.trace}.")
    if plot is not None:
        from ..report.plots import frontier_chart, save_chart

        title = f"{case.description.model_name} on {case.hardware.summary}: fastest plan for each amount of memory"
        save_chart(frontier_chart(title, front, rows, case.room_bytes), plot)
        screen.print(f"Plot: {plot}")
    screen.write(comparison_content(case.hardware, case.memory_limit_bytes, rows, front))
