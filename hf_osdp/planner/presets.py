"""Hardware from data sheets, listed with sources in `presets.json`.

Other hardware is measured or described by hand, never guessed.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from ..errors import HardwareError, nearest
from .description import DType
from .hardware import GB, GIB, Backend, DeviceSpec, Hardware, HostSpec, Link

TERA, MIB = 10**12, 2**20

CONTEXT_BYTES = 426 * MIB
"""CUDA context of one process with lazily loaded kernels, the default of torch: torch 2.10 with CUDA 13.0 on an RTX
6000 Ada, unslothai/unsloth-zoo#1053; an engineer of NVIDIA gives about 400 MB from CUDA 11.7 on
(pytorch/pytorch#109888)."""
COMMUNICATOR_BYTES = 688 * MIB
"""One NCCL communicator of more than two ranks: measured on 4 A100 with NVLink (NVIDIA/nccl#964). Eight H100 need
less: 1.06 GB outside torch, context included (NVIDIA/nccl#1685). Links slower than NVLink have fewer channels and need
less too (NVIDIA/nccl#986)."""
CUBLAS_BYTES, HOPPER_CUBLAS_BYTES = 8_519_680 + 4 * MIB, 2 * 32 * MIB
"""Workspaces that torch keeps in its allocator for cuBLAS (`:4096:2:16:8`; discuss.pytorch.org/t/178671 shows the
bytes) and for cuBLASLt; NVIDIA recommends 4 MiB, on Hopper 32 MiB (cuBLAS documentation of cublasSetWorkspace;
pytorch/pytorch#120925)."""

OPERATOR_S = 6.5e-6
"""CPU time of an operator beside a GPU, until it is measured: 2 to 7 microseconds in eager torch
(pytorch/pytorch#41383), 9 to 12 on the host of an H100 (benchmarks/gpu_suite/results.md), 6.5 by
trainings of short samples on an A100 (docs/rates.md). FSDP2's own time follows from it (`FsdpOverhead.issued`)."""


_PCIE_5_GB_PER_S = 63.0
PRODUCT_TRAFFIC = 1.0
"""Share of the time of a product's or of attention's reads and writes that its FLOPs do not hide: docs/rates.md."""


@functools.cache
def _presets() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the sections `links`, `hosts` and `devices` of `presets.json`.

    A device and a link have the rates of their data sheets and those that were reached (docs/rates.md): shares of the
    data sheet's for products and memory, a rate for attention. What is known of a relative only says so. `usable_gib`
    is the lowest total that torch states in out-of-memory messages of such devices in public issues; without it, all
    memory is usable. A host is the server into which most devices of a kind are built.
    """
    sections: dict[str, dict[str, dict[str, Any]]] = json.loads(
        Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
    )
    return sections


def _link(name: str, *, data_sheet: bool = False) -> Link:
    row = _presets()["links"][name]
    if data_sheet or "reached" not in row:
        return Link(latency_s=row["latency_s"], bytes_per_s=row["gb_per_s"] * GB, source=row["source"])
    reached = row["reached"]
    return Link(
        latency_s=row["latency_s"],
        bytes_per_s=reached["gb_per_s"] * GB,
        shared_bytes_per_s=reached["shared_gb_per_s"] * GB if "shared_gb_per_s" in reached else None,
        source=f"{reached['source']}; {row['source']}",
    )


def _host(name: str) -> HostSpec:
    """Return the host of a server with one device; `Hardware.scaled` divides its memory and cores among more.

    It steps at memory speed.
    """
    row = _presets()["hosts"][name]
    return HostSpec(
        memory_bytes=row["memory_gb"] * GB,
        to_device_bytes_per_s=row["copy_gb_per_s"] * GB,
        to_host_bytes_per_s=row["copy_gb_per_s"] * GB,
        update_bytes_per_s=row["memory_gb_per_s"] * GB,
        source=row["source"],
    )


def assumed_host(name: str) -> HostSpec:
    """Return the host of a workstation with one card of a kind that is sold without a host; it is assumed, and its
    source says so.
    """
    sections = _presets()
    row, link = sections["hosts"]["workstation"], sections["links"][sections["devices"][_key(name)]["intra_node"]]
    copies = row["copy_share"] * min(link["gb_per_s"], _PCIE_5_GB_PER_S) * GB
    return HostSpec(
        memory_bytes=row["memory_gb"] * GB,
        to_device_bytes_per_s=copies,
        to_host_bytes_per_s=copies,
        update_bytes_per_s=row["memory_gb_per_s"] * GB,
        source=row["source"],
    )


def peak_rate(device: DeviceSpec, dtype: DType) -> float | None:
    """Return the FLOP/s of products that a preset's data sheet states, with which utilisation is computed; None if
    the device is of no preset.
    """
    rows = (row for row in _presets()["devices"].values() if row["name"] == device.name)
    tflops: dict[str, float] = next(rows, {"tflops": {}})["tflops"]
    return tflops[dtype.value] * TERA if dtype.value in tflops else None


def _device(row: dict[str, Any], backend: Backend, *, data_sheet: bool) -> DeviceSpec:
    """Return the device of a row; under NCCL, driver, CUDA context and cuBLAS reserve memory, and the CPU takes
    time to launch kernels.
    """
    reached = {} if data_sheet else row.get("reached", {})
    memory = row["memory_gib"] * GIB if "memory_gib" in row else row["memory_gb"] * GB
    on_gpu: dict[str, Any] = {}
    if backend is Backend.NCCL:
        capability = tuple(row["capability"])
        driver = round((row["memory_gib"] - row["usable_gib"]) * GIB) if "usable_gib" in row else 0
        workspaces = HOPPER_CUBLAS_BYTES if capability >= (9, 0) else CUBLAS_BYTES
        on_gpu = {
            "capability": capability,
            "reserved_bytes": driver + CONTEXT_BYTES + workspaces,
            "communicator_bytes": COMMUNICATOR_BYTES,
        }
    return DeviceSpec(
        name=row["name"],
        memory_bytes=memory,
        flops_per_s={
            DType(dtype): float(round(rate * TERA * reached.get("products", 1.0)))
            for dtype, rate in row["tflops"].items()
        },
        memory_bytes_per_s=row["gb_per_s"] * GB * reached.get("memory", 1.0),
        attention_flops_per_s=reached["attention_tflops"] * TERA if reached else None,
        product_traffic=PRODUCT_TRAFFIC if reached else 0.0,
        operator_s=row.get("operator_s", OPERATOR_S),
        source=f"{reached['source']}; {row['source']}" if reached else row["source"],
        **on_gpu,
    )


def preset_names() -> tuple[str, ...]:
    """Return the names that `preset` knows."""
    return tuple(_presets()["devices"])


def preset(name: str, *, nodes: int = 1, devices_per_node: int = 1, data_sheet: bool = False) -> Hardware:
    """Return nodes of a known device at the rates that trainings reached (docs/rates.md); measurements by
    `hf-osdp profile` are more accurate.

    ```python
    preset("a100-80", nodes=2, devices_per_node=8)       # NVLink, 4 x 100 Gb/s between nodes
    preset("rtx-4090", nodes=2, devices_per_node=2)      # workstations: PCIe 4.0, 10 GbE
    ```

    Under NCCL the device reserves memory for the driver, a CUDA context and cuBLAS, and each communicator of a plan
    takes `COMMUNICATOR_BYTES`. The host is that of NVIDIA's own servers; it is None for devices that are sold without
    one.

    Args:
        name: one of `preset_names()`; upper case and `_` are accepted.
        nodes: number of machines.
        devices_per_node: devices in each machine.
        data_sheet: use the peaks of data sheets and the line rates of links instead, which no training reaches.

    Raises:
        HardwareError: the name is not known.
    """
    key = _key(name)
    row, backend = _presets()["devices"][key], Backend.GLOO if key == "cpu" else Backend.NCCL
    alone = Hardware(
        device=_device(row, backend, data_sheet=data_sheet),
        intra_node=_link(row["intra_node"], data_sheet=data_sheet),
        inter_node=_link(row["inter_node"], data_sheet=data_sheet),
        backend=backend,
        host=_host(row["host"]) if "host" in row else None,
    )
    return alone.scaled(nodes=nodes, devices_per_node=devices_per_node)


def _key(name: str) -> str:
    devices, key = _presets()["devices"], name.lower().replace("_", "-")
    if key in devices:
        return key
    raise HardwareError(
        f"Hardware {name!r} is not known{nearest(key, devices)}; use one of {', '.join(devices)},"
        " or measure this machine by hf-osdp profile."
    )
