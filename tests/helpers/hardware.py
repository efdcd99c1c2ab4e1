"""Hardware for tests with limits of a few megabytes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from hf_osdp.planner.description import DType
from hf_osdp.planner.hardware import Backend, DeviceSpec, Hardware, HostSpec, Link
from hf_osdp.planner.presets import preset


def toy_hardware(
    nodes: int = 1, devices_per_node: int = 1, *, flops_per_s: float = 1e9, memory_bytes_per_s: float = 1e9,
    memory_bytes: int = 10**9, intra: tuple[float, float] = (1e-6, 1e8), inter: tuple[float, float] = (1e-5, 1e6),
    **more: Any,
) -> Hardware:  # fmt: skip
    """Devices of round figures; links are latency in seconds and bytes a second."""
    inside, outside = (
        Link(latency_s=latency_s, bytes_per_s=bytes_per_s, source="made up")
        for latency_s, bytes_per_s in (intra, inter)
    )
    device = DeviceSpec(
        name="toy", memory_bytes=memory_bytes, flops_per_s={DType.FLOAT32: flops_per_s},
        memory_bytes_per_s=memory_bytes_per_s, source="made up",
    )  # fmt: skip
    return Hardware(
        nodes=nodes, devices_per_node=devices_per_node, device=device, intra_node=inside, inter_node=outside,
        **{"backend": Backend.NCCL, **more},
    )  # fmt: skip


def bare_preset(name: str, *, nodes: int = 1, devices_per_node: int = 1) -> Hardware:
    """A preset by its data sheet, without a host and a margin, whose device reserves nothing and whose CPU issues work
    in no time: context, communicators and launches would outweigh tiny models."""
    hardware = preset(name, nodes=nodes, devices_per_node=devices_per_node, data_sheet=True)
    device = replace(hardware.device, reserved_bytes=0, communicator_bytes=0, operator_s=0.0)
    return replace(hardware, device=device, host=None, margin=0.0)


def host_of(memory_bytes: int, *, to_device: float, to_host: float, update: float) -> HostSpec:
    """Return a host of these rates, in bytes a second."""
    return HostSpec(
        memory_bytes=memory_bytes, to_device_bytes_per_s=to_device, to_host_bytes_per_s=to_host,
        update_bytes_per_s=update, source="made up",
    )  # fmt: skip


def take_preset() -> None:
    """Have this process plan for the preset `cpu` in place of measuring, which takes seconds."""
    from hf_osdp.preparation import run_profile

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    hardware = preset("cpu", devices_per_node=ranks)
    rates = {DType.FLOAT16: hardware.device.rate(DType.BFLOAT16), **hardware.device.flops_per_s}  # measured, too
    device = replace(hardware.device, flops_per_s=rates)
    run_profile.measure_hardware = lambda **_: replace(hardware, device=device)
