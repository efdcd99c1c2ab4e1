"""Compare published runs with the plan's memory model: the peak, and whether a run that ran would be called
feasible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.quantities import format_bytes

from .runs import Run, described, hardware_of

GIB = 2**30


def memory_table(runs: Sequence[Run]) -> str:
    """Return a line for each run with a published peak, and for each that would be refused."""
    lines = [
        "| run | device | needed, with margin | peak of tensors | published | transformers' loss adds | feasible |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    refused = 0
    for run in runs:
        row, hardware = run.row, hardware_of(run.row)
        device, needed = hardware.device, run.needed_bytes(hardware)
        peak = run.estimate(hardware).memory.peak_bytes
        fits = needed <= device.memory_bytes
        refused += not fits
        if fits and not row["peak_memory_gib"]:
            continue
        published = f"{row['peak_memory_gib']} GiB, {row['memory_kind'] or 'reserved'}"
        without = peak + hardware.outside_bytes(run.plan.communicators)
        verdict = "yes" if fits else f"no: {format_bytes(needed - device.memory_bytes)} over"
        if not fits and without <= device.memory_bytes:
            verdict += f", {format_bytes(device.memory_bytes - without)} free without the margin"
        lines.append(
            f"| {row.label} | {format_bytes(device.memory_bytes)} | {format_bytes(needed)} | {format_bytes(peak)} |"
            f" {published if row['peak_memory_gib'] else '-'} | {_own_loss(run, peak)} | {verdict} |"
        )
    return "\n".join([*lines, "", f"{len(runs) - refused} of {len(runs)} runs are feasible."])


def peak_ratio(run: Run) -> float:
    """Return the estimated peak of tensors over the published one."""
    return run.estimate(hardware_of(run.row)).memory.peak_bytes / (GIB * float(run.row["peak_memory_gib"]))


def _own_loss(run: Run, peak: int) -> str:
    """Return the bytes that the loss of transformers adds to a run with a fused loss: copies of logits in float32."""
    if not run.row["model"].startswith("mpt"):
        return "-"
    description = described(run.row, own_loss=True)
    plan = replace(run.plan, model_fingerprint=description.fingerprint)
    return format_bytes(estimate_plan(plan, description, run.job).memory.peak_bytes - peak)
