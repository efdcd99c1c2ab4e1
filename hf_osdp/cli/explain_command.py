"""`hf-osdp explain`: where bytes and seconds go, and why each unit is laid out so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    AutoClass,
    BlockClasses,
    Checkpointing,
    DeviceName,
    JsonFile,
    MarginShare,
    NumNodes,
    OptimizerName,
    PlotFile,
    PrecisionName,
    ProfileFile,
    Request,
)
from .output import Output, errors_in_one_line
from .plan_command import check_outputs, draw_plan


def explain(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A file of `hf-osdp plan --output`, a run's osdp_report.json, or a saved plan.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Hub id, folder or config.json, for a plan that was saved without what it was made from."),
    ] = None,
    device: DeviceName = None,
    profile: ProfileFile = None,
    num_nodes: NumNodes = None,
    margin: MarginShare = None,
    precision: PrecisionName = "no",
    optimizer: OptimizerName = "adamw",
    activation_checkpointing: Checkpointing = False,
    block_classes: BlockClasses = None,
    auto_class: AutoClass = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Take a plan apart: bytes at the peak and by unit, seconds by stream, what other layouts would cost, what binds.

    A file of `plan --output` needs no options. A bare plan (Plan.save) needs --model and the options that it was made with.
    """
    with errors_in_one_line():
        screen = Output(json_file)
        check_outputs(None, plot)
        with screen.working("Taking the plan apart"):
            from ..report.plan_file import read_plan_file

            found, inputs = read_plan_file(plan_file)
            stated = _stated(
                device, profile, num_nodes, margin, precision, optimizer, activation_checkpointing, block_classes, auto_class, model
            )
            if inputs is not None and stated:
                raise ValueError(
                    f"{plan_file} holds what its plan was made from, so {', '.join(stated)} would have no effect; leave it out."
                )
            if inputs is None:
                if model is None:
                    raise ValueError(f"{plan_file} holds a plan alone; add --model, --device and the options that it was made with.")
                inputs = _inputs(found, model=model, device=device, profile=profile, num_nodes=num_nodes, margin=margin,
                                 precision=precision,
                                 optimizer=optimizer, activation_checkpointing=activation_checkpointing, block_classes=block_classes,
                                 auto_class=auto_class)  # fmt: skip
            _explain(screen, found, inputs, plot)


def _stated(
    device, profile, num_nodes, margin, precision, optimizer, activation_checkpointing, block_classes, auto_class, model
) -> list[str]:
    """Options that were given."""
    given = {
        "--model": model, "--device": device, "--profile": profile, "--num-nodes": num_nodes, "--margin": margin is not None,
        "--precision": precision != "no",
        "--optimizer": optimizer != "adamw", "--activation-checkpointing": activation_checkpointing, "--block-classes": block_classes,
        "--auto-class": auto_class,
    }  # fmt: skip
    return [name for name, value in given.items() if value]


def _inputs(plan, *, num_nodes: int | None, **options):
    """What a bare plan was made from, by the user's word and the plan's."""
    from ..report.plan_file import PlanInputs
    from .cases import describer, hardware_of, job_of, load_config, timed

    nodes = num_nodes or (None if options.get("profile") else 1)  # a profile knows
    if nodes and plan.world_size % nodes:
        raise ValueError(f"--num-nodes {nodes} does not divide the plan's {plan.world_size} devices; use a divisor.")
    request = Request(
        sequence_length=plan.sequence_length, global_batch_size=plan.global_batch_size, num_nodes=nodes,
        devices_per_node=plan.world_size // nodes if nodes else None,
        host_offload=None if any(unit.on_host for unit in plan.units) else False, **options,
    )  # fmt: skip
    hardware = hardware_of(request)
    if hardware.world_size != plan.world_size:
        raise ValueError(
            f"The profile is of {hardware.world_size} devices, but the plan is for {plan.world_size}; give --num-nodes, or another profile."
        )
    job = job_of(request, hardware)
    description = timed(request, describer(request, hardware)(load_config(request.model), plan.sequence_length, plan.cut))
    plan.check(description, plan.world_size)
    return PlanInputs(description=description, job=job, hardware=hardware)


def _explain(screen: Output, plan, inputs, plot: Path | None) -> None:
    from ..report.content import explanation_content
    from ..report.explain import explain
    from ..report.explain_tables import explanation_tables
    from ..report.tables import plan_caption

    explanation = explain(plan, inputs)
    where = "" if inputs.hardware is None else f" on {inputs.hardware.summary}"
    screen.print(
        f"Plan {plan.fingerprint} ({plan.strategy}) for {plan.model_name or inputs.description.model_class}{where}, {plan.sequence_length}"
        f" tokens a sample: {plan.world_size} x {plan.micro_batch_size} samples x {plan.accumulation_steps} micro-steps ="
        f" {plan.global_batch_size} a step.",
        *plan_caption(plan, explanation.estimate)[1:], f"Activations: {inputs.description.trace}.",
        "", *explanation_tables(explanation),
    )  # fmt: skip
    if plot is not None:
        draw_plan(plot, plan, explanation.estimate, inputs.hardware, explanation.streams)
        screen.print(f"Plot: {plot}")
    screen.write(explanation_content(explanation))
