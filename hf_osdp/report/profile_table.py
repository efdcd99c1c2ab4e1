"""A profile as a person reads it."""

from __future__ import annotations

import math

from ..planner.hardware import Hardware
from ..planner.profile import Profile
from ..quantities import format_bytes, format_seconds


def profile_tables(profile: Profile) -> list[object]:
    """Tables and lines for a rich console: the device, collectives, and times of segments.

    Args:
        profile: what was measured.
    """
    hardware = profile.hardware
    parts: list[object] = [_device_line(profile)]
    if hardware.timings:
        parts.append(_collectives(hardware))
    else:
        parts.append("One process: no collectives were measured. Start as many as will train, for example torchrun --nproc-per-node 8.")
    if hardware.handling is not None:
        parts.append(_handling_line(hardware))
    if profile.segments:
        parts.append(_segments(profile))
    return parts


def _device_line(profile: Profile) -> str:
    device, link = profile.hardware.device, profile.host_link
    rates = ", ".join(f"{dtype.value} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in device.flops_per_s.items())
    host = "" if link is None else (
        f" Host to device {link.to_device_bytes_per_s / 1e9:.1f} GB/s, back {link.to_host_bytes_per_s / 1e9:.1f} GB/s."
    )  # fmt: skip
    states = profile.hardware.host
    if states is not None:
        host += f" Host: {format_bytes(states.memory_bytes)} for each, optimizer steps at {states.update_bytes_per_s / 1e9:.1f} GB/s."
    return (
        f"{profile.hardware.summary}: {format_bytes(device.memory_bytes)} each, memory {device.memory_bytes_per_s / 1e9:.1f} GB/s;"
        f" {rates}.{host}"
    )


def _collectives(hardware: Hardware) -> object:
    from rich.table import Table

    table = Table(title="Collectives: latency + whole tensor's bytes / rate")
    table.add_column("collective")
    table.add_column("group")
    table.add_column("latency", justify="right")
    table.add_column("rate", justify="right")
    for timing in hardware.timings:
        place = "across nodes" if timing.crosses_nodes else "inside a node"
        rate = f"{1e-9 / timing.seconds_per_byte:.2f} GB/s" if timing.seconds_per_byte else "-"
        name = timing.collective.value.replace("_", "-")
        table.add_row(name, f"{timing.group_size}, {place}", format_seconds(timing.latency_s), rate)
    return table


def _handling_line(hardware: Hardware) -> str:
    handling = hardware.handling
    assert handling is not None
    updates = ", ".join(f"{step.value.replace('_', '-')} {format_seconds(time.tensor_s)}" for step, time in handling.updates.items())
    return (
        f"FSDP2's own work: {format_seconds(handling.gather.call_s)} to gather a unit, {format_seconds(handling.reduce.call_s)} to"
        f" reduce it, and copies. AdamW, each tensor: {updates}."
    )


def _segments(profile: Profile) -> object:
    from rich.table import Table

    sizes = profile.micro_batch_sizes
    table = Table(title=f"{profile.model}: forward / backward of each kind of segment, by samples")
    table.add_column("unit")
    table.add_column("parameters", justify="right")
    for size in sizes:
        table.add_column(str(size), justify="right")
    for segment in profile.segments:
        numel = sum(math.prod(shape) for shape in segment.parameter_shapes)
        times = {p.samples: f"{format_seconds(p.forward_s)} / {format_seconds(p.backward_s)}" for p in segment.points}
        table.add_row(segment.class_name, f"{numel:,}", *(times.get(size, "-") for size in sizes))
    return table
