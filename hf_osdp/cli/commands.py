"""`hf-osdp plan`, `explain`, `compare`, `doctor` and `convert`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..planner.files import plain
from ..planner.problem import Strategy
from ..planner.search.compare import POINTS, frontier
from ..quantities import format_bytes, format_seconds
from ..report.content import comparison_content, explanation_content, report_content
from ..report.explain import explain as explain_plan
from ..report.explain_tables import explanation_tables
from ..report.plan_file import PlanInputs, plan_file_content, read_plan_file, write_json
from ..report.run_tables import checks_table
from ..report.tables import batch_text, comparison_table, frontier_table, plan_caption, plan_table, rates_line
from .cases import Case
from .options import JsonFile, PlotFile, Request, count, option
from .output import Output
from .processes import AT_ONCE, searching_processes

if TYPE_CHECKING:
    from ..preparation.simulate import SimulatedRound
    from ..report.plots import AnyChart

_RANKS = (
    "missing ranks, and ranks with other versions, models, plans or devices than rank 0: checked when a run starts"
)


def plan(
    request: Request,
    output: Annotated[
        Path | None, option("FILE", "Write the plan, for OSDPConfig(plan=FILE) and for `hf-osdp explain FILE`.")
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Run FSDP2's real step on fake tensors; plan again if its peak exceeds the limit."
        ),
    ] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Find the fastest plan that fits: a layout for each unit, and the micro-batch size.

    Needs no device and no weights.
    """
    screen = Output(json_file, plot=plot, output=output)
    started = time.perf_counter()
    rounds: tuple[SimulatedRound, ...] = ()
    with screen.working("Describing the model, searching" + (" and simulating" if simulate else "")):
        case = Case(request).check()
        found, problem = case.found.plan, case.found.problem
        if simulate:
            from ..preparation.simulate import search_and_simulate

            rounds = search_and_simulate(case.model, problem, device_type=case.device_type, images=case.config.images)
            found, problem = rounds[-1].found.plan, replace(problem, job=rounds[-1].job)
    planning_s = time.perf_counter() - started
    inputs = PlanInputs.of(problem)
    estimate = inputs.estimate(found)
    screen.print(plan_table(found, problem.description, estimate), *plan_caption(found, estimate, problem.hardware))
    screen.print(
        f"Planned for {problem.hardware.summary} in {format_seconds(planning_s)}; activations:"
        f" {problem.description.trace}."
    )
    screen.print(case.precision_line, rates_line(found, problem.description, problem.hardware))
    content = report_content(found, inputs, estimate, planning_s=planning_s)
    del content["inputs"]  # --output has them
    if rounds:
        content["simulated"] = [
            {"fingerprint": tried.found.plan.fingerprint, **plain(tried.simulation)} for tried in rounds
        ]
        for earlier in rounds[:-1]:
            over = format_bytes(earlier.peak_on(problem.hardware) - problem.room_bytes)
            screen.print(
                f"Plan {earlier.found.plan.fingerprint} was rejected: its simulated peak is {over} over the limit."
            )
        last = rounds[-1].simulation
        ours, theirs = estimate.memory.peak_bytes, last.peak_bytes
        screen.print(
            f"Peak of tensors: estimated {format_bytes(ours)}, simulated by FSDP2's step on fake tensors in"
            f" {format_seconds(last.seconds)} {format_bytes(theirs)} ({100 * (ours / theirs - 1):+.1f} %)."
        )
    if output is not None:
        write_json(plan_file_content(found, inputs), output)
        screen.print(f"Plan: {output}")
    _draw(screen, plot, lambda plots: plots.plan_chart(found, inputs, estimate))
    screen.write(content)


def _draw(screen: Output, path: Path | None, make: Callable[[ModuleType], AnyChart]) -> None:
    """Save the chart that `make` returns from the module `report.plots`, which needs an extra."""
    if path is not None:
        from ..report import plots

        plots.save_chart(make(plots), path)
        screen.print(f"Plot: {path}")


def explain(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A file from `hf-osdp plan --output`, or a run's osdp_report.json.")
    ],
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Explain a plan: bytes at the peak and by unit, seconds by stream, the cost of other layouts, the bottleneck."""
    screen = Output(json_file, plot=plot)
    with screen.working("Explaining the plan"):
        plan, inputs = read_plan_file(plan_file)
        if inputs is None:
            raise ValueError(
                f"{plan_file} holds only a plan; give a file from `hf-osdp plan --output`, or a run's"
                " osdp_report.json, which also"
                " hold the plan's inputs."
            )
        explanation = explain_plan(plan, inputs)
    where = "" if inputs.hardware is None else f" on {inputs.hardware.summary}"
    screen.print(
        f"Plan {plan.fingerprint} ({plan.strategy}) for {plan.model_name or inputs.description.model_class}{where},"
        f" {plan.sequence_length}"
        f" tokens per sample: {batch_text(plan)}.",
        *plan_caption(plan, explanation.estimate)[1:], f"Activations: {inputs.description.trace}.", "",
        *explanation_tables(explanation),
    )  # fmt: skip
    _draw(screen, plot, lambda plots: plots.plan_chart(plan, inputs, explanation.estimate))
    screen.write(explanation_content(explanation))


def compare(
    request: Request,
    points: Annotated[
        int, typer.Option(min=2, metavar="N", help="Points of the Pareto front; each needs one search.")
    ] = POINTS,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Compare OSDP with every other strategy, each at its own best batch, and show the throughput for more or less
    memory.
    """
    screen = Output(json_file, plot=plot)
    with screen.working("Describing the model and searching"):
        case = Case(request).check()
        problem = case.found.problem
        description, hardware = problem.description, problem.hardware
        table_of = partial(comparison_table, memory_limit_bytes=problem.memory_limit_bytes)
        rows = screen.growing(table_of, case.found.compared())
        results = [row.result for row in rows if row.result is not None]
        own = next((row.result for row in rows if row.label == Strategy.OSDP.value), None)
        whole = replace(
            problem, memory_limit_bytes=hardware.room_bytes(hardware.device.memory_bytes), strategy=Strategy.OSDP
        )
        known = {problem.room_bytes: own.fastest or own} if own else {}
        with searching_processes() as processes:
            front = frontier(
                whole, points=points, known=known, others=results, search_all=processes.map, at_once=AT_ONCE
            )
    if own is not None and own.plan.simplified:
        screen.print(f"Row osdp: simpler than the fastest plan: {own.plan.simplified}.")
    screen.print(frontier_table(front, problem.room_bytes))
    screen.print(f"Estimated for {hardware.summary}; activations: {description.trace}.", case.precision_line)
    title = f"{description.model_name} on {hardware.summary}: fastest plan for each amount of memory"
    _draw(screen, plot, lambda plots: plots.frontier_chart(title, front, rows, problem.room_bytes))
    screen.write(comparison_content(hardware, problem.memory_limit_bytes, rows, front))


def doctor(
    request: Request,
    output_dir: Annotated[Path | None, option("DIR", "Output folder of the run.")] = None,
    save_total_limit: Annotated[int | None, count("Checkpoints to keep in the output folder; default: all.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Check what would go wrong in a run, and print the remedies. Exit code 1 if a run would be stopped."""
    screen = Output(json_file)
    if save_total_limit is not None and output_dir is None:
        raise ValueError(
            f"--save-total-limit {save_total_limit} has no effect without --output-dir; give both, or neither."
        )
    with screen.working("Checking model, devices, plan and folder"):
        from ..preparation.job import RunFolder
        from .examination import examine, machine_line

        folder = (
            None
            if output_dir is None
            else RunFolder(path=output_dir, limit=save_total_limit, adapters=request.lora_rank is not None)
        )
        rows = [
            ("this machine", "ok", machine_line()),
            *examine(request, folder),
            ("ranks", "later", _RANKS),
        ]
    screen.print(checks_table(f"Before a run of {request.model}", rows))
    checks = [{"check": name, "result": result, "text": text} for name, result, text in rows]
    errors = sum(result == "error" for _, result, _ in rows)
    screen.write({"model": request.model, "errors": errors, "checks": checks})
    if errors:
        raise typer.Exit(code=1)


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint from any plan and number of ranks.")
    ],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write; it must not exist.")],
    to: Annotated[
        Literal["sharded", "whole", "single", "weights"],
        option(
            "sharded|whole|single|weights",
            (
                "Format: for Accelerate's FSDP2 (SHARDED_STATE_DICT or FULL_STATE_DICT), for one process, or only"
                " safetensors."
            ),
        ),
    ],
) -> None:
    """Convert a checkpoint for plain Accelerate, one process, or from_pretrained.

    The training script itself reads every layout.
    """
    from ..checkpoint.convert import Target
    from ..checkpoint.convert import convert as write

    screen = Output()
    with screen.working("Converting"):
        write(source, target, to=Target(to))
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    screen.print(f"{target}: {to}, {size / 2**20:.1f} MiB")
