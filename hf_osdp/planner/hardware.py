"""The devices and links that a plan is made for: sourced presets, or figures measured on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from types import MappingProxyType

from ..errors import HardwareError, shown
from ..quantities import MOST_BYTES, check_numbers, format_bytes
from .description import DType
from .training_job import OptimizerStep

GB = 10**9
GIB = 2**30
_NATIVE_SHARE = 0.8
"""bf16 is native if its rate is at least this share of fp16's."""
MOST_RANKS = 2**17
"""The search tries layouts for every divisor of the number of ranks."""
_NOMINAL = 1.1
"""A card's nominal memory is at most this times what torch states of it."""
CACHING_MARGIN, CACHING_BYTES = 0.02, 128 * 2**20
"""What of a limit stays free for gaps between tensors in torch's caching allocator: a share, and bytes whatever the
limit.

Gaps hardly grow with the limit: each stream has its own pools, of pages of 2 and 20 MiB. Cases: docs/estimates.md."""


class Backend(str, Enum):
    """Communication backend of torch.distributed."""

    NCCL = "nccl"
    GLOO = "gloo"

    @property
    def overlaps(self) -> bool:
        """Whether FSDP2's collectives overlap compute. Under gloo each collective blocks its rank."""
        return self is Backend.NCCL


class Collective(str, Enum):
    """The collectives of a training step."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    TWO_STAGE_ALL_GATHER = "two_stage_all_gather"
    """Between nodes among ranks with the same local rank, then inside each node."""
    TWO_STAGE_REDUCE_SCATTER = "two_stage_reduce_scatter"
    """Inside each node, then between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of the connection between neighbours in a ring."""

    latency_s: float
    """α: seconds for one hop of an empty message."""
    bytes_per_s: float
    """1/β: bytes each second in one direction, as a ring of NCCL or gloo reaches it."""
    source: str
    shared_bytes_per_s: float | None = None
    """What all devices of a machine reach together, if their messages pass through the host's memory; None if each
    has a link of its own."""
    assumed: bool = False
    """The machine had no such link to measure; the figures are placeholders that no plan of its size uses."""

    def __post_init__(self) -> None:
        check_numbers(self, "latency_s")
        check_numbers(self, "bytes_per_s", above_zero=True)
        if self.shared_bytes_per_s is not None:
            check_numbers(self, "shared_bytes_per_s", above_zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one rank's share of a CPU."""

    name: str
    memory_bytes: int
    flops_per_s: Mapping[DType, float] = field(hash=False)
    """Rate that dense matrix products reach, by dtype."""
    memory_bytes_per_s: float
    """Rate that operators reach that only move data."""
    source: str
    attention_flops_per_s: float | None = None
    """Rate that fused attention reaches in 16 bits, forward and backward together; None if it is not known apart from
    that of products."""
    product_traffic: float = 0.0
    """Share of the time of a product's or of attention's reads and writes that its computation does not hide."""
    operator_s: float = 0.0
    """Seconds of CPU time to launch an operator, views included; a GPU waits for the CPU only if it runs out of
    work.
    """
    reserved_bytes: int = 0
    """Device memory that is not available to tensors under any plan: driver, CUDA context, workspaces of matrix
    products.
    """
    capability: tuple[int, int] | None = None
    """CUDA compute capability, which selects the attention kernel; None if unknown, or for a CPU."""
    communicator_bytes: int = 0
    """Memory of each communicator of a plan, see `meshes_of` in `planner/decision.py`."""

    def __post_init__(self) -> None:
        check_numbers(self, "memory_bytes", "memory_bytes_per_s", above_zero=True)
        check_numbers(self, "operator_s", "product_traffic", "reserved_bytes", "communicator_bytes")
        if self.attention_flops_per_s is not None:
            check_numbers(self, "attention_flops_per_s", above_zero=True)
        if not all(0 < rate < math.inf for rate in self.flops_per_s.values()):
            raise ValueError(f"Device {self.name!r}: FLOP/s must be finite and above 0.")
        if (largest := max(self.memory_bytes, self.reserved_bytes, self.communicator_bytes)) > MOST_BYTES:
            raise ValueError(f"Device {self.name!r}: {largest} bytes of memory; the most are {MOST_BYTES}.")
        object.__setattr__(self, "flops_per_s", MappingProxyType(dict(self.flops_per_s)))

    @property
    def native_bf16(self) -> bool:
        """Whether bfloat16 is as fast as float16, or there is no float16."""
        bf16, fp16 = (self.flops_per_s.get(dtype) for dtype in (DType.BFLOAT16, DType.FLOAT16))
        return bf16 is not None and (fp16 is None or bf16 >= _NATIVE_SHARE * fp16)

    def check_limit(self, limit_bytes: int | None, *, given: str) -> int:
        """Return a limit if the device has as much memory, for None all of it, and also for the nominal size of a card
        of which torch states less; else raise ValueError with the limit as it was `given`: `memory_limit='8GiB'`.
        """
        total = self.memory_bytes
        is_nominal = total % GIB and (limit_bytes or 0) <= _NOMINAL * total  # presets have whole sizes
        if limit_bytes is None or limit_bytes <= total or is_nominal:
            return min(limit_bytes or total, total)
        raise ValueError(
            f"{given} is more than the {format_bytes(total)} of {self.name}; use at most {total // 2**20}MiB, or leave"
            " it out for all of them."
        )

    def rate(self, dtype: DType) -> float:
        """Return the matrix-product rate in FLOP/s; HardwareError if it is not known."""
        if dtype not in self.flops_per_s:
            known = ", ".join(d.value for d in self.flops_per_s)
            raise HardwareError(
                f"The {dtype.value} rate of {self.name} is not known (known: {known}); use one of those or measure it."
            )
        return self.flops_per_s[dtype]

    def attention_rate(self, dtype: DType) -> float:
        """Return the rate of fused attention in FLOP/s; in 32 bits that of products, if it is lower."""
        return min(self.rate(dtype), self.attention_flops_per_s or math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """One rank's share of its node's host, while all devices of the node are busy. A CPU device has no host."""

    memory_bytes: int
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    update_bytes_per_s: float
    """Bytes per second that a fused optimizer step on the host's cores reads and writes."""
    source: str

    def __post_init__(self) -> None:
        check_numbers(
            self, "memory_bytes", "to_device_bytes_per_s", "to_host_bytes_per_s", "update_bytes_per_s", above_zero=True
        )
        if self.memory_bytes > MOST_BYTES:
            raise ValueError(f"A host of {self.memory_bytes} bytes; the most are {MOST_BYTES}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """A measured collective: `seconds = latency_s + bytes * seconds_per_byte`, with the bytes of the whole
    (unsharded) tensor.
    """

    collective: Collective
    group_size: int
    latency_s: float
    seconds_per_byte: float
    crosses_nodes: bool = False
    """Whether the group has ranks on several nodes. Groups of one size differ: neighbours for all-gather and
    reduce-scatter, ranks with the same shard for all-reduce."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"CollectiveTiming.group_size={self.group_size} must be at least 2.")
        check_numbers(self, "latency_s", "seconds_per_byte")

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
        check_numbers(self, "call_s", "tensor_s", "seconds_per_byte")

    def __call__(self, tensors: int, nbytes: float) -> float:
        """Return the seconds for a list of tensors with `nbytes` in total; 0 for an empty list."""
        return self.call_s + tensors * self.tensor_s + nbytes * self.seconds_per_byte if tensors else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpOverhead:
    """Work of FSDP2, of replicas and of the optimizer beside compute and links.

    Beside a GPU it is the CPU's time alone, without bytes, which move at the speed of memory.
    """

    copy: WorkTime
    """Writing a replica's copies in the compute dtype. Bytes are read and written."""
    flatten: WorkTime
    """Collecting a replica's gradients for the all-reduce. Bytes are read and written."""
    gather: WorkTime
    """Gathering a unit without the collective: hooks, views, copies into the buffer and out of it. Bytes are the
    copied ones: all parameters out of the buffer, and for g > 1 the rank's 1/g of them into it."""
    reduce: WorkTime
    """Reducing a unit's gradients without the collective. Bytes are those of all gradients, twice for g = 1, where
    FSDP2 copies the buffer again."""
    updates: Mapping[OptimizerStep, WorkTime] = field(hash=False)
    """AdamW on sharded parameters, by kind of step. Bytes are those of the rank's parameters."""

    def __post_init__(self) -> None:
        if absent := [step.value for step in OptimizerStep if step not in self.updates]:
            raise ValueError(f"The time of the optimizer step {absent[0]!r} is missing.")
        object.__setattr__(self, "updates", MappingProxyType(dict(self.updates)))

    @classmethod
    def issued(cls, operator_s: float, **stock: tuple[float, float, float]) -> FsdpOverhead:
        """Return the CPU's time beside a GPU, estimated from the seconds of an operator; `stock` is what differs
        (`DDP_OPERATORS`, `FSDP_OPERATORS`).
        """
        return cls._of(_OPERATORS | stock, _WITHOUT_LAUNCH * operator_s, 0.0)

    @classmethod
    def among_ranks(cls, operator_s: float, byte_s: float) -> FsdpOverhead:
        """Return the time of CPU ranks from the seconds of an operator, and to move a byte of memory."""
        return cls._of(_AMONG_RANKS, operator_s, byte_s)

    @classmethod
    def _of(cls, table: Mapping[str, tuple[float, float, float]], operator_s: float, byte_s: float) -> FsdpOverhead:
        works = {
            name: WorkTime(call_s=call * operator_s, tensor_s=tensor * operator_s, seconds_per_byte=nbytes * byte_s)
            for name, (call, tensor, nbytes) in table.items()
        }
        return cls(updates={step: works.pop(step.value) for step in OptimizerStep}, **works)


_OPERATORS = {
    "copy": (8, 0.0, 0.0), "flatten": (17, 0.2, 0.0), "gather": (40, 1.7, 0.0), "reduce": (55, 4.4, 0.0),
    "fused": (0.0, 0.4, 0.0), "foreach": (0.0, 1.3, 0.0), "for_loop": (0.0, 8.5, 0.0),
}  # fmt: skip
"""CPU time of a unit's work and of AdamW, as multiples of an operator's: for a call, and for each tensor; and as
multiples of the time to move a byte, for each byte. Measured in bf16 without bytes to move (torch 2.13), among ranks
that send nothing; NCCL's own calls come on top: docs/rates.md.
"""
_WITHOUT_LAUNCH = 0.85
"""Share of an operator's time that launches no kernel: the multiples were measured where launches take no time, and
that work launches few. Fitted to steps of an H100: docs/rates.md.
"""
DDP_OPERATORS = {"copy": (0.0, 1.1, 0.0), "flatten": (0.0, 2.6, 0.0)}
"""What differs under torch's DDP and autocast, which casts each weight and each gradient by itself."""
FSDP_OPERATORS = {
    "gather": (60, 3.3, 0.0), "fused": (0.0, 4.8, 0.0), "foreach": (0.0, 6.0, 0.0), "for_loop": (0.0, 33.0, 0.0),
}  # fmt: skip
"""What differs under FSDP2 as it comes, which copies shards twice, and whose optimizers step DTensors."""
_AMONG_RANKS = {
    "copy": (8, 0.0, 1.0), "flatten": (10, 1.2, 1.0), "gather": (50, 2.4, 2.4), "reduce": (55, 4.4, 5.4),
    "fused": (0.0, 0.9, 4.4), "foreach": (0.0, 3, 28), "for_loop": (0.0, 8, 34),
}  # fmt: skip
"""The same, as measured in float32 on two gloo ranks of two CPU cores in November 2026 (torch 2.13): rounded means of
three runs, which differed by up to a fifth, a call to reduce by two.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Nodes of equal devices; ranks are numbered node by node."""

    device: DeviceSpec
    nodes: int = 1
    devices_per_node: int = 1
    intra_node: Link
    """Between devices of a node, for each device."""
    inter_node: Link
    """Between nodes, for a whole node; its devices share the link."""
    backend: Backend
    timings: tuple[CollectiveTiming, ...] = field(default=())
    """Measured collectives; they take precedence over estimates from the links."""
    host: HostSpec | None = None
    """The host, to which states can be offloaded; None if unknown, or if the device is the CPU."""
    fsdp_overhead: FsdpOverhead | None = None
    """Measured work of FSDP2 and the optimizer; None estimates copies and updates at memory speed, and on a GPU the
    CPU's time from that of an operator.
    """
    margin: float | None = None
    """Share of a memory limit that plans leave free; None is `CACHING_MARGIN` and `CACHING_BYTES` under NCCL and 0
    under gloo.
    """
    beside_bytes: int = 0
    """Memory of each device that other programs have or will take."""

    def __post_init__(self) -> None:
        check_numbers(self, "beside_bytes")
        if self.nodes < 1 or self.devices_per_node < 1:
            raise ValueError(f"nodes={self.nodes} and devices_per_node={self.devices_per_node} must be at least 1.")
        if self.world_size > MOST_RANKS:
            raise ValueError(
                f"nodes={self.nodes} of {self.devices_per_node} devices are {self.world_size}; the most are"
                f" {MOST_RANKS}."
            )
        if self.margin is not None:
            check_margin(self.margin, name="margin")

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    def check_limit(self, limit_bytes: int | None, *, given: str) -> int:
        """Return what a plan may take under a limit, for None all that other programs leave; errors are those of
        `DeviceSpec.check_limit`.
        """
        limit, left = self.device.check_limit(limit_bytes, given=given), self.device.memory_bytes - self.beside_bytes
        if left > 0:
            return min(limit, left)
        whole = format_bytes(self.device.memory_bytes)
        raise ValueError(
            f"Other programs take {format_bytes(self.beside_bytes)} of the {whole} of {self.device.name}, which leaves"
            " nothing; end them, or lower beside."
        )

    @property
    def summary(self) -> str:
        """Short text: `2 nodes x 8 A100-40 (nccl)`."""
        nodes = f"{self.nodes} nodes x " if self.nodes > 1 else ""
        return f"{nodes}{self.devices_per_node} x {self.device.name} ({self.backend.value})"

    @property
    def queueing(self) -> FsdpOverhead:
        """The CPU's time for FSDP2 and the optimizer beside a GPU: as in the measured machine, else estimated."""
        return self.fsdp_overhead or FsdpOverhead.issued(self.device.operator_s)

    def running(self, stock: Mapping[str, tuple[float, float, float]]) -> Hardware:
        """Return the machine with the host's time of DDP or of FSDP2 as people run them (`DDP_OPERATORS`,
        `FSDP_OPERATORS`), if a GPU may wait for the host.
        """
        overhead = FsdpOverhead.issued(self.device.operator_s, **stock)
        return replace(self, fsdp_overhead=overhead) if self.backend.overlaps else self

    @property
    def intra_node_bytes_per_s(self) -> float:
        """Bytes each second that a device sends to its neighbour in the machine while all devices send."""
        link = self.intra_node
        shared = math.inf if link.shared_bytes_per_s is None else link.shared_bytes_per_s / self.devices_per_node
        return min(link.bytes_per_s, shared)

    @property
    def free_share(self) -> float:
        """Share of a memory limit that plans leave free, beside `free_bytes`."""
        default = CACHING_MARGIN if self.backend is Backend.NCCL else 0.0
        return default if self.margin is None else self.margin

    @property
    def free_bytes(self) -> int:
        """Bytes that plans leave free under any limit."""
        return CACHING_BYTES if self.margin is None and self.backend is Backend.NCCL else 0

    def room_bytes(self, limit_bytes: int) -> int:
        """Return the bytes that a plan may use under a limit, ⌊limit · (1 - share)⌋ - free bytes, memory reserved by
        the device included.
        """
        return max(0, math.floor(limit_bytes * (1 - Fraction(repr(self.free_share)))) - self.free_bytes)

    def limit_for(self, needed_bytes: int) -> int:
        """Return the tightest limit under which a plan may use `needed_bytes`."""
        return math.ceil((needed_bytes + self.free_bytes) / (1 - Fraction(repr(self.free_share))))

    def outside_bytes(self, communicators: int) -> int:
        """Return the device memory outside tensors under a plan with this number of communicators."""
        return self.device.reserved_bytes + communicators * self.device.communicator_bytes

    def tensor_bytes(self, limit_bytes: int) -> int:
        """Return the bytes that a limit leaves for tensors and for all communicators but the one of all ranks."""
        return self.room_bytes(limit_bytes) - self.unavoidable_bytes

    @property
    def unavoidable_bytes(self) -> int:
        """Least device memory outside tensors under any plan."""
        return self.outside_bytes(int(self.world_size > 1))

    def with_margin(self, margin: float | None) -> Hardware:
        """Return the hardware with another margin; None keeps the margin."""
        return self if margin is None else replace(self, margin=margin)

    def scaled(self, *, nodes: int | None = None, devices_per_node: int | None = None) -> Hardware:
        """Return the hardware with another number of nodes or devices, without measured collectives, which hold for
        one size only.

        Raises:
            HardwareError: the new size uses a link that was not measured.
        """
        nodes = self.nodes if nodes is None else nodes
        devices = self.devices_per_node if devices_per_node is None else devices_per_node
        for link, used, between in (
            (self.intra_node, devices > 1, "devices of a node"),
            (self.inter_node, nodes > 1, "nodes"),
        ):
            if used and link.assumed:
                raise HardwareError(
                    f"The link between {between} is not known: {self.summary} has no such link. Measure more devices,"
                    " or name a preset"
                    " instead."
                )
        host, before = self.host, self.devices_per_node
        if host is not None:  # devices share the host's memory and cores, but each has its own link
            cores = host.update_bytes_per_s * before / devices
            host = replace(host, memory_bytes=host.memory_bytes * before // devices, update_bytes_per_s=cores)
        return replace(self, nodes=nodes, devices_per_node=devices, timings=(), host=host)

    def timing(
        self, collective: Collective, group_size: int, *, crosses_nodes: bool = False
    ) -> CollectiveTiming | None:
        """Return the measured timing of a collective in groups of `group_size`, inside a node or across nodes; None
        if not measured.
        """
        asked = collective, group_size, crosses_nodes
        return next((t for t in self.timings if (t.collective, t.group_size, t.crosses_nodes) == asked), None)


def check_margin(value: object, *, name: str = "memory_margin") -> None:
    """Raise a ValueError with its `name` unless a share of the memory limit is a number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"{name}={shown(value)} must be the share of the limit that stays free, at least 0 and below 1, such as"
            " 0.06."
        )
