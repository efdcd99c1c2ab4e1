"""Measure devices and links as a `Hardware`, and together with a model's blocks as a `Profile`."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import torch
import torch.distributed as dist

from ..distributed.consensus import on_rank_zero
from ..distributed.device import own_gpu
from ..distributed.mesh import find_topology, world_size
from ..distributed.process_group import all_gather_objects
from ..errors import HardwareError
from ..planner.description import DType
from ..planner.hardware import Backend, DeviceSpec, FsdpOverhead, Hardware
from ..planner.presets import COMMUNICATOR_BYTES, CONTEXT_BYTES
from ..planner.profile import Profile, SegmentTimes
from ..versions import package_versions
from .block_times import TimedModel, measure_block_times
from .links import links_of, measure_collectives
from .memory_limits import memory_of_rank
from .rates import (
    copy_rate,
    matmul_rates,
    measure_host,
    operator_seconds,
)
from .timing import barrier, over_ranks

_OWN_BYTES = CONTEXT_BYTES + COMMUNICATOR_BYTES + 2**29
"""Most that one process takes of a GPU outside torch's allocator; more is that of others."""


def measure_hardware(*, device_type: str, seconds: float = 1.0, every_size: bool = False) -> Hardware:
    """Measure compute, memory and links. Collective if torch.distributed is initialized.

    Args:
        device_type: `"cpu"` or `"cuda"`.
        seconds: about how long to measure compute, and again the collectives; on CUDA the host takes a fifth of it.
            Setting up groups takes additional time. On a slow link the collectives take
            at most 10 seconds.
        every_size: measure the collectives of groups of every size, not only of the few from which the links follow.

    Returns:
        Figures of the slowest rank, the same on every rank. With one process there are no timings of collectives, and
        the links have the speed of memory. On the CPU there is no separate host.

    Raises:
        ValueError: the device type is not known.
        HardwareError: the device is missing, or ranks do not fill the nodes evenly.
    """
    device = measuring_device(device_type)
    world = world_size()
    local = find_topology().ranks_per_node
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    timings = measure_collectives(device, seconds, local=local, every_size=every_size) if world > 1 else ()
    spec = _measure_device(device, seconds, before)
    intra_node, inter_node = links_of(spec, timings, local=local, world=world)
    overhead = FsdpOverhead.among_ranks(spec.operator_s, 1 / spec.memory_bytes_per_s)
    if device.type == "cuda":
        overhead = FsdpOverhead.issued(spec.operator_s)
    return Hardware(
        device=spec,
        nodes=world // local,
        devices_per_node=local,
        intra_node=intra_node,
        inter_node=inter_node,
        backend=Backend.NCCL if device_type == "cuda" else Backend.GLOO,
        timings=timings,
        fsdp_overhead=overhead if world > 1 else None,
        host=measure_host(device, 0.2 * seconds),
    )


def measure_profile(*, device_type: str, seconds: float = 10.0, model: TimedModel | None = None) -> Profile:
    """Measure this machine. Collective if torch.distributed is initialized.

    Args:
        device_type: `"cpu"` or `"cuda"`.
        seconds: about how long to measure, with a model half of it for blocks; setting up takes additional time.
        model: also time this model's blocks; None measures only the machine.

    Raises:
        ValueError, HardwareError: as in `measure_hardware`, or `seconds` is not positive.
        ProfileError: the model does not fit, or cannot be timed.
    """
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds={seconds} must be positive and finite.")
    device = measuring_device(device_type)
    machine_s = seconds if model is None else seconds / 2
    hardware = measure_hardware(device_type=device_type, seconds=machine_s / 2.1, every_size=True)
    segments: tuple[SegmentTimes, ...] = ()
    name = ""
    if model is not None:
        segments = measure_block_times(model, device=device, seconds=seconds / 2)
        config = getattr(model.model_or_config, "config", model.model_or_config)
        name = getattr(config, "_name_or_path", "") or type(model.model_or_config).__name__
    profile = Profile(
        hardware=hardware,
        segments=segments,
        device_names=tuple(all_gather_objects(device_name(device))),
        model=name,
        versions=package_versions(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    return Profile.from_json(on_rank_zero(profile.to_json))  # dates and versions may differ between ranks


def with_memory_of_now(hardware: Hardware, device: torch.device) -> Hardware:
    """Return earlier measured hardware with the current memory; reserved memory is the larger of then and now.

    Collective.
    """
    memory, reserved, of_host, _ = _memory_bytes(device, hardware.device.communicator_bytes)
    reserved = max(reserved, hardware.device.reserved_bytes)
    return replace(
        hardware,
        device=replace(hardware.device, memory_bytes=memory, reserved_bytes=reserved),
        host=hardware.host and replace(hardware.host, memory_bytes=of_host),
    )


def measuring_device(device_type: str) -> torch.device:
    """Return this process's device; raise ValueError for an unknown type, HardwareError for a missing device."""
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r} is not known; use cpu or cuda.")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise HardwareError(
            "device_type=cuda, but torch sees no CUDA device here; use cpu, or a preset of the hardware to plan for."
        )
    return torch.device("cpu") if device_type == "cpu" else own_gpu()


def device_name(device: torch.device) -> str:
    threads = torch.get_num_threads()
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({threads} thread{'s' if threads > 1 else ''})"
    )


def _measure_device(device: torch.device, seconds: float, allocated_before: int) -> DeviceSpec:
    """Measure the slowest rank's compute and the least memory of a rank; all ranks measure at once, as in training.

    Call this after measuring collectives, because NCCL allocates its buffers when it first communicates.
    """
    barrier(device)
    rates = matmul_rates(device, 0.7 * seconds)
    dtypes = [dtype for dtype in DType if dtype.value.startswith(("float", "bfloat"))]
    figures = [
        -_communicator_bytes(device),
        -operator_seconds(device, 0.1 * seconds),
        copy_rate(device, 0.2 * seconds),
    ]
    agreed = over_ranks([*figures, *(rates.get(dtype, 0.0) for dtype in dtypes)], dist.ReduceOp.MIN)
    communicator, dispatching, copies, *products = agreed
    memory, reserved, _, memory_source = _memory_bytes(device, -communicator, allocated_before)
    return DeviceSpec(
        name=all_gather_objects(device_name(device))[0],
        memory_bytes=memory,
        flops_per_s={dtype: rate for dtype, rate in zip(dtypes, products, strict=True) if rate > 0},
        memory_bytes_per_s=copies,
        source="measured" if device.type == "cuda" else f"measured; memory: {memory_source}",
        reserved_bytes=reserved,
        operator_s=-dispatching,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        communicator_bytes=int(-communicator),
    )


def bytes_of_others(device_type: str) -> int:
    """Return the bytes of this process's device outside torch's allocator, without what the process itself may take
    there.
    """
    if device_type != "cuda" or not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(device := own_gpu())
    return max(0, total - free - torch.cuda.memory_reserved(device) - _OWN_BYTES)


def _communicator_bytes(device: torch.device) -> int:
    """Return the bytes that NCCL allocates for one group of all ranks; with a single process, the presets' figure.

    Collective.
    """
    world = world_size()
    if device.type == "cpu" or world == 1:
        return 0 if device.type == "cpu" else COMMUNICATOR_BYTES
    part, whole = torch.zeros(1, device=device), torch.zeros(world, device=device)
    group = dist.new_group()
    free, cached = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    dist.all_reduce(part, group=group)
    dist.all_gather_into_tensor(whole, part, group=group)
    dist.reduce_scatter_tensor(part, whole, group=group)
    torch.cuda.synchronize(device)
    taken = free - torch.cuda.mem_get_info(device)[0] - (torch.cuda.memory_reserved(device) - cached)
    dist.destroy_process_group(group)
    return max(0, taken)


def _memory_bytes(
    device: torch.device, communicator_bytes: float, allocated_before: int | None = None
) -> tuple[int, int, int, str]:
    """Return the least memory of a rank, the most bytes of it that tensors cannot use, the least share of a host, and
    the source of that share. Collective.

    Tensors cannot use memory outside torch's allocator, nor the workspaces of matrix products inside it, which stay
    allocated: what tensors have taken since there were `allocated_before`. The communicator of the group of all ranks
    does not count.
    """
    share, source = memory_of_rank()
    available, reserved = share, 0.0
    if device.type == "cuda":
        free, available = torch.cuda.mem_get_info(device)
        workspaces = 0 if allocated_before is None else torch.cuda.memory_allocated(device) - allocated_before
        own = available - free - torch.cuda.memory_reserved(device) - bytes_of_others("cuda")
        reserved = max(0, own) + max(0, workspaces)
    if world_size() > 1:
        reserved -= communicator_bytes
    least, most, host = over_ranks([available, -reserved, share], dist.ReduceOp.MIN)
    return int(least), max(0, int(-most)), int(host), source
