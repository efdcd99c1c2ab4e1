"""The checks of `hf-osdp doctor`, each as far as those before it allow."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from ..distributed.device import has_fixed_segments, prefer_expandable_segments
from ..errors import OSDPError
from ..measurement.memory_limits import memory_limits, tightest
from ..planner.description import ModelDescription
from ..planner.hardware import Backend, Hardware
from ..planner.job import OptimizerSpec
from ..planner.problem import PlanningProblem, Strategy
from ..planner.search.compare import StrategyResult
from ..planner.search.search import SearchResult, search
from ..planning.facts import RunFolder
from ..planning.preflight import Check, DeviceMemory, KnownRun, bf16_on, checkpoint_bytes, device_memory, findings_of, split_ties
from ..planning.recalibrate import estimated
from ..quantities import format_bytes, format_count, format_seconds
from ..report.content import package_versions
from ..sharding.optimizer import spec_of_trainer_name
from .cases import OPTIMIZERS, Case
from .options import Request

T = TypeVar("T")
Row = tuple[str, str, str]
"""Check, result and text."""
_LATER = {
    Check.PROCESSES: "what is free, and other processes on the devices: looked at when a run starts on them",
    Check.FOLDER: "give --output-dir to have it looked at",
}
"""Text for checks that need more than there is."""


def examine(request: Request, optimizer: str, folder: RunFolder | None) -> list[Row]:
    """Make all checks that need no start; without a folder its check is left out.

    Return a row for each finding, each check without one, and one for all that could not be made.
    """
    examination = _Examination(Case(request), optimizer)
    examination.examine(folder)
    rows, left = [], []
    for check in Check:
        if found := examination.rows.get(check):
            rows += found
        elif check in _LATER:
            rows.append((check.value, "later", _LATER[check]))
        else:
            left.append(check.value)
    return rows if not left else [*rows, ("the rest", "not done", f"{', '.join(left)}: an error stands before them")]


class _Examination:
    """The rows of each check that was made, errors as soon as they are found."""

    def __init__(self, case: Case, optimizer: str) -> None:
        self.rows: dict[Check, list[Row]] = {}
        self._case = case
        self._hardware = self._tried(
            Check.DEVICES, lambda: case.hardware, lambda h: f"{h.summary}, {format_bytes(h.device.memory_bytes)} each"
        )
        self._tried(Check.MODEL, lambda: case.model_config)
        device_type = "cuda" if self._hardware is None else case.device_type
        spec = self._tried(
            Check.OPTIMIZER,
            lambda: OPTIMIZERS.get(optimizer) or spec_of_trainer_name(optimizer.lower(), device_type=device_type),
            lambda spec: (
                f"{spec.name} looks at whole parameters: what it trains is replicated"
                if spec.needs_whole
                else f"{spec.name} goes element by element, with {spec.states + len(spec.formats)} states a parameter"
            ),
        )
        case.optimizer = spec or OptimizerSpec()

    def _tried(self, check: Check, look: Callable[[], T], sound: Callable[[T], str] | None = None) -> T | None:
        """Return what `look` returns, with what to say of it; None where it refuses, which is then a finding."""
        try:
            found = look()
        except (OSDPError, ValueError, OSError) as problem:
            self.rows.setdefault(check, []).append((check.value, "error", " ".join(str(problem).split())))
            return None
        if sound is not None:
            self.rows.setdefault(check, [(check.value, "ok", sound(found))])
        return found

    def examine(self, folder: RunFolder | None) -> None:
        """Check the model on the devices, its plan, and this machine."""
        case, hardware = self._case, self._hardware
        if hardware is None:
            return
        description = None
        if Check.MODEL not in self.rows:
            description = self._tried(
                Check.MODEL,
                lambda: case.timed(case.describer().describe()),
                lambda found: f"{found.model_class}, {format_count(found.numel)} parameters",
            )
        job = self._tried(
            Check.BATCH, lambda: case.job, lambda job: f"{job.global_batch_size} samples a step over {hardware.world_size} devices"
        )
        limit = self._tried(Check.LIMIT, lambda: case.limit_bytes, lambda limit: _limit_text(limit, hardware))
        if description is None:
            return
        found: SearchResult | None = None
        if job is not None and limit is not None:
            found = self._tried(
                Check.PLAN,
                lambda: estimated(case.found.problem, case.found.plan),
                lambda found: (
                    f"{found.plan.fingerprint} ({found.plan.strategy}): peak {format_bytes(found.peak_bytes)}, a step in"
                    f" {format_seconds(found.time.step_s)}"
                ),
            )
        prefer_expandable_segments()  # as a run does
        known = KnownRun(
            facts=replace(case.facts, folder=folder), units=description.units, asked_classes=case.config.block_classes,
            found_classes=description.block_classes, hardware=hardware, bf16_on=bf16_on(hardware.device, "cuda"),
            memory=_memory_here(hardware),
            has_fixed_segments=case.device_type == "cuda" and torch.version.cuda is not None and has_fixed_segments(),
        )  # fmt: skip
        if found is not None:
            known = replace(known, plan=found.plan, needed_bytes=found.memory.peak_bytes)
            if case.request.strategy is not Strategy.OSDP:
                known = replace(known, time=found.time, others=_best(replace(case.found.problem, strategy=Strategy.OSDP)))
        for finding in (*findings_of(known), split_ties(case.model)):
            if finding is not None:
                self.rows.setdefault(finding.check, []).append((finding.check.value, finding.severity.value, finding.message))
        for check, text in _sound(description, known).items():
            self.rows.setdefault(check, [(check.value, "ok", text)])


def _best(problem: PlanningProblem) -> tuple[StrategyResult, ...]:
    with suppress(OSDPError):  # nothing fits
        return (StrategyResult(strategy=problem.strategy, result=search(problem)),)
    return ()


def _limit_text(limit_bytes: int, hardware: Hardware) -> str:
    free = limit_bytes - hardware.room_bytes(limit_bytes)
    margin = f", and {format_bytes(free)} stay free as a margin" if free else ""
    return f"{format_bytes(limit_bytes)}, of which the device keeps {format_bytes(hardware.device.reserved_bytes)}{margin}"


def _sound(description: ModelDescription, known: KnownRun) -> dict[Check, str]:
    """Return what is to be said of checks that find nothing."""
    units, hardware, precision, memory = known.units, known.hardware, known.facts.precision.compute, known.memory
    tied = "; ".join(" = ".join(names) for unit in units for names in unit.shared)
    texts = {
        Check.BLOCKS: f"{len(units)} units; blocks are {', '.join(description.block_classes)}",
        Check.TIES: tied or "none",
        Check.MASTERS: f"parameters are {', '.join(sorted({p.dtype.value for unit in units for p in unit.parameters}))}",
        Check.FP16: f"computes in {precision.value}" if precision else "no mixed precision",
        Check.FROZEN: "none",
        Check.ALLOCATOR: "a run on CUDA has its segments expand, or the margin has room for gaps",
    }
    if known.plan is not None and hardware is not None:
        texts[Check.LINKS] = f"{format_bytes(hardware.inter_node.bytes_per_s)}/s between nodes" if hardware.nodes > 1 else "one node"
    if known.needed_bytes is not None and memory is not None:
        texts[Check.PROCESSES] = f"{format_bytes(memory.free_bytes)} of {memory.name} free here"
    if (folder := known.facts.folder) is not None:
        size = format_bytes(checkpoint_bytes(units, known.facts.optimizer, adapters=folder.adapters))
        texts[Check.FOLDER] = f"{folder.path} can be written and has room; a checkpoint takes {size}"
    return texts


def machine_line() -> str:
    """Return versions, devices, and what carries collectives here."""
    python, _, _, *versions = (f"{name} {number}" for name, number in package_versions().items())
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = f"{len(cuda)} x {', '.join(dict.fromkeys(cuda))}" if cuda else "no CUDA device"
    carriers = [name for name, there in {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}.items() if there]
    memory = tightest(memory_limits())
    return (
        f"{python.capitalize()}, {', '.join(versions)}; {devices}; {' and '.join(carriers)}; {os.cpu_count()} cores, "
        f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} free"
    )


def _memory_here(hardware: Hardware) -> DeviceMemory | None:
    """Return the fullest device of this machine of the planned kind, if any; the CPU counts where one node is planned for."""
    if hardware.backend is Backend.NCCL:
        if not torch.cuda.is_available():
            return None
        free, total, index = min((*torch.cuda.mem_get_info(index), index) for index in range(torch.cuda.device_count()))
        return DeviceMemory(name=f"{torch.cuda.get_device_name(index)} {index}", total_bytes=total, free_bytes=free, own_bytes=0)
    here = None if hardware.nodes > 1 else device_memory("cpu")
    return here and replace(here, sharing=hardware.devices_per_node)
