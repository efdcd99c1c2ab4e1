"""Preflight checks of the model, the devices and the output folder: one list of findings of all ranks."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ..distributed.device import has_fixed_segments, own_gpu
from ..distributed.mesh import find_topology
from ..distributed.process_group import all_gather_objects
from ..errors import PreflightError
from ..measurement.memory_limits import MemoryLimit, memory_limits, tightest
from ..modeling.batch import without_adapters
from ..planner.description import DType, UnitDescription
from ..planner.hardware import Hardware
from ..planner.training_job import OptimizerSpec, Precision
from ..quantities import format_bytes, format_count
from .job import Job, RunFolder

_NUMBERED = re.compile(r"\.(\d+)(?=\.)")
_FIXED_SEGMENTS_MARGIN = 0.2
"""Largest share of a limit that is lost in gaps between tensors with segments that do not expand
(docs/estimates.md).
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; its message holds value, limit and remedy in one line."""

    about: str
    message: str
    stops: bool = False
    """It is an error, which stops the run; else a warning, which calls for action."""


def find_problems(
    model: nn.Module,
    job: Job,
    units: Sequence[UnitDescription],
    classes: Sequence[str],
    hardware: Hardware | None,
    needed_bytes: int,
) -> tuple[Finding, ...]:
    """Return the findings of all ranks about a model, its plan and its devices, each once, from the lowest rank that
    has it; every rank raises PreflightError if one is an error. Collective.

    `classes` are the classes of the model's blocks, `needed_bytes` those of the plan's tensors.
    """
    fixed = job.device_type == "cuda" and torch.version.cuda is not None and has_fixed_segments()
    return merged_findings(
        [
            split_ties(model),
            whole_in_one_unit(units),
            unused_block_classes(job.config.block_classes, classes),
            no_masters(units, job.precision),
            fixed_segments(hardware) if fixed and hardware is not None else None,
            None if job.folder is None else not_writable(job.folder) or too_small(job.folder, units, job.optimizer),
            memory_now(device_memory(job.device_type, model), needed_bytes),
        ]
    )


def merged_findings(findings: Iterable[Finding | None]) -> tuple[Finding, ...]:
    """Return each finding of all ranks once, from the lowest rank that has it; every rank raises if one is an error.

    Collective.
    """
    first: dict[tuple[str, bool], Finding] = {}
    for rank, found in enumerate(all_gather_objects(tuple(filter(None, findings)))):
        for finding in found:
            named = finding if rank == 0 else replace(finding, message=f"On rank {rank}: {finding.message}")
            first.setdefault((finding.about, finding.stops), named)
    if errors := [finding.message for finding in first.values() if finding.stops]:
        raise PreflightError(" ".join(errors))
    return tuple(first.values())


def whole_in_one_unit(units: Sequence[UnitDescription]) -> Finding | None:
    """Find a unit that holds more than half of the model and contains repeated blocks: sharding then saves little."""
    total, largest = sum(unit.numel for unit in units), max(units, key=lambda unit: unit.numel)
    elements: dict[str, set[str]] = {}
    for parameter in largest.parameters:
        for match in _NUMBERED.finditer(parameter.name):
            elements.setdefault(parameter.name[: match.start()], set()).add(match.group(1))
    name, repeated = max(elements.items(), key=lambda item: len(item[1]), default=("", set()))
    own = len(largest.module_names)  # one block, or those that a plan has joined
    if 2 * largest.numel <= total or len(repeated) <= own:
        return None
    return Finding(
        "blocks",
        f"Unit {largest.label} ({largest.class_name}) holds {format_count(largest.numel)} of {format_count(total)}"
        " parameters, all"
        f" {len(repeated)} of {name} among them, and gathers them at once; set block_classes to the class of those.",
    )


def unused_block_classes(requested: Sequence[str] | None, found: Sequence[str]) -> Finding | None:
    """Find requested classes that make no unit. If no class makes one, the description has already failed."""
    if not (unused := [name for name in requested or () if name not in found]):
        return None
    return Finding(
        "block_classes",
        f"block_classes has {', '.join(unused)}, but the model has no such module outside of other blocks; units are"
        f" {', '.join(found)}. Leave it out if it was meant for another model.",
    )


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
            return Finding(
                "tied weights",
                f"The configuration ties {copy} to {source}, but the model has two parameters: they would train"
                " separately, and a saved model is loaded with one of them. Call model.tie_weights(), or set"
                " config.tie_word_embeddings=False.",
                stops=True,
            )
    return None


def no_masters(units: Sequence[UnitDescription], precision: Precision) -> Finding | None:
    """Find trainable parameters in half precision without float32 masters: rounding then discards the optimizer's
    small updates.
    """
    names = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
    half = [p for unit in units for p in unit.parameters if p.requires_grad and p.dtype in names]
    if precision.compute is not None or not half:
        return None
    return Finding(
        "float32 masters",
        f"{format_count(sum(p.numel for p in half))} trainable parameters are in {half[0].dtype.value}, and with"
        " mixed_precision=no the"
        f" optimizer loses small updates by rounding; use mixed_precision={names[half[0].dtype]}, or load the model in"
        " float32.",
    )


def fixed_segments(hardware: Hardware) -> Finding | None:
    """Find a margin that is smaller than the gaps that segments without expansion may have."""
    if hardware.free_share >= _FIXED_SEGMENTS_MARGIN:
        return None
    size = hardware.device.memory_bytes
    free = format_bytes(size - hardware.room_bytes(size))
    return Finding(
        "allocator",
        "Torch's CUDA allocator has segments that do not expand, so gaps between tensors may take more than the margin"
        f" ({free} of the whole device); set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts,"
        " or"
        f" memory_margin={_FIXED_SEGMENTS_MARGIN}.",
    )


def memory_now(memory: MemoryLimit | None, needed_bytes: int) -> Finding | None:
    """Find that the plan's tensors do not fit the available memory; that of the CPU is shared by the node's ranks."""
    sharing = find_topology().ranks_per_node if memory is not None and memory.name == "cpu" else 1
    if memory is None or sharing * needed_bytes <= memory.free_bytes:
        return None
    whose = f"The plan's {sharing} ranks here need" if sharing > 1 else "The plan needs"
    return Finding(
        "device memory",
        f"{whose} {format_bytes(sharing * needed_bytes)} on {memory.name}, but"
        f" {format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} are"
        " available now; end the processes that hold the rest, or plan again with a lower memory limit.",
        stops=memory.name != "cpu",
    )


def device_memory(device_type: str, model: nn.Module | None = None) -> MemoryLimit | None:
    """Return the memory of this rank's device now, as free what this process holds too; None if the plan is for a
    device that this machine does not have. Collective.

    On the CPU, each rank of the node is assumed to hold as many bytes of parameters as this process.
    """
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return None
        device = own_gpu()
        free, total = torch.cuda.mem_get_info(device)
        return MemoryLimit(
            name=f"{torch.cuda.get_device_name(device)} {device.index}", total_bytes=total,
            free_bytes=free + torch.cuda.memory_reserved(device),
        )  # fmt: skip
    memory, ranks = tightest(memory_limits()), find_topology().ranks_per_node
    held = sum(p.nbytes for p in (model.parameters() if model else ()) if p.device.type == "cpu")
    return replace(memory, name="cpu", free_bytes=memory.free_bytes + ranks * held)


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
    return Finding(
        "output folder",
        f"Output folder {shown} {reason}; give a folder that can be written.",
        stops=True,
    )


def too_small(folder: RunFolder, units: Sequence[UnitDescription], optimizer: OptimizerSpec) -> Finding | None:
    """Find that what the run saves does not fit on the disk. Quotas are not checked."""
    size = checkpoint_bytes(units, optimizer if folder.saves and folder.states else None, adapters=folder.adapters)
    free = shutil.disk_usage(_nearest(folder)).free
    if size <= free:
        return None
    return Finding(
        "output folder",
        f"{'A checkpoint' if folder.saves else 'The model'} takes {format_bytes(size)}, but the disk of"
        f" {folder.path} has {format_bytes(free)} free; free some space, or give another folder.",
        stops=folder.saves,
    )


def _nearest(folder: RunFolder) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = Path(folder.path).absolute()
    return next(place for place in (path, *path.parents) if place.exists())
