"""Hardware that people have, from data sheets. Anything else is measured or described by hand, never guessed."""

from __future__ import annotations

from dataclasses import replace

from ..errors import HardwareError
from .description import DType
from .hardware import GB, GIB, Backend, DeviceSpec, Hardware, HostSpec, Link

GIGA, TERA = 10**9, 10**12
MIB = 2**20

CONTEXT_BYTES = 426 * MIB
"""CUDA context of one process with its kernels loaded lazily, as torch does it: torch 2.10 with CUDA 13.0 on an RTX 6000 Ada,
unslothai/unsloth-zoo#1053; an engineer of NVIDIA gives about 400 MB from CUDA 11.7 on (pytorch/pytorch#109888)."""
COMMUNICATOR_BYTES = 688 * MIB
"""One NCCL communicator of more than two ranks: measured on 4 A100 with NVLink (NVIDIA/nccl#964). Eight H100 hold 1.06 GB outside
torch, context included (NVIDIA/nccl#1685), which is less; links slower than NVLink have fewer channels and need less, too
(NVIDIA/nccl#986)."""
CUBLAS_BYTES, HOPPER_CUBLAS_BYTES = 8_519_680 + 4 * MIB, 2 * 32 * MIB
"""Workspaces that torch keeps in its allocator for cuBLAS (`:4096:2:16:8`; discuss.pytorch.org/t/178671 shows the bytes) and for
cuBLASLt; NVIDIA recommends 4 MiB, on Hopper 32 MiB (cuBLAS documentation of cublasSetWorkspace; pytorch/pytorch#120925)."""

OPERATOR_S, UNIT_S = 5e-6, 1e-3
"""CPU beside a GPU, until `hf-osdp profile` measures it: an operator of eager torch takes 2 to 7 microseconds (pytorch/pytorch#41383),
FSDP2 about a millisecond before each unit's forward (torch 2.10, Xeon: pytorch/pytorch#173680)."""

_NCCL_LATENCY = "hop latency: NCCL 2.18 src/graph/tuning.cc, ring, Simple protocol"
_PCIE3_X16 = Link(latency_s=5.7e-6, bytes_per_s=15.75 * GB, source=f"PCI Express Base 3.0, 16 lanes; {_NCCL_LATENCY}")
_PCIE4_X16 = Link(latency_s=5.7e-6, bytes_per_s=31.5 * GB, source=f"PCI Express Base 4.0, 16 lanes; {_NCCL_LATENCY}")
_PCIE5_X16 = Link(latency_s=5.7e-6, bytes_per_s=63 * GB, source=f"PCI Express Base 5.0, 16 lanes; {_NCCL_LATENCY}")
_ETHERNET_10G = Link(latency_s=14e-6, bytes_per_s=1.25 * GB, source=f"10GBASE-T line rate; {_NCCL_LATENCY}")
_ETHERNET_25G = Link(latency_s=14e-6, bytes_per_s=3.125 * GB, source=f"25 GbE line rate; {_NCCL_LATENCY}")
_FABRIC_400G = Link(latency_s=14e-6, bytes_per_s=50 * GB, source=f"4 x 100 Gb/s line rate; {_NCCL_LATENCY}")
_FABRIC_3200G = Link(latency_s=14e-6, bytes_per_s=400 * GB, source=f"8 x 400 Gb/s line rate (DGX H100 data sheet); {_NCCL_LATENCY}")


def _nvlink(gb_per_s: float, source: str) -> Link:
    return Link(latency_s=3.4e-6, bytes_per_s=gb_per_s * GB, source=f"{source}, one direction; {_NCCL_LATENCY}")


def _kept(nominal_gib: int, usable_gib: float, cublas_bytes: int = CUBLAS_BYTES) -> int:
    """What tensors cannot have: the driver's share, the context, the workspaces of matrix products.

    `usable_gib` is the total that torch states in out-of-memory messages on such devices, the lowest found in public issues.
    """
    return round((nominal_gib - usable_gib) * GIB) + CONTEXT_BYTES + cublas_bytes


def _v100(memory_gib: int, usable_gib: float) -> DeviceSpec:
    return DeviceSpec(
        name=f"V100-{memory_gib}",
        memory_bytes=memory_gib * GIB,
        reserved_bytes=_kept(memory_gib, usable_gib),
        flops_per_s={DType.FLOAT16: 125 * TERA, DType.BFLOAT16: 15.7 * TERA, DType.FLOAT32: 15.7 * TERA, DType.FLOAT64: 7.8 * TERA},
        memory_bytes_per_s=900 * GB,
        capability=(7, 0),
        source="NVIDIA V100 SXM2 data sheet (2020); bfloat16 has no tensor cores and runs at the float32 rate",
    )


def _v100_pcie(sxm: DeviceSpec) -> DeviceSpec:
    """The card: the same chip and memory at a lower clock."""
    return replace(
        sxm,
        name=sxm.name.replace("V100", "V100 PCIe"),
        flops_per_s={DType.FLOAT16: 112 * TERA, DType.BFLOAT16: 14 * TERA, DType.FLOAT32: 14 * TERA, DType.FLOAT64: 7 * TERA},
        source="NVIDIA V100 PCIe data sheet (2020); bfloat16 has no tensor cores and runs at the float32 rate",
    )


def _a100(memory_gib: int, memory_gb_per_s: float, usable_gib: float) -> DeviceSpec:
    return DeviceSpec(
        name=f"A100-{memory_gib}",
        memory_bytes=memory_gib * GIB,
        reserved_bytes=_kept(memory_gib, usable_gib),
        flops_per_s={DType.BFLOAT16: 312 * TERA, DType.FLOAT16: 312 * TERA, DType.FLOAT32: 19.5 * TERA, DType.FLOAT64: 19.5 * TERA},
        memory_bytes_per_s=memory_gb_per_s * GB,
        capability=(8, 0),
        source="NVIDIA A100 SXM data sheet (2021), dense; float32 without TF32, as torch multiplies by default",
    )


_TITAN_RTX = DeviceSpec(
    name="TITAN RTX",
    memory_bytes=24 * GIB,
    reserved_bytes=_kept(24, 23.64),  # of an RTX 4090, 3DTopia/Phidias-Diffusion#8
    flops_per_s={DType.FLOAT16: 130.5 * TERA, DType.BFLOAT16: 16.3 * TERA, DType.FLOAT32: 16.3 * TERA},
    memory_bytes_per_s=672 * GB,
    capability=(7, 5),
    source="NVIDIA TITAN RTX data sheet (2018) and Turing whitepaper; bfloat16 has no tensor cores and runs at the float32 rate",
)
_RTX_3090 = DeviceSpec(
    name="RTX 3090",
    memory_bytes=24 * GIB,
    reserved_bytes=_kept(24, 23.69),  # ucwxb/GraphAvatar#4
    flops_per_s={DType.FLOAT16: 71 * TERA, DType.BFLOAT16: 71 * TERA, DType.FLOAT32: 35.6 * TERA},
    memory_bytes_per_s=936 * GB,
    capability=(8, 6),
    source="NVIDIA GA102 whitepaper (2020), dense, tensor cores that sum in float32; float32 without TF32",
)
_RTX_4090 = DeviceSpec(
    name="RTX 4090",
    memory_bytes=24 * GIB,
    reserved_bytes=_kept(24, 23.52),  # pytorch/torchchat#1341
    flops_per_s={DType.FLOAT16: 165.2 * TERA, DType.BFLOAT16: 165.2 * TERA, DType.FLOAT32: 82.6 * TERA},
    memory_bytes_per_s=1008 * GB,
    capability=(8, 9),
    source="NVIDIA Ada GPU architecture whitepaper (2022), dense, tensor cores that sum in float32; float32 without TF32",
)
_H100 = DeviceSpec(
    name="H100",
    memory_bytes=80 * GIB,
    reserved_bytes=_kept(80, 79.14, HOPPER_CUBLAS_BYTES),
    flops_per_s={DType.BFLOAT16: 989.4 * TERA, DType.FLOAT16: 989.4 * TERA, DType.FLOAT32: 66.9 * TERA, DType.FLOAT64: 66.9 * TERA},
    memory_bytes_per_s=3350 * GB,
    capability=(9, 0),
    source="NVIDIA H100 SXM5 data sheet and Hopper whitepaper (2022), dense; float32 without TF32",
)
_H200 = replace(
    _H100,
    name="H200",
    memory_bytes=141 * GB,  # decimal, which is less than such a device has
    reserved_bytes=CONTEXT_BYTES + HOPPER_CUBLAS_BYTES,
    memory_bytes_per_s=4800 * GB,
    source="NVIDIA H200 SXM data sheet (2024), dense; float32 without TF32",
)
_CPU = DeviceSpec(
    name="CPU",
    memory_bytes=8 * GIB,
    flops_per_s={DType.FLOAT32: 60.5 * GIGA, DType.FLOAT64: 31.9 * GIGA, DType.BFLOAT16: 201.5 * GIGA},
    memory_bytes_per_s=15.0 * GB,
    operator_s=3.9e-6,
    source='one core of an AMD EPYC virtual machine, measured with one thread, torch 2.13.0, 2026-11-21, by python -c "import'
    " hf_osdp; print(hf_osdp.measure_hardware(device_type='cpu').device)\"; the memory is nominal: give a limit",
)
_LOOPBACK = Link(
    latency_s=0.5e-3,
    bytes_per_s=0.306 * GB,
    source="all-gather over gloo between two processes of the same server, measured by measure_hardware, 2026-11-21",
)

_ETHERNET_10G_GLOO = Link(latency_s=0.5e-3, bytes_per_s=1.25 * GB, source="10GBASE-T line rate; hop latency as measured on loopback")

_V100_16, _V100_32 = _v100(16, 15.75), _v100(32, 31.74)
_V100_NVLINK = _nvlink(150, "V100 data sheet: NVLink 300 GB/s in both directions")
_A100_NVLINK = _nvlink(300, "A100 data sheet: NVLink 600 GB/s in both directions")


def _server(model: str, memory_bytes: int, memory_gb_per_s: float, link: Link, source: str) -> HostSpec:
    """A server as a whole, as one device has it to itself; `Hardware.scaled` shares it out.

    Optimizer steps are taken at the line rate of its memory. Each device has a whole link, as long as switches let it.
    """
    return HostSpec(
        memory_bytes=memory_bytes,
        to_device_bytes_per_s=link.bytes_per_s,
        to_host_bytes_per_s=link.bytes_per_s,
        update_bytes_per_s=memory_gb_per_s * GB,
        source=f"{model}: {source}; memory and PCI Express at line rate",
    )


_DGX1 = _server(
    "DGX-1", 512 * GB, 136.5, _PCIE3_X16, "NVIDIA DGX-1 data sheet (V100, 2018), 2 Xeon E5-2698 v4 of 4 channels with DDR4-2133",
)  # fmt: skip
_DGX_A100 = _server(
    "DGX A100", 1000 * GB, 409.6, _PCIE4_X16, "NVIDIA DGX A100 data sheet (2020), 2 EPYC 7742 of 8 channels with DDR4-3200",
)  # fmt: skip
_DGX_H100 = _server(
    "DGX H100", 2000 * GB, 614.4, _PCIE5_X16,
    "NVIDIA DGX H100 and H200 data sheets, docs.nvidia.com/dgx-basepod, 2 Xeon 8480C of 8 channels with DDR5-4800",
)  # fmt: skip
_HOSTS: dict[str, HostSpec] = {  # what the others are built into differs too much
    "v100-16": _DGX1, "v100-32": _DGX1, "a100-40": _DGX_A100, "a100-80": replace(_DGX_A100, memory_bytes=2000 * GB),
    "h100": _DGX_H100, "h200": _DGX_H100,
}  # fmt: skip

_PRESETS: dict[str, tuple[DeviceSpec, Link, Link, Backend]] = {  # device, link inside a node, link of a node to others
    "v100-16": (_V100_16, _V100_NVLINK, _ETHERNET_25G, Backend.NCCL),  # 8 in a node; with 25 Gb/s: AWS p3.16xlarge
    "v100-32": (_V100_32, _V100_NVLINK, _ETHERNET_25G, Backend.NCCL),
    "v100-pcie-16": (_v100_pcie(_V100_16), _PCIE3_X16, _ETHERNET_25G, Backend.NCCL),  # 4 or 8
    "v100-pcie-32": (_v100_pcie(_V100_32), _PCIE3_X16, _ETHERNET_25G, Backend.NCCL),
    "titan-rtx": (_TITAN_RTX, _PCIE3_X16, _ETHERNET_10G, Backend.NCCL),  # 1 to 4 in a workstation
    "rtx-3090": (_RTX_3090, _PCIE4_X16, _ETHERNET_10G, Backend.NCCL),  # without the NVLink bridge, which joins two cards only
    "rtx-4090": (_RTX_4090, _PCIE4_X16, _ETHERNET_10G, Backend.NCCL),
    "a100-40": (_a100(40, 1555, 39.50), _A100_NVLINK, _FABRIC_400G, Backend.NCCL),  # 8; with 4 x 100 Gb/s: AWS p4d.24xlarge
    "a100-80": (_a100(80, 2039, 79.14), _A100_NVLINK, _FABRIC_400G, Backend.NCCL),
    "h100": (_H100, _nvlink(450, "H100 data sheet: NVLink 900 GB/s in both directions"), _FABRIC_3200G, Backend.NCCL),  # 8
    "h200": (_H200, _nvlink(450, "H200 data sheet: NVLink 900 GB/s in both directions"), _FABRIC_3200G, Backend.NCCL),
    "cpu": (_CPU, _LOOPBACK, _ETHERNET_10G_GLOO, Backend.GLOO),
}


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows."""
    return tuple(_PRESETS)


def preset(name: str, *, nodes: int = 1, devices_per_node: int = 1) -> Hardware:
    """A known kind of device, so many times, with links at their line rates; what `hf-osdp profile` measures is better.

    ```python
    preset("a100-80", nodes=2, devices_per_node=8)       # NVLink, 4 x 100 Gb/s between nodes
    preset("v100-pcie-16", nodes=2, devices_per_node=8)  # PCIe 3.0, 25 Gb/s
    preset("rtx-4090", nodes=2, devices_per_node=2)      # workstations: PCIe 4.0, 10 GbE
    ```

    Args:
        name: one of `preset_names()`; upper case and `_` are accepted.
        nodes: machines.
        devices_per_node: devices in each: 8 with NVLink, 4 or 8 in PCIe servers, 1 to 4 in workstations, usually.

    Returns:
        The hardware, with links within and between nodes as such machines usually have them. Under NCCL the device reserves
        what the driver, a CUDA context and cuBLAS take, and each communicator of a plan takes `COMMUNICATOR_BYTES`. The host
        is that of NVIDIA's own servers; it is None for devices that are sold without one.

    Raises:
        HardwareError: the name is not known.
    """
    key = name.lower().replace("_", "-")
    if key not in _PRESETS:
        raise HardwareError(f"Hardware {name!r} is not known; use one of {', '.join(_PRESETS)}, or measure this machine.")
    device, intra_node, inter_node, backend = _PRESETS[key]
    if backend is Backend.NCCL:
        device = replace(device, communicator_bytes=COMMUNICATOR_BYTES, operator_s=OPERATOR_S, unit_s=UNIT_S)
    alone = Hardware(device=device, intra_node=intra_node, inter_node=inter_node, backend=backend, host=_HOSTS.get(key))
    return alone.scaled(nodes=nodes, devices_per_node=devices_per_node)
