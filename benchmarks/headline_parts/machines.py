"""The machines that plans are made for."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.headline_parts.cases import GIB, Case
from hf_osdp.planner.hardware import GB, Backend, Hardware, HostSpec
from hf_osdp.planner.presets import CUBLAS_BYTES, preset

NAMED = "v100-pcie-32"
"""PCIe 3.0 between devices, as in the original; with 32 GiB a limit of 16 is one that tensors can have."""
HOST_MEMORY_BYTES = 128 * GIB
HOST_BYTES_PER_S = 128 * GB
HOST_SOURCE = "six channels of DDR4-2666, the line rate of one socket (Intel Xeon Platinum 8168, product page)"


def named_machine(case: Case) -> Hardware:
    """Devices of a data sheet, for planning alone. As on a real one here, the limit is that of torch's allocator: a context and
    communicators lie beside it. Only one device alone moves states to its host."""
    hardware = preset(NAMED, devices_per_node=case.devices)
    hardware = replace(hardware, device=replace(hardware.device, reserved_bytes=CUBLAS_BYTES, communicator_bytes=0))
    return replace(hardware, host=(hardware.host or _named_host(hardware)) if case.devices == 1 else None)


def _named_host(hardware: Hardware) -> HostSpec:
    """A host whose link is that between devices: on such machines both are PCIe 3.0 of 16 lanes."""
    rate = hardware.intra_node.bytes_per_s
    return HostSpec(
        memory_bytes=HOST_MEMORY_BYTES, to_device_bytes_per_s=rate, to_host_bytes_per_s=rate, update_bytes_per_s=HOST_BYTES_PER_S,
        source=f"{hardware.intra_node.source}; {HOST_SOURCE}",
    )  # fmt: skip


def as_one_of(measured: Hardware, devices: int, *, workspace_bytes: int) -> Hardware:
    """A machine of so many devices as the measured one, joined by an emulated PCIe 3.0 link.

    Args:
        measured: one device alone.
        devices: how many there are to be.
        workspace_bytes: what libraries keep in torch's allocator; nothing else counts to the limit.
    """
    link = preset(NAMED).intra_node
    device = replace(measured.device, reserved_bytes=workspace_bytes, communicator_bytes=0)
    return replace(
        measured, device=device, nodes=1, devices_per_node=devices, intra_node=link, inter_node=link, backend=Backend.NCCL, timings=(),
        host=measured.host if devices == 1 else None,
    )  # fmt: skip
