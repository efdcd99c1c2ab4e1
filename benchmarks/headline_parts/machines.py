"""Hardware for which plans are made."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.headline_parts.cases import GIB, Case
from hf_osdp.planner.hardware import GB, Backend, Hardware, HostSpec
from hf_osdp.planner.presets import CUBLAS_BYTES, preset

NAMED = "v100-pcie-32"
"""Device with PCIe 3.0 links as in the original experiment; its 32 GiB leave room for a limit of 16 GiB for
tensors.
"""
HOST_MEMORY_BYTES = 128 * GIB
HOST_BYTES_PER_S = 128 * GB
HOST_SOURCE = "six channels of DDR4-2666, the line rate of one socket (Intel Xeon Platinum 8168, product page)"


def named_machine(case: Case) -> Hardware:
    """Return hardware from data sheets, for planning only. The limit is that of torch's allocator, as in measurements,
    so the context and communicators are not part of it. Only a single device moves states to its host."""
    hardware = preset(NAMED, devices_per_node=case.devices)
    hardware = replace(hardware, device=replace(hardware.device, reserved_bytes=CUBLAS_BYTES, communicator_bytes=0))
    return replace(hardware, host=(hardware.host or _named_host(hardware)) if case.devices == 1 else None)


def _named_host(hardware: Hardware) -> HostSpec:
    """Return a host with the same link as between devices; on such machines both are PCIe 3.0 with 16 lanes."""
    rate = hardware.intra_node.bytes_per_s
    return HostSpec(
        memory_bytes=HOST_MEMORY_BYTES, to_device_bytes_per_s=rate, to_host_bytes_per_s=rate,
        update_bytes_per_s=HOST_BYTES_PER_S,
        source=f"{hardware.intra_node.source}; {HOST_SOURCE}",
    )  # fmt: skip


def as_one_of(measured: Hardware, devices: int, *, workspace_bytes: int) -> Hardware:
    """Return hardware of `devices` devices like the measured one, connected by an emulated PCIe 3.0 link.

    Args:
        measured: a single device.
        devices: number of devices.
        workspace_bytes: bytes that libraries keep in torch's allocator; nothing else reserved counts towards the
            limit.
    """
    link = preset(NAMED).intra_node
    device = replace(measured.device, reserved_bytes=workspace_bytes, communicator_bytes=0)
    return replace(
        measured, device=device, nodes=1, devices_per_node=devices, intra_node=link, inter_node=link,
        backend=Backend.NCCL, timings=(),
        host=measured.host if devices == 1 else None,
    )  # fmt: skip
