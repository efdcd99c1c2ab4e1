"""`hf-osdp plan`: the fastest plan that fits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..planner.problem import PlanningProblem
from ..planner.search.search import SearchResult, search
from .cases import case_of, device_type_of, model_of
from .options import JsonFile, PlotFile, Request
from .output import Output, check_folder

if TYPE_CHECKING:
    from ..planning.simulated_search import SimulatedRound


def plan(
    request: Request,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the plan, to run with OSDPConfig(plan=FILE) and for `explain FILE`."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run FSDP2's real step on fake tensors; plan again where it passes the limit.")
    ] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Find the fastest plan that fits: a layout for each unit, and the batch with it. Needs no device and no weights.

    hf-osdp plan gpt2-xl --memory-limit 16GiB --device a100-80 --devices-per-node 8 --sequence-length 1024
    --global-batch-size 64 --precision bf16 --output plan.json
    """
    screen = Output(json_file)
    check_outputs(output, plot)
    started = time.perf_counter()
    with screen.working("Describing the model, searching" + (" and simulating" if simulate else "")):
        case, config, request = case_of(request)
        rounds = _rounds(request, case, config) if simulate else ()
        if rounds:
            case = replace(case, job=rounds[-1].job)
        found = rounds[-1].found if rounds else search(case)
    content = _show(screen, case, found, rounds, time.perf_counter() - started)
    if output is not None:
        from ..report.plan_file import PlanInputs, plan_file_content, write_json

        inputs = PlanInputs(description=case.description, job=case.job, hardware=case.hardware)
        write_json(plan_file_content(found.plan, inputs), output)
        screen.print(f"Plan: {output}")
    if plot is not None:
        from ..planner.cost.evaluate import estimate_plan
        from ..report.explain import stream_times

        estimate = estimate_plan(found.plan, case.description, case.job, case.hardware)
        draw_plan(plot, found.plan, estimate, case.hardware, stream_times(found.plan, case.description, case.job, case.hardware))
        screen.print(f"Plot: {plot}")
    screen.write(content)


def _rounds(request: Request, case: PlanningProblem, config: Any) -> tuple[SimulatedRound, ...]:
    """Search, simulate, and search again where the simulation passes the limit."""
    from ..planning.simulated_search import search_and_simulate

    return search_and_simulate(
        model_of(request, config),
        case,
        device_type=device_type_of(case.hardware),
        activation_checkpointing=request.activation_checkpointing,
    )


def _show(screen: Output, case: PlanningProblem, found: SearchResult, rounds: Sequence[SimulatedRound], planning_s: float) -> dict:
    """Print the plan, and what its simulation says; gives the same for machines."""
    from ..planner.cost.evaluate import estimate_plan
    from ..planner.files import plain
    from ..quantities import format_bytes, format_seconds
    from ..report.content import report_content
    from ..report.plan_file import PlanInputs
    from ..report.run_tables import simulation_table
    from ..report.tables import plan_caption, plan_table

    estimate = estimate_plan(found.plan, case.description, case.job, case.hardware)
    screen.print(plan_table(found.plan, case.description, estimate), *plan_caption(found.plan, estimate, case.hardware))
    screen.print(f"Planned for {case.hardware.summary} in {format_seconds(planning_s)}; activations: {case.description.trace}.")
    inputs = PlanInputs(description=case.description, job=case.job, hardware=case.hardware)
    content = report_content(found.plan, inputs, estimate, planning_s=planning_s)
    del content["inputs"]  # they are in the file of --output
    for earlier in rounds[:-1]:
        over = earlier.peak_on(case.hardware) - case.room_bytes
        screen.print(f"Plan {earlier.found.plan.fingerprint} was given up: its simulated peak is {format_bytes(over)} over the limit.")
    if rounds:
        last = rounds[-1].simulation
        screen.print("", simulation_table(estimate.memory.peak, last.peak_bytes, last.breakdown))
        screen.print(f"Simulated FSDP2's step on fake tensors in {format_seconds(last.seconds)}.")
        content["simulated"] = [{"fingerprint": r.found.plan.fingerprint, **plain(r.simulation)} for r in rounds]
    return content


def check_outputs(output: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written, before anything is computed.

    Raises:
        ValueError: a folder is missing, or the plot's format is not known.
    """
    if output is not None:
        check_folder(output, "--output")
    if plot is not None:
        from ..report.plots import check_plot_path

        check_plot_path(plot)


def draw_plan(path: Path, plan, estimate, hardware, streams) -> None:
    """Memory over the step, and time by stream where the hardware is known."""
    from ..report.plots import plan_chart, save_chart

    reserved = 0 if hardware is None else hardware.outside_bytes(estimate.memory.communicators)
    title = f"{plan.model_name}, {plan.strategy} on {plan.hardware or f'{plan.world_size} devices'}"
    save_chart(plan_chart(title, estimate.memory, reserved, plan.memory_limit_bytes, streams), path)
