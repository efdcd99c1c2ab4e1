"""Measure the time of each kind of segment: a shortened copy of the real model trains without FSDP2 on all ranks at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils._pytree import tree_map_only

from ..distributed.process_group import all_gather_objects
from ..errors import ProfileError, first_line
from ..modeling.batch import loss_of, output_of, random_states_kept, same_random_numbers
from ..modeling.build import build_on_meta, checkpoint_blocks, disable_cache
from ..modeling.units import modules_by_name
from ..modeling.wrapping import frozen_norms_keep_dtype
from ..planner.description import ModelDescription, Segment
from ..planner.profile import COPIES, SegmentTimes, SegmentWork, TimePoint, segment_kind
from ..tracing.block_forms import change_blocks
from ..tracing.describe import describe
from ..tracing.options import ModelRun
from ..tracing.pictures import UsualBatch
from .model_copies import materialised, shortened
from .stopwatch import ROOT, Sections, Stopwatch
from .timing import cores_are_shared, over_ranks, rounds, trimmed_mean

T = TypeVar("T")
_MIN_ROUNDS, _MAX_ROUNDS, _ROUNDS_AT_START = 3, 50, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel(ModelRun):
    """A model whose blocks are timed, as it runs."""

    model_or_config: object
    """A module, real or on the meta device (it is not changed), or a transformers configuration."""
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Sizes to time; choose them around the ones to plan for, because time is only roughly linear."""

    def __post_init__(self) -> None:
        for size in self.micro_batch_sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"micro_batch_sizes has {size!r}; use whole numbers of at least 1.")
        if not self.micro_batch_sizes:
            raise ValueError("micro_batch_sizes is empty; give at least one size, for example 1,2,4.")


def measure_block_times(
    timed: TimedModel,
    *,
    device: torch.device,
    seconds: float = 5.0,
    at_start: bool = False,
    description: ModelDescription | None = None,
) -> tuple[SegmentTimes, ...]:
    """Time every distinct segment of a model: each kind of block, embedding, head with loss. Collective.

    The model itself is not run and not changed, and random number generators keep their states. `at_start` takes fewer
    passes, and not many more seconds even if they are slow, because a training waits. `description` is that of the
    whole model; None makes one. Return times of the slowest rank, the same on every rank; in each pass equal
    blocks count with their mean. Raise ProfileError, on every rank, if the model does not fit or run on some rank, or
    runs other units than its trace.
    """
    source = timed.model_or_config
    whole = source if isinstance(source, nn.Module) else build_on_meta(source, timed.auto_class)
    if description is None:
        description = describe(whole, **{**timed.keywords, "device_type": device.type}, recomputation=False)
    shared = cores_are_shared(device)
    devices = [device] if device.type == "cuda" else []
    try:
        with random_states_kept(devices), torch.inference_mode(False), torch.enable_grad():
            part, passes = _measure_passes(timed, whole, description, device, seconds, at_start, shared)
    finally:
        if device.type == "cuda":
            clear_device_cache(garbage_collection=True)  # modules and hooks of the copy refer to each other
    return _segment_times(part, {size: _of_slowest_rank(one, cores_shared=shared) for size, one in passes.items()})


def _measure_passes(
    timed: TimedModel,
    whole: nn.Module,
    description: ModelDescription,
    device: torch.device,
    seconds: float,
    at_start: bool,
    shared: bool,
) -> tuple[ModelDescription, dict[int, torch.Tensor]]:
    """Run passes of a shortened copy; return the description of that copy, and for each size the seconds by pass,
    segment and phase.
    """
    cast = timed.cast_dtype

    def prepare() -> tuple[nn.Module, ModelDescription, dict[int, Callable[[], torch.Tensor]]]:
        short = shortened(whole, description.units, COPIES)
        part = part_of(description, short)
        model = _prepared(materialised(short, device, cast), timed, description)
        make = timed.inputs or UsualBatch(whole, timed.sequence_length, timed.images)
        batches = {size: _on_device(make(size), device, cast) for size in sorted(set(timed.micro_batch_sizes))}

        def runner(batch: dict[str, Any]) -> Callable[[], torch.Tensor]:
            return lambda: loss_of(output_of(model, batch, timed.loss))

        return model, part, {size: runner(batch) for size, batch in batches.items()}

    model, part, forwards = _agreed(prepare)
    stopwatch = Stopwatch(model, part.units, device, cast, barriers=device.type == "cpu" and not shared)
    with ExitStack() as stack:
        stack.enter_context(stopwatch.attached())
        stack.enter_context(timed.running(model, whole, device.type))

        def measure(size: int, *, alone: bool = False) -> Sections:
            with same_random_numbers():  # all ranks and passes run the same modules
                return stopwatch.measure(forwards[size], alone=alone)

        units = _agreed(lambda: [measure(size, alone=True)[0] for size in forwards])
        if any(one != units for one in all_gather_objects(units)):
            raise ProfileError(f"Ranks run different blocks of {part.model_class}; its blocks cannot be timed.")
        taken: dict[int, list[Sections]] = {size: [] for size in forwards}
        most, limit_s = (_ROUNDS_AT_START, 3 * seconds) if at_start else (_MAX_ROUNDS, float("inf"))
        for _ in rounds(seconds, least=_MIN_ROUNDS, most=most, limit_s=limit_s):
            for size in forwards:
                taken[size].append(measure(size))
    return part, _agreed(
        lambda: {size: torch.stack([_by_segment(part, *one) for one in passes]) for size, passes in taken.items()}
    )


def _prepared(model: nn.Module, timed: TimedModel, description: ModelDescription) -> nn.Module:
    """Recompute blocks, and give them their forms, as training will."""
    disable_cache(model)
    if timed.compute_dtype is not None and not timed.autocast:
        frozen_norms_keep_dtype(model)
    if timed.activation_checkpointing:
        checkpoint_blocks(model, description.block_classes)
    change_blocks(model, description, description.units)
    return model


def part_of(description: ModelDescription, short: nn.Module) -> ModelDescription:
    """Return the description of a shortened model: the units and segments of the whole one that it still has.

    Of the root's segments around blocks that are gone, the last one is left, as in a pass of the short model.
    """
    there = modules_by_name(short)
    kept = [i for i, unit in enumerate(description.units) if all(name in there for name in unit.module_names)]
    place = {old: new for new, old in enumerate(kept)}
    segments: list[Segment] = []
    gone = False
    for segment in description.segments:
        if segment.unit not in place:
            gone = True
            continue
        if gone and segment.unit == ROOT and segments and segments[-1].unit == ROOT:
            segments.pop()
        segments.append(replace(segment, unit=place[segment.unit]))
        gone = gone and segment.unit == ROOT
    return replace(description, units=tuple(description.units[i] for i in kept), segments=tuple(segments))


def _agreed(attempt: Callable[[], T]) -> T:
    """Return what `attempt` returns; raise ProfileError on every rank if it fails on some rank. Collective."""
    result: T | None = None
    reason = ""
    try:
        result = attempt()
    except (torch.OutOfMemoryError, MemoryError):
        reason = f"{COPIES} blocks do not fit the device; use smaller micro-batches."
    except ProfileError as error:
        reason = str(error)
    except Exception as error:  # a model may raise anything
        reason = f"A copy of the model does not run: {first_line(error)}."
    if reason := next(filter(None, all_gather_objects(reason)), ""):
        raise ProfileError(reason)
    return result  # type: ignore[return-value]


def _by_segment(
    description: ModelDescription, units: Sequence[int], seconds: Sequence[Sequence[float]]
) -> torch.Tensor:
    """Return seconds by segment from those by section; a section of the root that costs nothing in the trace counts
    to the one before.
    """
    segments, name = description.segments, description.model_class
    by_segment = torch.zeros(len(segments), 2, dtype=torch.float64)
    at = -1
    for unit, pair in zip(units, seconds, strict=True):
        if at + 1 < len(segments) and segments[at + 1].unit == unit:
            at += 1
        elif unit != ROOT:
            raise ProfileError(f"{name} runs other units than its trace; its blocks cannot be timed.")
        by_segment[max(at, 0)] += torch.tensor(pair, dtype=torch.float64)
    if at + 1 != len(segments):
        raise ProfileError(f"{name} runs fewer units than its trace; its blocks cannot be timed.")
    return by_segment


def _of_slowest_rank(passes: torch.Tensor, *, cores_shared: bool) -> torch.Tensor:
    """Return passes, by segment and phase, with the seconds of the slowest rank. Collective.

    If ranks share cores, ranks are slow in turns: then the whole pass takes the slowest rank's time, divided in
    proportion to the sums over all ranks.
    """

    def reduced(values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        return torch.tensor(over_ranks(values.flatten().tolist(), op), dtype=torch.float64).view_as(values)

    if not cores_shared:
        return reduced(passes, dist.ReduceOp.MAX)
    whole = passes.sum((1, 2), keepdim=True)
    return reduced(passes, dist.ReduceOp.SUM) * reduced(whole, dist.ReduceOp.MAX) / reduced(whole, dist.ReduceOp.SUM)


def _segment_times(description: ModelDescription, passes: Mapping[int, torch.Tensor]) -> tuple[SegmentTimes, ...]:
    kinds: dict[tuple[str, tuple[tuple[int, ...], ...], SegmentWork], list[int]] = {}
    for index, segment in enumerate(description.segments):
        kinds.setdefault(segment_kind(description, segment), []).append(index)

    def point(size: int, members: list[int]) -> TimePoint:
        forward_s, backward_s = (trimmed_mean(phase.tolist()) for phase in passes[size][:, members].mean(1).unbind(1))
        return TimePoint(samples=size, forward_s=forward_s, backward_s=backward_s)

    return tuple(
        SegmentTimes(
            class_name=class_name,
            parameter_shapes=shapes,
            sequence_length=description.sequence_length,
            compute_dtype=description.compute_dtype,
            work=work,
            points=tuple(point(size, members) for size in passes),
        )
        for (class_name, shapes, work), members in kinds.items()
    )


def _on_device(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)

    return tree_map_only(torch.Tensor, move, dict(batch))
