"""The devices and links that a plan is made for: sourced presets, or figures measured on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from types import MappingProxyType

from ..errors import HardwareError
from .description import DType
from .job import OptimizerStep
from .wire import WireFormat

GB = 10**9
GIB = 2**30
MOST_RANKS = 2**17
"""Layouts are tried for every divisor of the number of ranks."""
_MOST_MEMORY_BYTES = 2**50
CACHING_MARGIN = 0.06
"""Share of the limit that stays free for gaps between tensors where torch's caching allocator takes the memory.

The most that plans needed in a model of the allocator's rules (docs/estimates.md has the cases), until it is measured on GPUs."""


class Backend(str, Enum):
    """Who moves the bytes between ranks."""

    NCCL = "nccl"
    GLOO = "gloo"

    @property
    def overlaps(self) -> bool:
        """Whether FSDP2's collectives run beside compute. Under gloo each one blocks the rank."""
        return self is Backend.NCCL


class Collective(str, Enum):
    """The collectives that FSDP2 issues, or is given."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    TWO_STAGE_ALL_GATHER = "two_stage_all_gather"
    """Between nodes among ranks of the same place, then inside each node."""
    TWO_STAGE_REDUCE_SCATTER = "two_stage_reduce_scatter"
    """Inside each node, then between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of the connection between neighbours in a ring."""

    latency_s: float
    """α: seconds for one hop of an empty message."""
    bytes_per_s: float
    """1/β: bytes each second in one direction."""
    source: str
    assumed: bool = False
    """There was no such link to measure: the figures stand in for one that this size of machine does not use."""

    def __post_init__(self) -> None:
        if not (_finite(self.latency_s, self.bytes_per_s) and self.bytes_per_s > 0):
            raise ValueError(f"A link needs finite latency_s >= 0 and bytes_per_s > 0, not {self.latency_s} and {self.bytes_per_s}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one rank's share of a CPU."""

    name: str
    memory_bytes: int
    flops_per_s: Mapping[DType, float] = field(hash=False)
    """Dense matrix-product rate by dtype."""
    memory_bytes_per_s: float
    source: str
    operator_s: float = 0.0
    """Seconds that the CPU takes to issue an operator, views included; a GPU waits for them only where it would run out of work."""
    unit_s: float = 0.0
    """Seconds that the CPU takes for FSDP2's hooks around a unit in forward, and again in backward, on a GPU."""
    reserved_bytes: int = 0
    """Device memory that no tensor can have, whatever the plan: driver, CUDA context, workspaces of matrix products."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, which decides on the attention kernel; None where it is not known, or for a CPU."""
    communicator_bytes: int = 0
    """What each of a plan's communicators takes beside that, see `meshes_of` in `planner/decision.py`."""

    def __post_init__(self) -> None:
        rates = (self.memory_bytes_per_s, *self.flops_per_s.values())
        if self.memory_bytes <= 0 or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"Device {self.name!r}: memory, memory bandwidth and FLOP/s must be positive and finite.")
        if (largest := max(self.memory_bytes, self.reserved_bytes, self.communicator_bytes)) > _MOST_MEMORY_BYTES:
            raise ValueError(f"Device {self.name!r}: {largest} bytes of memory; the most are {_MOST_MEMORY_BYTES}.")
        names = ("operator_s", "unit_s", "reserved_bytes", "communicator_bytes")
        if wrong := next((name for name in names if not _finite(getattr(self, name))), None):
            raise ValueError(f"Device {self.name!r}: {wrong}={getattr(self, wrong)} must be finite and at least 0.")
        object.__setattr__(self, "flops_per_s", MappingProxyType(dict(self.flops_per_s)))

    def rate(self, dtype: DType) -> float:
        """Return the matrix-product rate in FLOP/s; HardwareError where it is not known."""
        if dtype not in self.flops_per_s:
            known = ", ".join(d.value for d in self.flops_per_s)
            raise HardwareError(f"The {dtype.value} rate of {self.name} is not known (known: {known}); use one of those or measure it.")
        return self.flops_per_s[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The host beside one device, all devices of its node at work at once; a CPU that trains by itself has none."""

    memory_bytes: int
    """Of one rank's share."""
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    update_bytes_per_s: float
    """Bytes that a fused optimizer step on the host's cores reads and writes each second."""
    source: str

    def __post_init__(self) -> None:
        rates = (self.to_device_bytes_per_s, self.to_host_bytes_per_s, self.update_bytes_per_s)
        if self.memory_bytes <= 0 or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"A host needs memory and finite rates above 0, not {self.memory_bytes} bytes and rates {rates}.")
        if self.memory_bytes > _MOST_MEMORY_BYTES:
            raise ValueError(f"A host of {self.memory_bytes} bytes; the most are {_MOST_MEMORY_BYTES}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """A measured collective: `seconds = latency_s + bytes * seconds_per_byte`, bytes of the whole (unsharded) tensor."""

    collective: Collective
    group_size: int
    latency_s: float
    seconds_per_byte: float
    crosses_nodes: bool = False
    """The group has ranks on several nodes. All-gather and reduce-scatter run between neighbours, all-reduce between ranks that hold the
    same shard, so that groups of one size may lie inside a node for one and across for another."""

    def __post_init__(self) -> None:
        if self.group_size < 2 or not _finite(self.latency_s, self.seconds_per_byte):
            raise ValueError(
                f"A timing needs a group of at least 2 ranks and finite times of at least 0, not group_size={self.group_size},"
                f" latency_s={self.latency_s} and seconds_per_byte={self.seconds_per_byte}."
            )

    @property
    def key(self) -> tuple[Collective, int, bool]:
        """What tells it from other timings."""
        return self.collective, self.group_size, self.crosses_nodes

    def __call__(self, nbytes: int) -> float:
        """Return the seconds of this collective for a whole tensor of `nbytes`."""
        return self.latency_s + self.seconds_per_byte * nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTime:
    """Time of a call on a list of tensors: `call_s + tensors * tensor_s + bytes * seconds_per_byte`."""

    call_s: float = 0.0
    tensor_s: float = 0.0
    seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not _finite(self.call_s, self.tensor_s, self.seconds_per_byte):
            raise ValueError(f"Times must be finite and at least 0: {self.call_s}, {self.tensor_s}, {self.seconds_per_byte}.")

    def __call__(self, tensors: int, nbytes: float) -> float:
        """Return the seconds for so many tensors of `nbytes` together; 0 where there are none."""
        return self.call_s + tensors * self.tensor_s + nbytes * self.seconds_per_byte if tensors else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpOverhead:
    """What FSDP2 and the optimizer do beside compute and links, measured on the machine."""

    gather: WorkTime
    """Gathering a unit without the collective: hooks, views, copies into the buffer and out of it. Bytes are those that are copied: all
    parameters once out, and once 1/g of them in where something is sent."""
    reduce: WorkTime
    """Reducing a unit's gradients without the collective. Bytes are those of all gradients, twice where nothing is sent: FSDP2 then copies
    the buffer again."""
    updates: Mapping[OptimizerStep, WorkTime] = field(hash=False)
    """AdamW on sharded parameters, by the kind of step. Bytes are those of the rank's parameters."""

    def __post_init__(self) -> None:
        if absent := [step.value for step in OptimizerStep if step not in self.updates]:
            raise ValueError(f"The time of the optimizer step {absent[0]!r} is missing.")
        object.__setattr__(self, "updates", MappingProxyType(dict(self.updates)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTime:
    """Measured seconds of one float32 element in a wire format."""

    wire: WireFormat
    encode_s: float
    decode_s: float

    def __post_init__(self) -> None:
        if not _finite(self.encode_s, self.decode_s):
            raise ValueError(f"Times must be finite and at least 0: {self.encode_s}, {self.decode_s}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Nodes of equal devices; ranks are numbered node by node."""

    device: DeviceSpec
    nodes: int = 1
    devices_per_node: int = 1
    intra_node: Link
    """Between devices of a node, for each device."""
    inter_node: Link
    """Between nodes, for a whole node (its devices share it)."""
    backend: Backend
    timings: tuple[CollectiveTiming, ...] = field(default=())
    """Measured collectives; they go before what the links would give."""
    host: HostSpec | None = None
    """Where states can be moved to; None where there is no memory but the device's."""
    fsdp_overhead: FsdpOverhead | None = None
    """Measured work of FSDP2 and the optimizer; None takes their copies and updates at the speed of memory."""
    codecs: tuple[CodecTime, ...] = ()
    """Measured wire formats; others take the bytes that their operators move at the speed of memory."""
    margin: float | None = None
    """Share of a memory limit that plans leave free; None takes `CACHING_MARGIN` under NCCL and nothing under gloo."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise ValueError(f"nodes={self.nodes} and devices_per_node={self.devices_per_node} must be at least 1.")
        if self.world_size > MOST_RANKS:
            raise ValueError(f"nodes={self.nodes} of {self.devices_per_node} devices are {self.world_size}; the most are {MOST_RANKS}.")
        if self.margin is not None:
            check_margin(self.margin, name="margin")

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def summary(self) -> str:
        """Short text: `2 nodes x 8 A100-40 (nccl)`."""
        nodes = f"{self.nodes} nodes x " if self.nodes > 1 else ""
        return f"{nodes}{self.devices_per_node} x {self.device.name} ({self.backend.value})"

    @property
    def free_share(self) -> float:
        """Share of a memory limit that plans leave free."""
        default = CACHING_MARGIN if self.backend is Backend.NCCL else 0.0
        return default if self.margin is None else self.margin

    def room_bytes(self, limit_bytes: int) -> int:
        """Return what a plan may fill under a limit, ⌊limit · (1 - margin)⌋; what the device reserves is part of it."""
        return math.floor(limit_bytes * (1 - Fraction(repr(self.free_share))))

    def limit_for(self, needed_bytes: int) -> int:
        """Return the tightest limit under which a plan may fill so many bytes."""
        return math.ceil(needed_bytes / (1 - Fraction(repr(self.free_share))))

    def outside_bytes(self, communicators: int) -> int:
        """Return the device memory that no tensor can have under a plan of so many communicators."""
        return self.device.reserved_bytes + communicators * self.device.communicator_bytes

    def tensor_bytes(self, limit_bytes: int) -> int:
        """Return what a limit leaves for tensors and for communicators beside that of all ranks."""
        return self.room_bytes(limit_bytes) - self.unavoidable_bytes

    @property
    def unavoidable_bytes(self) -> int:
        """Device memory that no tensor can have under any plan."""
        return self.outside_bytes(int(self.world_size > 1))

    def with_margin(self, margin: float | None) -> Hardware:
        """Return the same with another margin; None leaves it as it is."""
        return self if margin is None else replace(self, margin=check_margin(margin, name="margin"))

    def scaled(self, *, nodes: int | None = None, devices_per_node: int | None = None) -> Hardware:
        """Return the machine with another number of nodes or devices, without measured collectives, which hold for this size alone.

        Raises:
            HardwareError: the new size uses a link that was not there to be measured.
        """
        nodes = self.nodes if nodes is None else nodes
        devices = self.devices_per_node if devices_per_node is None else devices_per_node
        for link, used, between in (self.intra_node, devices > 1, "devices of a node"), (self.inter_node, nodes > 1, "nodes"):
            if used and link.assumed:
                raise HardwareError(
                    f"The link between {between} is not known: {self.summary} has none to measure. Measure where there is one, or name a"
                    " preset instead."
                )
        host, before = self.host, self.devices_per_node
        if host is not None:  # devices share memory and cores; each has its own link
            cores = host.update_bytes_per_s * before / devices
            host = replace(host, memory_bytes=host.memory_bytes * before // devices, update_bytes_per_s=cores)
        return replace(self, nodes=nodes, devices_per_node=devices, timings=(), host=host)

    def timing(self, collective: Collective, group_size: int, *, crosses_nodes: bool = False) -> CollectiveTiming | None:
        """Return the measured timing of a collective in groups of `group_size`, inside a node or across nodes, or None."""
        return next((timing for timing in self.timings if timing.key == (collective, group_size, crosses_nodes)), None)

    def codec(self, wire: WireFormat) -> CodecTime:
        """Return what an element takes in a wire format: as measured, else by the bytes that are read and written."""
        measured = next((codec for codec in self.codecs if codec.wire is wire), None)
        rate = self.device.memory_bytes_per_s
        return measured or CodecTime(wire=wire, encode_s=wire.encode_traffic / rate, decode_s=wire.decode_traffic / rate)


def check_margin(value: object, *, name: str = "memory_margin") -> float:
    """Return a share of the memory limit; ValueError, with its `name`, where it is no number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be the share of the limit that stays free, at least 0 and below 1, such as 0.06.")
    return float(value)


def _finite(*seconds: float) -> bool:
    return all(0 <= value < math.inf for value in seconds)
