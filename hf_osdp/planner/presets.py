"""Hardware that people have, from data sheets. Anything else is measured or described by hand, never guessed."""

from __future__ import annotations

from dataclasses import replace

from ..errors import HardwareError, nearest
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


def _link(latency_s: float, gb_per_s: float, source: str) -> Link:
    latency_source = "hop latency: NCCL 2.18 src/graph/tuning.cc, ring, Simple protocol"
    return Link(latency_s=latency_s, bytes_per_s=gb_per_s * GB, source=f"{source}; {latency_source}")


def _nvlink(gb_per_s: float, source: str) -> Link:
    return _link(3.4e-6, gb_per_s, f"{source} in both directions, one direction")


_PCIE3_X16 = _link(5.7e-6, 15.75, "PCI Express Base 3.0, 16 lanes")
_PCIE4_X16 = _link(5.7e-6, 31.5, "PCI Express Base 4.0, 16 lanes")
_PCIE5_X16 = _link(5.7e-6, 63, "PCI Express Base 5.0, 16 lanes")
_ETHERNET_10G = _link(14e-6, 1.25, "10GBASE-T line rate")
_ETHERNET_25G = _link(14e-6, 3.125, "25 GbE line rate")
_FABRIC_400G = _link(14e-6, 50, "4 x 100 Gb/s line rate")
_FABRIC_3200G = _link(14e-6, 400, "8 x 400 Gb/s line rate (DGX H100 data sheet)")
_V100_NVLINK = _nvlink(150, "V100 data sheet: NVLink 300 GB/s")
_A100_NVLINK = _nvlink(300, "A100 data sheet: NVLink 600 GB/s")
_H100_NVLINK, _H200_NVLINK = (_nvlink(450, f"{name} data sheet: NVLink 900 GB/s") for name in ("H100", "H200"))
_B200_NVLINK = _nvlink(900, "DGX B200 data sheet: NVLink 14.4 TB/s for 8 devices, 1800 GB/s each")
_MI300X_FABRIC = _nvlink(448, "MI300X platform data sheet: Infinity Fabric, 7 links to peers, 896 GB/s")
_LOOPBACK = Link(
    latency_s=0.5e-3,
    bytes_per_s=0.306 * GB,
    source="all-gather over gloo between two processes of the same server, measured by measure_hardware, 2026-11-21",
)
_ETHERNET_10G_GLOO = Link(latency_s=0.5e-3, bytes_per_s=1.25 * GB, source="10GBASE-T line rate; hop latency as measured on loopback")


def _gpu(
    name: str, gib: float, usable_gib: float, tflops: tuple[float, ...], gb_per_s: float, capability: tuple[int, int], source: str
) -> DeviceSpec:
    """Return a device from its data sheet; `tflops` are of fp16, bf16, fp32 and, where it has that, fp64.

    `usable_gib` is the total that torch states in out-of-memory messages on such devices, the lowest found in public issues. What
    tensors cannot have is the driver's share, the context and the workspaces of matrix products.
    """
    dtypes = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
    workspaces = HOPPER_CUBLAS_BYTES if capability >= (9, 0) else CUBLAS_BYTES
    return DeviceSpec(
        name=name,
        memory_bytes=round(gib * GIB),
        reserved_bytes=round((gib - usable_gib) * GIB) + CONTEXT_BYTES + workspaces,
        flops_per_s={dtype: rate * TERA for dtype, rate in zip(dtypes, tflops, strict=False)},
        memory_bytes_per_s=gb_per_s * GB,
        capability=capability,
        source=source,
    )


_V100 = "data sheet (2020); bfloat16 has no tensor cores and runs at the float32 rate"
_A100 = "NVIDIA A100 SXM data sheet (2021), dense; float32 without TF32, as torch multiplies by default"
_TURING = "NVIDIA TITAN RTX data sheet (2018) and Turing whitepaper; bfloat16 has no tensor cores and runs at the float32 rate"
_GA102 = "NVIDIA GA102 whitepaper (2020), dense, tensor cores that sum in float32; float32 without TF32"
_ADA = "NVIDIA Ada GPU architecture whitepaper (2022), dense, tensor cores that sum in float32; float32 without TF32"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper (2025), dense, tensor cores that sum in float32; float32 without TF32"
_A10 = "NVIDIA A10 data sheet (2021), dense; float32 without TF32"
_ADA_SERVER = "data sheet (2023), dense, which is half of the rates with sparsity; float32 without TF32"
_CPU = DeviceSpec(
    name="CPU",
    memory_bytes=8 * GIB,
    flops_per_s={DType.FLOAT32: 60.5 * GIGA, DType.FLOAT64: 31.9 * GIGA, DType.BFLOAT16: 201.5 * GIGA},
    memory_bytes_per_s=15.0 * GB,
    operator_s=3.9e-6,
    source='one core of an AMD EPYC virtual machine, measured with one thread, torch 2.13.0, 2026-11-21, by python -c "import'
    " hf_osdp; print(hf_osdp.measure_hardware(device_type='cpu').device)\"; the memory is nominal: give a limit",
)


def _server(model: str, memory_gb: int, memory_gb_per_s: float, link: Link, source: str) -> HostSpec:
    """Return a server as one device has it to itself; `Hardware.scaled` shares it out, but for the link. Steps run at its memory's rate."""
    return HostSpec(
        memory_bytes=memory_gb * GB,
        to_device_bytes_per_s=link.bytes_per_s,
        to_host_bytes_per_s=link.bytes_per_s,
        update_bytes_per_s=memory_gb_per_s * GB,
        source=f"{model}: {source}; memory and PCI Express at line rate",
    )


_DGX1 = _server("DGX-1", 512, 136.5, _PCIE3_X16, "NVIDIA DGX-1 data sheet (V100, 2018), 2 Xeon E5-2698 v4 of 4 channels with DDR4-2133")
_DGX_A100 = _server("DGX A100", 1000, 409.6, _PCIE4_X16, "NVIDIA DGX A100 data sheet (2020), 2 EPYC 7742 of 8 channels with DDR4-3200")
_DGX_H100 = _server(
    "DGX H100", 2000, 614.4, _PCIE5_X16,
    "NVIDIA DGX H100 and H200 data sheets, docs.nvidia.com/dgx-basepod, 2 Xeon 8480C of 8 channels with DDR5-4800",
)  # fmt: skip
_DGX_B200 = _server(
    "DGX B200", 2000, 716.8, _PCIE5_X16, "NVIDIA DGX B200 data sheet (2024), 2 Xeon 8570 of 8 channels with DDR5-5600, 2 TB as delivered"
)

_PRESETS: dict[str, tuple[DeviceSpec, Link, Link, HostSpec | None]] = {
    # device, link inside a node, link of a node to others, and the host where most such devices are built into one kind of server
    "v100-16": (  # 8 in a node; with 25 Gb/s: AWS p3.16xlarge
        _gpu("V100-16", 16, 15.75, (125, 15.7, 15.7, 7.8), 900, (7, 0), f"NVIDIA V100 SXM2 {_V100}"), _V100_NVLINK, _ETHERNET_25G, _DGX1),
    "v100-32": (
        _gpu("V100-32", 32, 31.74, (125, 15.7, 15.7, 7.8), 900, (7, 0), f"NVIDIA V100 SXM2 {_V100}"), _V100_NVLINK, _ETHERNET_25G, _DGX1),
    "v100-pcie-16": (  # 4 or 8; the same chip and memory at a lower clock
        _gpu("V100 PCIe-16", 16, 15.75, (112, 14, 14, 7), 900, (7, 0), f"NVIDIA V100 PCIe {_V100}"), _PCIE3_X16, _ETHERNET_25G, None),
    "v100-pcie-32": (
        _gpu("V100 PCIe-32", 32, 31.74, (112, 14, 14, 7), 900, (7, 0), f"NVIDIA V100 PCIe {_V100}"), _PCIE3_X16, _ETHERNET_25G, None),
    "titan-rtx": (  # 1 to 4 in a workstation; usable as an RTX 4090, 3DTopia/Phidias-Diffusion#8
        _gpu("TITAN RTX", 24, 23.64, (130.5, 16.3, 16.3), 672, (7, 5), _TURING), _PCIE3_X16, _ETHERNET_10G, None),
    "rtx-3090": (  # without the NVLink bridge, which joins two cards only; usable: ucwxb/GraphAvatar#4
        _gpu("RTX 3090", 24, 23.69, (71, 71, 35.6), 936, (8, 6), _GA102), _PCIE4_X16, _ETHERNET_10G, None),
    "rtx-4090": (  # usable: pytorch/torchchat#1341
        _gpu("RTX 4090", 24, 23.52, (165.2, 165.2, 82.6), 1008, (8, 9), _ADA), _PCIE4_X16, _ETHERNET_10G, None),
    "rtx-5090": (  # usable: the least that torch states in logs of it
        _gpu("RTX 5090", 32, 31.34, (209.5, 209.5, 104.8), 1792, (12, 0), _BLACKWELL), _PCIE5_X16, _ETHERNET_10G, None),
    "a6000": (  # without the NVLink bridge; usable: the least in logs of cards with 48 GB and ECC off, as it is delivered
        _gpu("RTX A6000", 48, 47.40, (154.8, 154.8, 38.7), 768, (8, 6), _GA102), _PCIE4_X16, _ETHERNET_10G, None),
    "a10": (  # usable with ECC on, here and in L4: the least in logs of cards with 24 GB
        _gpu("A10", 24, 21.95, (125, 125, 31.2), 600, (8, 6), _A10), _PCIE4_X16, _ETHERNET_25G, None),
    "l4": (
        _gpu("L4", 24, 21.95, (121, 121, 30.3), 300, (8, 9), f"NVIDIA L4 {_ADA_SERVER}"), _PCIE4_X16, _ETHERNET_25G, None),
    "l40s": (  # usable: stepfun-ai/Step-Video-T2V#8
        _gpu("L40S", 48, 44.42, (362, 362, 91.6), 864, (8, 9), f"NVIDIA L40S {_ADA_SERVER}"), _PCIE4_X16, _ETHERNET_25G, None),
    "a100-40": (  # 8; with 4 x 100 Gb/s: AWS p4d.24xlarge
        _gpu("A100-40", 40, 39.50, (312, 312, 19.5, 19.5), 1555, (8, 0), _A100), _A100_NVLINK, _FABRIC_400G, _DGX_A100),
    "a100-80": (
        _gpu("A100-80", 80, 79.14, (312, 312, 19.5, 19.5), 2039, (8, 0), _A100), _A100_NVLINK, _FABRIC_400G,
        replace(_DGX_A100, memory_bytes=2000 * GB)),
    "h100": (  # 8
        _gpu("H100", 80, 79.14, (989.4, 989.4, 66.9, 66.9), 3350, (9, 0),
             "NVIDIA H100 SXM5 data sheet and Hopper whitepaper (2022), dense; float32 without TF32"),
        _H100_NVLINK, _FABRIC_3200G, _DGX_H100),
    "h200": (  # decimal bytes, which are less than such a device has
        _gpu("H200", 141 * GB / GIB, 141 * GB / GIB, (989.4, 989.4, 66.9, 66.9), 4800, (9, 0),
             "NVIDIA H200 SXM data sheet (2024), dense; float32 without TF32"),
        _H200_NVLINK, _FABRIC_3200G, _DGX_H100),
    "b200": (  # likewise: torch sees 178.35 GiB
        _gpu("B200", 180 * GB / GIB, 180 * GB / GIB, (2250, 2250, 75, 37), 8000, (10, 0),
             "NVIDIA HGX B200 and DGX B200 data sheets (2024), an eighth, dense; float32 without TF32; workspaces as on Hopper"),
        _B200_NVLINK, _FABRIC_3200G, _DGX_B200),
    "mi300x": (  # usable: the least in logs; capability: as torch has it under ROCm, gfx942
        _gpu("MI300X", 192, 191.69, (1307.4, 1307.4, 163.4, 163.4), 5300, (9, 4),
             "AMD Instinct MI300X data sheet (2023), dense matrix rates; what no tensor can have is taken to be H100's, as nothing was run"
             " on it"),
        _MI300X_FABRIC, _FABRIC_3200G, None),
    "cpu": (_CPU, _LOOPBACK, _ETHERNET_10G_GLOO, None),
}  # fmt: skip


def preset_names() -> tuple[str, ...]:
    """Return the names that `preset` knows."""
    return tuple(_PRESETS)


def preset(name: str, *, nodes: int = 1, devices_per_node: int = 1) -> Hardware:
    """Return a known kind of device, so many times, with links at their line rates; what `hf-osdp profile` measures is better.

    ```python
    preset("a100-80", nodes=2, devices_per_node=8)       # NVLink, 4 x 100 Gb/s between nodes
    preset("rtx-4090", nodes=2, devices_per_node=2)      # workstations: PCIe 4.0, 10 GbE
    ```

    Under NCCL the device reserves what the driver, a CUDA context and cuBLAS take, and each communicator of a plan takes
    `COMMUNICATOR_BYTES`. The host is that of NVIDIA's own servers; it is None for devices that are sold without one.

    Args:
        name: one of `preset_names()`; upper case and `_` are accepted.
        nodes: machines.
        devices_per_node: devices in each.

    Raises:
        HardwareError: the name is not known.
    """
    key = name.lower().replace("_", "-")
    if key not in _PRESETS:
        raise HardwareError(
            f"Hardware {name!r} is not known{nearest(key, _PRESETS)}; use one of {', '.join(_PRESETS)},"
            " or measure this machine by hf-osdp profile."
        )
    device, intra_node, inter_node, host = _PRESETS[key]
    backend = Backend.GLOO if key == "cpu" else Backend.NCCL
    if backend is Backend.NCCL:
        device = replace(device, communicator_bytes=COMMUNICATOR_BYTES, operator_s=OPERATOR_S, unit_s=UNIT_S)
    alone = Hardware(device=device, intra_node=intra_node, inter_node=inter_node, backend=backend, host=host)
    return alone.scaled(nodes=nodes, devices_per_node=devices_per_node)
