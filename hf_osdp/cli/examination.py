"""The checks of `hf-osdp doctor`; an error may prevent later checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from ..distributed.device import prefer_expandable_segments
from ..errors import OSDPError
from ..measurement.memory_limits import memory_limits, tightest
from ..planner.description import ModelDescription
from ..planner.hardware import Backend, Hardware
from ..planner.search.search import SearchResult
from ..planner.training_job import OptimizerSpec
from ..preparation.job import Job, RunFolder
from ..preparation.preflight import (
    Check,
    DeviceMemory,
    checkpoint_bytes,
    device_memory,
    findings_of,
    memory_now,
    split_ties,
)
from ..preparation.recalibrate import estimated
from ..quantities import format_bytes, format_count, format_seconds
from ..versions import package_versions
from .cases import Case
from .options import Request
from .output import error_line

T = TypeVar("T")
Row = tuple[str, str, str]
"""Check, result and text."""
_LATER = {
    Check.PROCESSES: "free memory and other processes on the devices: checked when a run starts there",
    Check.FOLDER: "give --output-dir to check it",
}
"""Text for checks that cannot be made yet."""


def examine(request: Request, folder: RunFolder | None) -> list[Row]:
    """Make all checks that do not need a started run; the folder is checked if it is given.

    Return a row for each finding, a row for each check without one, and one row for all checks that could not be made.
    """
    examination = _Examination(Case(request))
    examination.examine(folder)
    rows, missing = [], []
    for check in Check:
        if found := examination.rows.get(check):
            rows += found
        elif check in _LATER:
            rows.append((check.value, "later", _LATER[check]))
        else:
            missing.append(check.value)
    return (
        rows
        if not missing
        else [*rows, ("the rest", "not done", f"{', '.join(missing)}: an earlier error prevents these checks")]
    )


class _Examination:
    """The rows of each check; errors are added as soon as they are found."""

    def __init__(self, case: Case) -> None:
        self.rows: dict[Check, list[Row]] = {}
        self._case = case
        self._hardware = self._try(
            Check.DEVICES, lambda: case.hardware, lambda h: f"{h.summary}, {format_bytes(h.device.memory_bytes)} each"
        )
        self._try(Check.MODEL, lambda: case.model_config)
        spec = self._hardware and self._try(
            Check.OPTIMIZER,
            lambda: case.optimizer,
            lambda spec: (
                f"{spec.name} needs whole parameters: the units that it trains are replicated"
                if spec.needs_whole
                else f"{spec.name} is element-wise, with {spec.states + len(spec.formats)} states per parameter"
            ),
        )
        case.optimizer = spec or OptimizerSpec()

    def _try(self, check: Check, compute: Callable[[], T], describe: Callable[[T], str] | None = None) -> T | None:
        """Return the result of `compute` and add a row that describes it; if it raises, add the error as a row and
        return None.
        """
        try:
            found = compute()
        except (OSDPError, ValueError, OSError) as problem:
            self.rows.setdefault(check, []).append((check.value, "error", error_line(problem, ()) or ""))
            return None
        if describe is not None:
            self.rows.setdefault(check, [(check.value, "ok", describe(found))])
        return found

    def examine(self, folder: RunFolder | None) -> None:
        """Check the model on the devices, its plan, and this machine."""
        case, hardware = self._case, self._hardware
        if hardware is None:
            return
        description = None
        if Check.MODEL not in self.rows:
            description = self._try(
                Check.MODEL,
                lambda: case.timed(case.describer().describe()),
                lambda found: f"{found.model_class}, {format_count(found.numel)} parameters",
            )
        job = self._try(
            Check.BATCH,
            lambda: case.training,
            lambda job: f"{job.global_batch_size} samples per step over {hardware.world_size} devices",
        )
        limit = self._try(Check.LIMIT, lambda: case.limit_bytes, lambda limit: _limit_text(limit, hardware))
        if description is None:
            return
        found: SearchResult | None = None
        if job is not None and limit is not None:
            found = self._try(
                Check.PLAN,
                lambda: estimated(case.found.problem, case.found.plan),
                lambda found: (
                    f"{found.plan.fingerprint} ({found.plan.strategy}): peak {format_bytes(found.peak_bytes)}, a step"
                    " in"
                    f" {format_seconds(found.time.step_s)}"
                ),
            )
        prefer_expandable_segments()  # as a run does
        run, memory, classes = replace(case.job, folder=folder), _memory_here(hardware), description.block_classes
        findings = [*findings_of(run, description.units, classes, hardware), split_ties(case.model)]
        if found is not None:
            findings.append(memory_now(memory, found.memory.peak_bytes, found.plan.communicators))
        for finding in filter(None, findings):
            self.rows.setdefault(finding.check, []).append(
                (finding.check.value, finding.severity.value, finding.message)
            )
        for check, text in _passed(description, run, memory if found else None).items():
            self.rows.setdefault(check, [(check.value, "ok", text)])


def _limit_text(limit_bytes: int, hardware: Hardware) -> str:
    free = limit_bytes - hardware.room_bytes(limit_bytes)
    margin = f", and {format_bytes(free)} are kept free as a margin" if free else ""
    return f"{format_bytes(limit_bytes)}, of which the device reserves {format_bytes(hardware.device.reserved_bytes)}{margin}"  # noqa: E501


def _passed(description: ModelDescription, job: Job, memory: DeviceMemory | None) -> dict[Check, str]:
    """Return the texts of checks without a finding; `memory` is None if no plan was compared with it."""
    units, precision = description.units, job.precision.compute
    tied = "; ".join(" = ".join(names) for unit in units for names in unit.shared)
    texts = {
        Check.BLOCKS: f"{len(units)} units; block classes: {', '.join(description.block_classes)}",
        Check.TIES: tied or "none",
        Check.MASTERS: f"parameters are {', '.join(sorted({p.dtype.value for unit in units for p in unit.parameters}))}",  # noqa: E501
        Check.FP16: f"computes in {precision.value}" if precision else "no mixed precision",
        Check.FROZEN: "none",
        Check.ALLOCATOR: "a run on CUDA uses expandable segments, or the margin leaves room for fragmentation",
    }
    if memory is not None:
        texts[Check.PROCESSES] = f"{format_bytes(memory.free_bytes)} of {memory.name} free here"
    if job.folder is not None:
        size = format_bytes(checkpoint_bytes(units, job.optimizer, adapters=job.folder.adapters))
        texts[Check.FOLDER] = f"{job.folder.path} is writable and has enough space; a checkpoint takes {size}"
    return texts


def machine_line() -> str:
    """Return versions, devices, and the backends of collectives on this machine."""
    python, _, *versions = (f"{name} {number}" for name, number in package_versions().items())
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = f"{len(cuda)} x {', '.join(dict.fromkeys(cuda))}" if cuda else "no CUDA device"
    backends = [
        name for name, exists in {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}.items() if exists
    ]
    memory = tightest(memory_limits())
    return (
        f"{python.capitalize()}, {', '.join(versions)}; {devices}; {' and '.join(backends)}; {os.cpu_count()} cores, "
        f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} free"
    )


def _memory_here(hardware: Hardware) -> DeviceMemory | None:
    """Return this machine's device of the planned kind with the least free memory, if any; the CPU only if one node
    is planned.
    """
    if hardware.backend is Backend.NCCL:
        if not torch.cuda.is_available():
            return None
        free, total, index = min(
            (*torch.cuda.mem_get_info(index), index) for index in range(torch.cuda.device_count())
        )
        return DeviceMemory(
            name=f"{torch.cuda.get_device_name(index)} {index}", total_bytes=total, free_bytes=free, own_bytes=0
        )
    here = None if hardware.nodes > 1 else device_memory("cpu")
    return here and replace(here, sharing=hardware.devices_per_node)
