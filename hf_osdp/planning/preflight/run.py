"""All preflight checks of a run, and what the ranks found together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from ...distributed.device import own_gpu
from ...distributed.mesh import find_topology
from ...distributed.process_group import waiting_group
from ...measurement.memory_limits import memory_limits, tightest
from ...planner.cost.timing import TimeEstimate
from ...planner.description import DType, UnitDescription
from ...planner.hardware import DeviceSpec, Hardware
from ...planner.job import OptimizerSpec, Precision
from ...planner.plan import Plan
from ...planner.search.compare import StrategyResult
from . import checks
from .checks import Check, DeviceMemory, Finding, RunFolder, Severity, refuse_errors

_AS_FAST = 0.8
"""bf16 is native where its rate is at least this part of fp16's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """What is known of a run before it starts; None where it is not."""

    units: Sequence[UnitDescription]
    """Of the model as it will be trained."""
    precision: Precision
    optimizer: OptimizerSpec
    asked_classes: Sequence[str] | None = None
    found_classes: Sequence[str] = ()
    frozen_in_optimizer: int = 0
    plan: Plan | None = None
    hardware: Hardware | None = None
    bf16_on: str | None = None
    """The device's name where it computes bfloat16 as fast as float16."""
    time: TimeEstimate | None = None
    """The plan's; None where the search chose the plan out of everything, for this hardware: no other is better."""
    others: Sequence[StrategyResult] = ()
    """What other strategies would take under the same limit, where that was estimated."""
    needed_bytes: int | None = None
    """The plan's highest moment, tensors alone."""
    memory: DeviceMemory | None = None
    folder: RunFolder | None = None


def check_run(known: KnownRun, model: nn.Module, device_type: str) -> tuple[Finding, ...]:
    """Return what all ranks find before a run; device memory and bfloat16 support are looked up here. Collective.

    Raises:
        PreflightError: the run would fail, or train something else than was meant; the same line on every rank.
    """
    device = None if known.hardware is None else known.hardware.device
    known = replace(known, bf16_on=bf16_on(device, device_type), memory=device_memory(device_type, model))
    return merged_findings(findings_of(known))


def findings_of(known: KnownRun) -> tuple[Finding, ...]:
    """Return what is wrong with a run, as far as this process can see, in the order of the checks."""
    found = [
        checks.whole_in_one_unit(known.units),
        checks.unused_block_classes(known.asked_classes, known.found_classes),
        checks.no_masters(known.units, known.precision),
        checks.fp16_for_bf16(known.precision, known.bf16_on),
        checks.frozen(known.units, in_optimizer=known.frozen_in_optimizer),
    ]
    if known.plan is not None:
        found.append(checks.slow_link(known.plan, known.hardware, known.time, known.others))
        if known.memory is not None and known.needed_bytes is not None:
            found.append(checks.memory_now(known.memory, known.needed_bytes, known.plan.communicators))
    if known.folder is not None:
        found.append(checks.not_writable(known.folder) or checks.too_small(known.folder, known.units, known.optimizer))
    return tuple(finding for finding in found if finding is not None)


def merged_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings of all ranks, each once: rank 0's, else the first rank's; all raise if an error is among them. Collective."""
    by_rank: list[Sequence[Finding]] = [tuple(findings)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        by_rank = [()] * dist.get_world_size()
        dist.all_gather_object(by_rank, tuple(findings), group=waiting_group())
    first: dict[tuple[Check, Severity], Finding] = {}
    for rank, found in enumerate(by_rank):
        for finding in found:
            said = finding if rank == 0 else replace(finding, message=f"On rank {rank}: {finding.message}")
            first.setdefault((finding.check, finding.severity), said)
    refuse_errors(first.values())
    return tuple(first.values())


def check_model(model: nn.Module, *, trains: bool = True) -> None:
    """Refuse a model that cannot be trained as it was meant, before it is described and sharded.

    Raises:
        PreflightError: its tied weights are separate parameters, or it is to be trained and all parameters are frozen.
    """
    found = (checks.split_ties(model), checks.nothing_to_train(model) if trains else None)
    refuse_errors(finding for finding in found if finding is not None)


def device_memory(device_type: str, model: nn.Module | None = None) -> DeviceMemory | None:
    """Return the memory of this rank's device now; None where a plan is made for a device that is not here. Collective.

    The model's parameters on the CPU belong to this process, and as many to each other rank of the node.
    """
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return None
        device = own_gpu()
        free, total = torch.cuda.mem_get_info(device)
        name = f"{torch.cuda.get_device_name(device)} {device.index}"
        return DeviceMemory(name=name, total_bytes=total, free_bytes=free, own_bytes=torch.cuda.memory_reserved(device))
    memory, ranks = tightest(memory_limits()), find_topology().ranks_per_node
    held = sum(p.numel() * p.element_size() for p in (model.parameters() if model else ()) if p.device.type == "cpu")
    return DeviceMemory(name="cpu", total_bytes=memory.total_bytes, free_bytes=memory.free_bytes, own_bytes=ranks * held, sharing=ranks)


def bf16_on(device: DeviceSpec | None, device_type: str) -> str | None:
    """Return the device's name where it computes bfloat16 as fast as float16, or has no float16; torch is asked if no rates are known."""
    if device is not None:
        bf16, fp16 = (device.flops_per_s.get(dtype) for dtype in (DType.BFLOAT16, DType.FLOAT16))
        is_native = bf16 is not None and (fp16 is None or bf16 >= _AS_FAST * fp16)
        return device.name if is_native else None
    if device_type == "cuda" and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.cuda.get_device_name(own_gpu())
    return None
