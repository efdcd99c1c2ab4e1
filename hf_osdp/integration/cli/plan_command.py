"""`hf-osdp plan`: the fastest plan that fits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .cases import case_of, device_type_of
from .options import JsonFile, PlotFile, Request
from .output import Output, check_folder


def plan(
    request: Request,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the plan, to run with OSDPConfig(plan=FILE) and for `explain FILE`."),
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Run FSDP2's real step on fake tensors and compare its memory.")] = False,
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
    with screen.working("Describing the model and searching"):
        case, config = case_of(request)
        found = case.search()
    planning_s = time.perf_counter() - started
    from ...planner.evaluate import estimate_plan
    from ...quantities import format_seconds
    from ...report.plan_file import PlanInputs, plan_file_content, write_json
    from ...report.run_report import report_content
    from ...report.tables import plan_caption, plan_table

    estimate = estimate_plan(found.plan, case.description, case.job, case.hardware)
    screen.print(plan_table(found.plan, case.description, estimate), *plan_caption(found.plan, estimate))
    screen.print(f"Planned for {case.hardware.summary} in {format_seconds(planning_s)}; activations: {case.description.trace}.")
    content = report_content(
        plan=found.plan, description=case.description, estimate=estimate, hardware=case.hardware, comparison=None,
        planning_s=planning_s, measured=None,
    )  # fmt: skip
    if simulate:
        content["simulated"] = _simulated(screen, request, case, config, found.plan, estimate)
    if output is not None:
        inputs = PlanInputs(description=case.description, job=case.job, hardware=case.hardware)
        write_json(plan_file_content(found.plan, inputs), output)
        screen.print(f"Plan: {output}")
    if plot is not None:
        from ...report.explain import stream_times

        draw_plan(plot, found.plan, estimate, case.hardware, stream_times(found.plan, case.description, case.job, case.hardware))
        screen.print(f"Plot: {plot}")
    screen.write(content)


def check_outputs(output: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written, before anything is computed.

    Raises:
        ValueError: a folder is missing, or the plot's format is not known.
    """
    if output is not None:
        check_folder(output, "--output")
    if plot is not None:
        from ...report.plots import check_plot_path

        check_plot_path(plot)


def draw_plan(path: Path, plan, estimate, hardware, streams) -> None:
    """Memory over the step, and time by stream where the hardware is known."""
    from ...report.plots import plan_chart, save_chart

    reserved = 0 if hardware is None else hardware.device.reserved_bytes
    title = f"{plan.model_name}, {plan.strategy} on {plan.hardware or f'{plan.world_size} devices'}"
    save_chart(plan_chart(title, estimate.memory, reserved, plan.memory_limit_bytes, streams), path)


def _simulated(screen: Output, request: Request, case, config, plan, estimate) -> dict:
    """Estimate beside simulation."""
    from ...quantities import format_bytes, format_seconds
    from ...report.explain_tables import simulation_table
    from ...report.plan_file import plain
    from ...runtime.simulate import simulate

    with screen.working("Simulating a step"):
        simulation = simulate(
            config, plan, description=case.description, job=case.job, device_type=device_type_of(case.hardware),
            auto_class=request.auto_class, activation_checkpointing=request.activation_checkpointing,
        )  # fmt: skip
    screen.print(simulation_table(estimate.memory.peak, simulation.peak_bytes, simulation.breakdown))
    screen.print(f"Simulated FSDP2's step on fake tensors in {format_seconds(simulation.seconds)}.")
    over = simulation.peak_bytes + case.hardware.device.reserved_bytes - case.memory_limit_bytes
    if over > 0:
        screen.print(f"The simulated peak is {format_bytes(over)} over the limit: plan again with a limit that is lower by as much.")
    return plain(simulation)
