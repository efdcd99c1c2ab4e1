"""Checks of the devices: precision, links, and memory that other processes hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...planner.cost.timing import TimeEstimate
from ...planner.description import DType
from ...planner.hardware import DeviceSpec, Hardware
from ...planner.job import Precision
from ...planner.plan import Plan
from ...planner.presets import COMMUNICATOR_BYTES, CONTEXT_BYTES
from ...planner.search.compare import StrategyResult
from ...quantities import format_bytes, format_seconds
from .findings import Check, Finding, error, warning

_AS_FAST = 0.8
"""bf16 is native where its rate is at least this part of fp16's."""
_WAITING = 0.25
"""A link is slow where a step waits for communication for more than this part."""
_FASTER = 1.1
"""Another strategy is named where a step of the one asked for takes this much longer."""
_SLACK_BYTES = 2**30
"""Driver, context and communicators may take this much beyond what is known of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a device now, as this process sees it. The CPU's is its node's, shared by all ranks there."""

    name: str
    total_bytes: int
    free_bytes: int
    own_bytes: int
    """Held by this process's tensors already, or kept by its allocator."""
    sharing: int = 1
    """Ranks that use it together."""

    @property
    def outside_bytes(self) -> int:
        """Bytes that are neither free nor this process's tensors."""
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes)


def native_bf16(device: DeviceSpec) -> bool:
    """Return whether the device multiplies bfloat16 about as fast as float16, or has no float16."""
    bf16, fp16 = (device.flops_per_s.get(dtype) for dtype in (DType.BFLOAT16, DType.FLOAT16))
    return bf16 is not None and (fp16 is None or bf16 >= _AS_FAST * fp16)


def fp16_for_bf16(precision: Precision, native_on: str | None) -> Finding | None:
    """Find float16, which needs loss scaling, where bfloat16 is as fast; `native_on` names a device that has it natively."""
    if native_on is None or precision.compute is not DType.FLOAT16:
        return None
    return warning(
        Check.FP16,
        f"mixed_precision=fp16 scales the loss and skips steps that overflow, and {native_on} computes bf16 as fast; use"
        " mixed_precision=bf16, which needs neither.",
    )


def slow_link(plan: Plan, hardware: Hardware | None, time: TimeEstimate | None, others: Sequence[StrategyResult] = ()) -> Finding | None:
    """Find units that are gathered between nodes over a link for which every step waits.

    Args:
        plan: what is to run, a single strategy or a plan that was given; a plan that the search chose for this hardware is the best.
        hardware: links; None where they are not known.
        time: the plan's estimate.
        others: what other strategies would take under the same limit, where that was estimated.
    """
    if hardware is None or time is None or hardware.nodes == 1 or not time.step_s:
        return None
    crossing = sum(unit.shard_size > hardware.devices_per_node and not unit.two_stage for unit in plan.units)
    waiting = time.total("exposed_s") / time.step_s
    best = max((row.result.plan for row in others if row.result is not None), key=lambda p: p.samples_per_s or 0.0, default=None)
    gain = 0.0 if best is None else (best.samples_per_s or 0.0) / (plan.global_batch_size / time.step_s)
    if not crossing or waiting <= _WAITING or (best is not None and gain < _FASTER):
        return None
    remedy = "try strategy=osdp, hsdp or two_stage"
    if best is not None:
        remedy = f"strategy={best.strategy} is estimated to be {gain:.1f} times as fast under the same limit"
    link, step = f"{format_bytes(hardware.inter_node.bytes_per_s)}/s", format_seconds(time.step_s)
    return warning(
        Check.LINKS,
        f"{crossing} of {len(plan.units)} units are sharded across {hardware.nodes} nodes over {link}, and {100 * waiting:.0f} % of a step"
        f" of {step} waits for communication; {remedy}.",
    )


def memory_now(memory: DeviceMemory, needed_bytes: int, communicators: int) -> Finding | None:
    """Find that the plan's tensors have no room now, or that other processes use the device.

    Args:
        memory: the device's, now.
        needed_bytes: the plan's highest moment, tensors alone.
        communicators: of the plan.
    """
    available, needed = memory.free_bytes + memory.own_bytes, memory.sharing * needed_bytes
    if needed > available:
        found = warning if memory.name == "cpu" else error
        whose = f"The plan's {memory.sharing} ranks here need" if memory.sharing > 1 else "The plan needs"
        return found(
            Check.PROCESSES,
            f"{whose} {format_bytes(needed)} on {memory.name}, but {format_bytes(available)} of {format_bytes(memory.total_bytes)} are"
            " there now; end what holds the rest, or plan again with a lower memory limit.",
        )
    ours = CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES
    if memory.name == "cpu" or memory.outside_bytes <= ours + _SLACK_BYTES:
        return None
    return warning(
        Check.PROCESSES,
        f"{format_bytes(memory.outside_bytes)} of {memory.name} are held outside of this process's tensors, where CUDA and NCCL take about"
        f" {format_bytes(ours)}: other processes are on it (nvidia-smi lists them) and may take more. End them, or choose another device"
        " with CUDA_VISIBLE_DEVICES.",
    )
