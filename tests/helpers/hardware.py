"""Hardware for tests with limits of a few megabytes."""

from __future__ import annotations

from dataclasses import replace

from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.presets import preset


def bare_preset(name: str, *, nodes: int = 1, devices_per_node: int = 1) -> Hardware:
    """A preset without a host and a margin, whose device reserves nothing and whose CPU issues work in no time: context, communicators and
    launches would outweigh tiny models."""
    hardware = preset(name, nodes=nodes, devices_per_node=devices_per_node)
    device = replace(hardware.device, reserved_bytes=0, communicator_bytes=0, operator_s=0.0, unit_s=0.0)
    return replace(hardware, device=device, host=None, margin=0.0)
