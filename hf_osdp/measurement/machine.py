"""The machine that this process runs on, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ..distributed.device import own_gpu
from ..distributed.topology import find_topology
from ..errors import HardwareError
from ..planner.description import DType
from ..planner.hardware import Backend, Collective, CollectiveTiming, DeviceSpec, Hardware, Link
from ..planner.presets import COMMUNICATOR_BYTES, UNIT_S, preset
from .fsdp_overhead import measure_handling, measure_hooks
from .host import measure_host, memory_of_rank
from .links import GroupSizes, few_sizes, measure_collectives
from .rates import copy_rate, matmul_rates, operator_seconds
from .synchronize import distributed, smallest, wait_for_all, world_size

_SECONDS_OF_A_START = 0.7
"""A run with a plan is to start at most five seconds later than one without; who wants better figures has `hf-osdp profile`."""


def measure_hardware(*, device_type: str, seconds: float = 1.0, group_sizes: Sequence[int] | None = None) -> Hardware:
    """Measure compute, memory and links. Where torch.distributed is initialized every rank must call this at the same time.

    Args:
        device_type: `"cpu"` or `"cuda"`.
        seconds: about how long compute is measured, again the collectives, a third of it what FSDP2 does beside them, and on
            CUDA a fifth of it the host; setting up groups comes on top.
        group_sizes: sizes of the groups whose collectives are measured; None takes every divisor of up to 8 ranks, and of more the
            few from which the links follow (`few_sizes`).

    Returns:
        Figures of the slowest rank, the same on every rank. With one process there are no timings of collectives, and the
        links stand at the speed of memory. On the CPU there is no host beside the device.

    Raises:
        ValueError: the device type is not known, or a group size does not divide the world size.
        HardwareError: the device is missing, or ranks do not fill the nodes evenly.
    """
    device = measuring_device(device_type)
    world = world_size()
    local = find_topology().ranks_per_node
    sizes = _group_sizes(world, local, group_sizes)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    timings = measure_collectives(device, sizes, seconds, local_world_size=local) if world > 1 else ()
    spec = _measure_device(device, seconds, before)
    intra_node, inter_node = _links(spec, timings, local=local, world=world)
    return Hardware(
        device=spec,
        nodes=world // local,
        devices_per_node=local,
        intra_node=intra_node,
        inter_node=inter_node,
        backend=Backend.NCCL if device_type == "cuda" else Backend.GLOO,
        timings=timings,
        handling=measure_handling(device, 0.3 * seconds),
        host=measure_host(device, 0.2 * seconds),
    )


def hardware_of_run(wanted: Hardware | str | None, *, device_type: str, nodes: int | None = None) -> Hardware:
    """The hardware to plan a run for. Where torch.distributed is initialized every rank must call this at the same time.

    Args:
        wanted: hardware that is known, such as a profile's; the name of a preset, for as many devices as there are ranks; None
            measures this machine.
        device_type: `"cpu"` or `"cuda"`.
        nodes: how many nodes the ranks are on, where a preset is to take them otherwise than the launcher placed them.

    Returns:
        Hardware with as many devices as there are ranks.

    Raises:
        ValueError: numbers of devices or nodes differ from the run's.
        HardwareError: the preset is not known, or ranks do not fill the nodes evenly.
    """
    ranks, topology = world_size(), find_topology()
    if isinstance(wanted, Hardware):
        if wanted.world_size != ranks:
            raise ValueError(
                f"The hardware has {wanted.world_size} devices, but {ranks} processes are running;"
                f" start {wanted.world_size} processes, or describe {ranks} devices."
            )
        if wanted.nodes != (nodes or topology.nodes):
            raise ValueError(
                f"The hardware has {wanted.nodes} x {wanted.devices_per_node} devices (nodes x devices), but the processes are on"
                f" {topology.nodes} x {topology.ranks_per_node}; describe or profile these, or leave hardware out."
            )
        return wanted
    if wanted is None:
        if nodes not in (None, topology.nodes):
            raise ValueError(f"nodes={nodes}, but the processes are spread over {topology.nodes}; leave nodes out.")
        return measure_hardware(device_type=device_type, seconds=_SECONDS_OF_A_START)
    nodes = nodes or topology.nodes
    if ranks % nodes:
        raise ValueError(f"nodes={nodes} does not divide the {ranks} processes; use a divisor.")
    return preset(wanted, nodes=nodes, devices_per_node=ranks // nodes)


def measuring_device(device_type: str) -> torch.device:
    """This process's device.

    Raises:
        ValueError: the type is not known.
        HardwareError: the device is missing.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r} is not known; use cpu or cuda.")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise HardwareError("device_type=cuda, but torch sees no CUDA device here; use cpu, or a preset of the hardware to plan for.")
    return torch.device("cpu") if device_type == "cpu" else own_gpu()


def _measure_device(device: torch.device, seconds: float, allocated_before: int) -> DeviceSpec:
    """The slowest rank's compute, the smallest rank's memory; all ranks measure at once, as they train at once.

    This comes after the collectives, because NCCL takes its buffers when it first communicates.
    """
    wait_for_all(device)
    rates = matmul_rates(device, 0.7 * seconds)
    dtypes = [dtype for dtype in DType if dtype.value.startswith(("float", "bfloat"))]
    communicator = _communicator_bytes(device)
    available, reserved, where = _memory_bytes(device, allocated_before)
    dispatching = operator_seconds(device, 0.1 * seconds)
    formed = int(world_size() > 1)  # what the device holds now has that of all ranks in it
    known = [copy_rate(device, 0.2 * seconds), available, -(reserved - formed * communicator), -dispatching, -communicator]
    agreed = smallest([*known, *(rates.get(dtype, 0.0) for dtype in dtypes)], device)
    return DeviceSpec(
        name=_agreed_name(device),
        memory_bytes=int(agreed[1]),
        flops_per_s={dtype: rate for dtype, rate in zip(dtypes, agreed[len(known) :], strict=True) if rate > 0},
        memory_bytes_per_s=agreed[0],
        source=f"measured{where}",
        reserved_bytes=int(-agreed[2]),
        operator_s=-agreed[3],
        unit_s=_hooks_s(device, 0.1 * seconds),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        communicator_bytes=int(-agreed[4]),
    )


def _hooks_s(device: torch.device, seconds: float) -> float:
    """Of FSDP2, beside a GPU; a process alone, which cannot measure them, takes the presets' figure."""
    if device.type == "cpu":
        return 0.0  # `measure_handling` has them
    return measure_hooks(device, seconds) if world_size() > 1 else UNIT_S


def _communicator_bytes(device: torch.device) -> int:
    """What NCCL takes for one group of all ranks; a process alone, which cannot measure it, takes the presets' figure. Collective."""
    world = world_size()
    if device.type != "cuda" or world == 1:
        return 0 if device.type != "cuda" else COMMUNICATOR_BYTES
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


def _memory_bytes(device: torch.device, allocated_before: int) -> tuple[int, int, str]:
    """Bytes that a rank can have, those of them that tensors cannot, and on the CPU where they come from. Collective.

    The latter are what the device holds outside torch's allocator, and inside it the workspaces of matrix products, which stay.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        workspaces = max(0, torch.cuda.memory_allocated(device) - allocated_before)
        return total, max(0, total - free - torch.cuda.memory_reserved(device)) + workspaces, ""
    share, where = memory_of_rank()
    return share, 0, f"; memory: {where}"


def device_name(device: torch.device) -> str:
    """What this rank's device is called."""
    threads = torch.get_num_threads()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({threads} thread{'s' if threads > 1 else ''})"


def _agreed_name(device: torch.device) -> str:
    """Rank 0's."""
    names = [device_name(device)]
    if distributed():
        dist.broadcast_object_list(names, src=0, device=device)
    return names[0]


def _group_sizes(world: int, local: int, asked: Sequence[int] | None) -> GroupSizes:
    """Group sizes above 1, the world's own included."""
    if asked is None:
        return few_sizes(world, local)
    for size in asked:
        if size < 1 or world % size:
            raise ValueError(f"group_sizes has {size}, which does not divide the {world} processes; use divisors of {world}.")
    sizes = tuple(sorted({size for size in (*asked, world) if size > 1}))
    return GroupSizes(shards=sizes, replicas=sizes)


def _links(spec: DeviceSpec, timings: Sequence[CollectiveTiming], *, local: int, world: int) -> tuple[Link, Link]:
    """Links that would give the measured all-gathers: t = (g - 1) α + (g - 1) / g · bytes / bandwidth in a ring of g, of whose
    hops one a node leaves the node."""
    gathers = {timing.group_size: timing for timing in timings if timing.collective is Collective.ALL_GATHER}
    if not gathers:
        memory = Link(latency_s=0.0, bytes_per_s=spec.memory_bytes_per_s, source="one process: no link, the speed of memory", assumed=True)
        return memory, memory
    within = [size for size in gathers if size <= local]
    inside = _ring_link(gathers[max(within)]) if within else None
    across = _ring_link(gathers[world], crossings=world // local, inside=inside) if world > local else None
    if inside is None:
        return replace(across, assumed=True), across
    return inside, across or replace(inside, assumed=True)


def _ring_link(timing: CollectiveTiming, *, crossings: int | None = None, inside: Link | None = None) -> Link:
    """The link that a ring's hops take: all of them, or the `crossings` of them that are not `inside` a node."""
    hops = timing.group_size - 1
    mine = hops if crossings is None else min(hops, crossings)
    others_s = 0.0 if inside is None else (hops - mine) * inside.latency_s
    return Link(
        latency_s=max(0.0, timing.latency_s - others_s) / mine,
        bytes_per_s=hops / timing.group_size / timing.seconds_per_byte,
        source=f"measured: all-gather over {timing.group_size} ranks",
    )
