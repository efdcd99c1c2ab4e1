"""Preflight checks of the model, the devices and the output folder, one function each, and the merged findings of
all ranks.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from torch import nn

from ..distributed.device import has_fixed_segments, own_gpu
from ..distributed.mesh import find_topology
from ..distributed.process_group import all_gather_objects
from ..errors import PreflightError
from ..measurement.memory_limits import memory_limits, tightest
from ..modeling.batch import without_adapters
from ..planner.description import DType, UnitDescription
from ..planner.hardware import DeviceSpec, Hardware
from ..planner.presets import COMMUNICATOR_BYTES, CONTEXT_BYTES
from ..planner.training_job import OptimizerSpec, Precision
from ..quantities import format_bytes, format_count
from .job import Job, RunFolder

_NUMBERED = re.compile(r"\.(\d+)(?=\.)")
_FIXED_SEGMENTS_MARGIN = 0.2
"""Largest share of a limit that is lost in gaps between tensors with segments that do not expand
(docs/estimates.md).
"""
_SLACK_BYTES = 2**30
"""Bytes that driver, context and communicators may take in addition to the known amounts."""


class Check(str, Enum):
    """A preflight check; its value is shown to the user."""

    MODEL = "model"
    BLOCKS = "blocks"
    TIES = "tied weights"
    MASTERS = "float32 masters"
    FP16 = "fp16 or bf16"
    FROZEN = "frozen parameters"
    OPTIMIZER = "optimizer"
    BATCH = "batch"
    DEVICES = "devices"
    LIMIT = "memory limit"
    PLAN = "plan"
    ALLOCATOR = "allocator"
    PROCESSES = "device memory"
    FOLDER = "output folder"


class Severity(str, Enum):
    """A note informs, a warning calls for action, an error stops the run."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of one check; its message holds value, limit and remedy in one line."""

    check: Check
    severity: Severity
    message: str

    @property
    def line(self) -> str:
        """Severity and message: `warning: ...`."""
        return f"{self.severity.value}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a device now, as this process sees it.

    For the CPU it is the node's memory, which all ranks of the node share.
    """

    name: str
    total_bytes: int
    free_bytes: int
    own_bytes: int
    """Bytes that this process's tensors already hold, or its allocator reserves."""
    sharing: int = 1
    """Number of ranks that share the memory."""


def refuse_errors(findings: Iterable[Finding | None]) -> None:
    """Raise a PreflightError with all errors in one line, if there are any."""
    if errors := [
        finding.message for finding in findings if finding is not None and finding.severity is Severity.ERROR
    ]:
        raise PreflightError(" ".join(errors))


def whole_in_one_unit(units: Sequence[UnitDescription]) -> Finding | None:
    """Find a unit that holds more than half of the model and contains repeated blocks: sharding then saves little."""
    total, largest = sum(unit.numel for unit in units), max(units, key=lambda unit: unit.numel)
    elements: dict[str, set[str]] = {}
    for parameter in largest.parameters:
        for match in _NUMBERED.finditer(parameter.name):
            elements.setdefault(parameter.name[: match.start()], set()).add(match.group(1))
    name, repeated = max(elements.items(), key=lambda item: len(item[1]), default=("", set()))
    if 2 * largest.numel <= total or len(repeated) < 2:
        return None
    message = (
        f"Unit {largest.label} ({largest.class_name}) holds {format_count(largest.numel)} of {format_count(total)}"
        " parameters, all"
        f" {len(repeated)} of {name} among them, and gathers them at once; set block_classes to the class of those."
    )
    return Finding(Check.BLOCKS, Severity.WARNING, message)


def unused_block_classes(requested: Sequence[str] | None, found: Sequence[str]) -> Finding | None:
    """Find requested classes that make no unit. If no class makes one, the description has already failed."""
    if not (unused := [name for name in requested or () if name not in found]):
        return None
    message = (
        f"block_classes has {', '.join(unused)}, but the model has no such module outside of other blocks; units are"
        f" {', '.join(found)}. Leave it out if it was meant for another model."
    )
    return Finding(Check.BLOCKS, Severity.NOTE, message)


def split_ties(model: nn.Module) -> Finding | None:
    """Find weights that the configuration ties but the model holds twice: they would train separately, and loading
    keeps only one.
    """
    base = without_adapters(model)
    try:
        ties = base.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]
    except (AttributeError, ValueError):  # not a transformers model, or adapters have changed the names
        return None
    parameters = dict(base.named_parameters(remove_duplicate=False))
    for copy, source in ties.items():
        if copy in parameters and source in parameters and parameters[copy] is not parameters[source]:
            message = (
                f"The configuration ties {copy} to {source}, but the model has two parameters: they would train"
                " separately, and a saved"
                " model is loaded with one of them. Call model.tie_weights(), or set config.tie_word_embeddings=False."
            )
            return Finding(Check.TIES, Severity.ERROR, message)
    return None


def no_masters(units: Sequence[UnitDescription], precision: Precision) -> Finding | None:
    """Find trainable parameters in half precision without float32 masters: rounding then discards the optimizer's
    small updates.
    """
    names = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
    half = [p for unit in units for p in unit.parameters if p.requires_grad and p.dtype in names]
    if precision.compute is not None or not half:
        return None
    message = (
        f"{format_count(sum(p.numel for p in half))} trainable parameters are in {half[0].dtype.value}, and with"
        " mixed_precision=no the"
        f" optimizer loses small updates by rounding; use mixed_precision={names[half[0].dtype]}, or load the model in"
        " float32."
    )
    return Finding(Check.MASTERS, Severity.WARNING, message)


def nothing_to_train(model: nn.Module) -> Finding | None:
    parameters = list(model.parameters())
    if any(p.requires_grad for p in parameters):
        return None
    message = f"All {len(parameters)} parameters are frozen: there is nothing to train; set requires_grad=True on some of them."  # noqa: E501
    return Finding(Check.FROZEN, Severity.ERROR, message)


def frozen(units: Sequence[UnitDescription], *, in_optimizer: int = 0) -> Finding | None:
    """Find frozen parameters, of which the optimizer received `in_optimizer`."""
    parameters = [p for unit in units for p in unit.parameters]
    without_grad = [p for p in parameters if not p.requires_grad]
    if not without_grad or len(without_grad) == len(parameters):
        return None
    count, total = (format_count(sum(p.numel for p in some)) for some in (without_grad, parameters))
    message = f"{count} of {total} parameters are frozen, without gradients and optimizer states; to unfreeze any, plan again."  # noqa: E501
    if in_optimizer:
        message += f" The optimizer received {in_optimizer} of them, which it does not update."
    return Finding(Check.FROZEN, Severity.NOTE, message)


def fp16_for_bf16(precision: Precision, native_on: str | None) -> Finding | None:
    """Find float16, which needs loss scaling, although bfloat16 is as fast; `native_on` is the name of a device
    with native bfloat16.
    """
    if native_on is None or precision.compute is not DType.FLOAT16:
        return None
    message = (
        f"mixed_precision=fp16 scales the loss and skips steps that overflow, and {native_on} computes bf16 as fast;"
        " use"
        " mixed_precision=bf16, which needs neither."
    )
    return Finding(Check.FP16, Severity.WARNING, message)


def fixed_segments(hardware: Hardware) -> Finding | None:
    """Find a margin that is smaller than the gaps that segments without expansion may have."""
    if hardware.free_share >= _FIXED_SEGMENTS_MARGIN:
        return None
    size = hardware.device.memory_bytes
    free = format_bytes(size - hardware.room_bytes(size))
    message = (
        "Torch's CUDA allocator has segments that do not expand, so gaps between tensors may take more than the margin"
        f" ({free} of the whole device); set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts,"
        " or"
        f" memory_margin={_FIXED_SEGMENTS_MARGIN}."
    )
    return Finding(Check.ALLOCATOR, Severity.WARNING, message)


def memory_now(memory: DeviceMemory | None, needed_bytes: int, communicators: int) -> Finding | None:
    """Find that the plan's tensors do not fit the available memory, or that other processes use the device."""
    if memory is None:
        return None
    available, needed = memory.free_bytes + memory.own_bytes, memory.sharing * needed_bytes
    if needed > available:
        whose = f"The plan's {memory.sharing} ranks here need" if memory.sharing > 1 else "The plan needs"
        message = (
            f"{whose} {format_bytes(needed)} on {memory.name}, but {format_bytes(available)} of"
            f" {format_bytes(memory.total_bytes)} are"
            " available now; end the processes that hold the rest, or plan again with a lower memory limit."
        )
        return Finding(Check.PROCESSES, Severity.WARNING if memory.name == "cpu" else Severity.ERROR, message)
    ours = CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES
    outside = memory.total_bytes - memory.free_bytes - memory.own_bytes
    if memory.name == "cpu" or outside <= ours + _SLACK_BYTES:
        return None
    message = (
        f"{format_bytes(outside)} of {memory.name} are held outside of this process's tensors, but CUDA and NCCL take"
        " only about"
        f" {format_bytes(ours)}: other processes use it (nvidia-smi lists them) and may take more. End them, or choose"
        " another device"
        " with CUDA_VISIBLE_DEVICES."
    )
    return Finding(Check.PROCESSES, Severity.WARNING, message)


def checkpoint_bytes(
    units: Sequence[UnitDescription], optimizer: OptimizerSpec | None, *, adapters: bool = False
) -> int:
    """Return the bytes of one checkpoint, which do not depend on the plan: all parameters, and the states of the
    trained ones.

    `optimizer=None` counts weights only, `adapters` trained parameters only. Quantized states are saved in float32.
    Schedulers, random states and the Trainer's state take only kilobytes and are not counted.
    """
    parameters = [parameter for unit in units for parameter in unit.parameters]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    weights = sum(p.numel * p.dtype.itemsize for p in (trained if adapters else parameters))
    return weights + (0 if optimizer is None else sum(optimizer.saved_bytes(p) for p in trained))


def not_writable(folder: RunFolder) -> Finding | None:
    """Find that no file can be made in the folder, or in its nearest existing parent. Leave no file behind."""
    nearest = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=nearest) as handle:
            handle.write(b"\0")
        return None
    except OSError as problem:
        reason = f"cannot be written ({problem.strerror})" if nearest.is_dir() else "is a file"
    shown = folder.path if nearest == Path(folder.path).absolute() else f"{folder.path}: {nearest}"
    return Finding(Check.FOLDER, Severity.ERROR, f"Output folder {shown} {reason}; give a folder that can be written.")


def too_small(folder: RunFolder, units: Sequence[UnitDescription], optimizer: OptimizerSpec) -> Finding | None:
    """Find that checkpoints do not fit on the disk, which needs room for one more than are kept.

    Quotas are not checked.
    """
    size = checkpoint_bytes(units, optimizer if folder.saves and folder.states else None, adapters=folder.adapters)
    free = shutil.disk_usage(_nearest(folder)).free
    kept = 1 if folder.limit is None else folder.limit
    existing = sum(1 for _ in Path(folder.path).glob("checkpoint[-_]*"))
    wanted = max(1, kept + 1 - existing) if folder.saves else 1
    if wanted * size <= free:
        return None
    has = f"the disk of {folder.path} has {format_bytes(free)} free"
    if not folder.saves:
        message = f"The model takes {format_bytes(size)}, but {has}; free some space before it is saved."
    elif free < size:
        message = f"A checkpoint takes {format_bytes(size)}, but {has}; free some space, or give another folder."
    else:
        message = (
            f"A checkpoint takes {format_bytes(size)}, and {has}: room for {free // size} of the {wanted} that will be"
            " stored at once; free"
            " some space, give another folder, or keep fewer with save_total_limit."
        )
    return Finding(Check.FOLDER, Severity.ERROR if folder.saves and free < size else Severity.WARNING, message)


def _nearest(folder: RunFolder) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = Path(folder.path).absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def findings_of(
    job: Job, units: Sequence[UnitDescription], classes: Sequence[str] | None, hardware: Hardware | None
) -> list[Finding | None]:
    """Return this process's findings about a model on its devices, apart from its plan.

    `classes` are the classes of its blocks; None does not check the requested ones.
    """
    fixed = job.device_type == "cuda" and torch.version.cuda is not None and has_fixed_segments()
    return [
        whole_in_one_unit(units),
        None if classes is None else unused_block_classes(job.config.block_classes, classes),
        no_masters(units, job.precision),
        fp16_for_bf16(job.precision, bf16_on(None if hardware is None else hardware.device, job.device_type)),
        frozen(units, in_optimizer=job.frozen_in_optimizer),
        fixed_segments(hardware) if fixed and hardware is not None else None,
        None if job.folder is None else not_writable(job.folder) or too_small(job.folder, units, job.optimizer),
    ]


def merged_findings(findings: Iterable[Finding | None]) -> tuple[Finding, ...]:
    """Return each finding of all ranks once, from the lowest rank that has it; every rank raises if one is an error.

    Collective.
    """
    first: dict[tuple[Check, Severity], Finding] = {}
    for rank, found in enumerate(all_gather_objects(tuple(filter(None, findings)))):
        for finding in found:
            named = finding if rank == 0 else replace(finding, message=f"On rank {rank}: {finding.message}")
            first.setdefault((finding.check, finding.severity), named)
    refuse_errors(first.values())
    return tuple(first.values())


def check_model(model: nn.Module, *, trains: bool = True) -> None:
    """Refuse a model whose tied weights are separate parameters, or a model to train without trainable parameters."""
    refuse_errors((split_ties(model), nothing_to_train(model) if trains else None))


def device_memory(device_type: str, model: nn.Module | None = None) -> DeviceMemory | None:
    """Return the memory of this rank's device now; None if the plan is for a device that this machine does not have.
    Collective.

    On the CPU, each rank of the node is assumed to hold as many bytes of parameters as this process.
    """
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return None
        device = own_gpu()
        free, total = torch.cuda.mem_get_info(device)
        name = f"{torch.cuda.get_device_name(device)} {device.index}"
        return DeviceMemory(
            name=name, total_bytes=total, free_bytes=free, own_bytes=torch.cuda.memory_reserved(device)
        )
    memory, ranks = tightest(memory_limits()), find_topology().ranks_per_node
    held = sum(p.nbytes for p in (model.parameters() if model else ()) if p.device.type == "cpu")
    return DeviceMemory(
        name="cpu", total_bytes=memory.total_bytes, free_bytes=memory.free_bytes, own_bytes=ranks * held, sharing=ranks
    )


def bf16_on(device: DeviceSpec | None, device_type: str) -> str | None:
    """Return the device's name if it computes bfloat16 as fast as float16, or has no float16; without rates, ask
    torch.
    """
    if device is not None:
        return device.name if device.native_bf16 else None
    if device_type == "cuda" and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.cuda.get_device_name(own_gpu())
    return None
