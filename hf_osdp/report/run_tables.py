"""Tables of trials, of estimates and measurements, of a simulation, of preflight checks, and of a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rich.table import Column, Table

from ..planner.hardware import Hardware
from ..planner.profile import Profile
from ..quantities import format_bytes, format_seconds
from .tables import make_table

Outcome: TypeAlias = tuple[str, float | None, float | None]
"""A name, the estimate, and the measurement."""


def trials_table(rounds: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each round of the report's `recalibration`: estimates, measurements, and the resulting
    correction.
    """

    def cells(number: int, past: Mapping[str, Any]) -> list[str]:
        estimated, measured, correction = past["estimated"], past["measured"], past["correction"]
        peak = "out of memory" if measured["peak_bytes"] is None else format_bytes(measured["peak_bytes"])
        step = "-" if measured["median_step_s"] is None else format_seconds(measured["median_step_s"])
        peaks = f"{format_bytes(estimated['peak_bytes'])} / {peak}"
        extra = f"{'-' if correction['extra_bytes'] < 0 else '+'}{format_bytes(abs(correction['extra_bytes']))}"
        outcome = "runs" if past["runs"] else "fits" if past["fits"] else "over limit"
        steps = f"{format_seconds(estimated['step_s'])} / {step}"
        return [str(number), past["plan"], peaks, steps, f"{extra}, x{correction['compute_factor']:.2f}", outcome]

    numbered = (cells(number, past) for number, past in enumerate(rounds, start=1))
    title = "Plans tried before training, estimated / measured"
    return make_table(
        title, numbered, text=["round", "plan"], figures=["peak", "step", "correction"], notes=["outcome"]
    )


def outcome_table(nbytes: Sequence[Outcome], seconds: Sequence[Outcome]) -> Table:
    """Return estimates and measurements; times of the slowest rank, memory of the fullest."""

    def cells(row: Outcome, text: Callable[[float], str]) -> list[str]:
        name, estimated, measured = row
        texts = ("-" if value is None else text(value) for value in (estimated, measured))
        return [name, *texts, f"{estimated / measured:.2f}" if estimated and measured else "-"]

    rows = [*(cells(row, format_bytes) for row in nbytes), *(cells(row, format_seconds) for row in seconds)]
    return make_table(
        "Estimated and measured", rows, text=[""], figures=["estimated", "measured", "estimate / measured"]
    )


def checks_table(title: str, rows: Sequence[tuple[str, str, str]]) -> Table:
    """Return a line for each preflight check: its name, its result, the finding or the remedy."""
    names = [Column(name, no_wrap=True) for name in ("check", "result")]
    return make_table(title, rows, text=names, notes=["finding, remedy"])


def profile_tables(profile: Profile) -> list[str | Table]:
    """Return tables and lines for a rich console: the device, collectives, and times of segments."""
    hardware = profile.hardware
    alone = "One process: no collectives were measured. Start all training processes, for example with torchrun --nproc-per-node 8."  # noqa: E501
    parts: list[str | Table] = [_device_line(profile), _collectives(hardware) if hardware.timings else alone]
    if (own := hardware.fsdp_overhead) is not None:
        updates = ", ".join(
            f"{step.value.replace('_', '-')} {format_seconds(time.tensor_s)}" for step, time in own.updates.items()
        )
        parts.append(
            f"FSDP2's own work: {format_seconds(own.gather.call_s)} to gather a unit,"
            f" {format_seconds(own.reduce.call_s)} to"
            f" reduce it, and copies. AdamW per tensor: {updates}."
        )
    if profile.segments:
        parts.append(_segments(profile))
    return parts


def _device_line(profile: Profile) -> str:
    device, host = profile.hardware.device, profile.hardware.host
    rates = ", ".join(f"{dtype.value} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in device.flops_per_s.items())
    line = f"{profile.hardware.summary}: {format_bytes(device.memory_bytes)} each, memory {device.memory_bytes_per_s / 1e9:.1f} GB/s, {rates}."  # noqa: E501
    if host is not None:
        line += f" Host to device {host.to_device_bytes_per_s / 1e9:.1f} GB/s, back {host.to_host_bytes_per_s / 1e9:.1f} GB/s."  # noqa: E501
        line += f" Host: {format_bytes(host.memory_bytes)} per device, optimizer steps at {host.update_bytes_per_s / 1e9:.1f} GB/s."  # noqa: E501
    return line


def _collectives(hardware: Hardware) -> Table:
    rows = [
        [
            timing.collective.value.replace("_", "-"),
            f"{timing.group_size}, {'across nodes' if timing.crosses_nodes else 'inside a node'}",
            format_seconds(timing.latency_s),
            f"{1e-9 / timing.seconds_per_byte:.2f} GB/s" if timing.seconds_per_byte else "-",
        ]
        for timing in hardware.timings
    ]
    title = "Collectives: time = latency + bytes of the whole tensor / rate"
    return make_table(title, rows, text=["collective", "group"], figures=["latency", "rate"])


def _segments(profile: Profile) -> Table:
    sizes = profile.micro_batch_sizes
    rows = []
    for segment in profile.segments:
        numel = sum(math.prod(shape) for shape in segment.parameter_shapes)
        times = {p.samples: f"{format_seconds(p.forward_s)} / {format_seconds(p.backward_s)}" for p in segment.points}
        rows.append([segment.class_name, f"{numel:,}", *(times.get(size, "-") for size in sizes)])
    title = f"{profile.model}: forward / backward of each kind of segment, by samples"
    return make_table(title, rows, text=["unit"], figures=["parameters", *map(str, sizes)])
