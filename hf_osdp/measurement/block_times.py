"""Measure the time of each kind of segment: a copy of the real model with one block of each kind trains without FSDP2
on all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils._pytree import tree_map_only

from ..distributed.process_group import all_gather_objects
from ..errors import ProfileError, first_line
from ..modeling.batch import loss_of, output_of, random_states_kept, same_random_numbers
from ..modeling.build import build_on_meta, checkpoint_blocks, disable_cache
from ..modeling.compiled import compile_blocks
from ..modeling.split.apply import apply_split
from ..modeling.units import modules_by_name
from ..modeling.wrapping import frozen_norms_keep_dtype
from ..planner.description import ModelDescription, Segment
from ..planner.profile import SegmentTimes, TimePoint, segment_kind
from ..tracing.describe import describe
from ..tracing.options import ModelRun
from ..tracing.pictures import UsualBatch
from .model_copies import materialised, shortened
from .stopwatch import ROOT, Sections, Stopwatch
from .timing import barrier, over_ranks, rounds, trimmed_mean

T = TypeVar("T")
_MIN_ROUNDS, _MAX_ROUNDS = 3, 50
_LIMIT_S, _LIMIT_FACTOR = 3.0, 3.0
"""If passes are slow, the measurement takes at most this many seconds or, if longer, this many times the requested
time.
"""


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
    description: ModelDescription | None = None,
) -> tuple[SegmentTimes, ...]:
    """Time every distinct segment of a model: each kind of block, embedding, head with loss. Collective.

    The model itself is not run and not changed, and random number generators keep their states. `seconds` is about how
    long to measure. `description` is that of the whole model, which is timed with its split; None makes one. Return
    times of the slowest rank, the same on every rank. Raise ProfileError, on every rank, if the model does not fit or
    run on some rank, or runs other units than its trace.
    """
    source = timed.model_or_config
    whole = source if isinstance(source, nn.Module) else build_on_meta(source, timed.auto_class)
    if description is None:
        description = describe(whole, **{**timed.keywords, "device_type": device.type}, recomputation=False)
    devices = [device] if device.type == "cuda" else []
    try:
        with random_states_kept(devices), torch.inference_mode(False), torch.enable_grad():
            part, passes = _measure_passes(timed, whole, description, device, seconds)
    finally:
        if device.type == "cuda":
            clear_device_cache(garbage_collection=True)  # modules and hooks of the copy refer to each other
    return _segment_times(part, passes, timed)


def _measure_passes(
    timed: TimedModel,
    whole: nn.Module,
    description: ModelDescription,
    device: torch.device,
    seconds: float,
) -> tuple[ModelDescription, dict[int, torch.Tensor]]:
    """Run passes of a shortened copy; return the description of that copy, and for each size a row by pass and
    segment: the seconds of forward and backward, and the bytes that forward saves.
    """
    cast = timed.cast_dtype

    def prepare() -> tuple[nn.Module, ModelDescription, dict[int, dict[str, Any]]]:
        short = shortened(whole, description.units)
        part = part_of(description, short)
        model = materialised(short, device, cast)
        apply_split(model, description.split)
        model = _prepared(model, timed, description)
        make = timed.inputs or UsualBatch(whole, timed.sequence_length, timed.images)
        batches = {size: _on_device(make(size), device, cast) for size in sorted(set(timed.micro_batch_sizes))}
        return model, part, batches

    model, part, batches = _agreed(prepare)
    stopwatch = Stopwatch(model, part.units, device, cast)
    with ExitStack() as stack:
        if timed.compile:  # each size as training compiles it: with its own shapes, and anew
            stack.callback(torch._dynamo.reset)
            stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False))
        stack.enter_context(stopwatch.attached())
        stack.enter_context(timed.running(model, whole, device.type))

        def measure(size: int) -> Sections:
            with same_random_numbers():  # all ranks and passes run the same modules
                return stopwatch.measure(lambda: loss_of(output_of(model, batches[size], timed.loss)))

        _agreed(lambda: [measure(size) for size in batches])  # to warm up
        taken: dict[int, list[Sections]] = {size: [] for size in batches}
        limit_s = max(_LIMIT_S, _LIMIT_FACTOR * seconds)
        for _ in rounds(seconds, least=_MIN_ROUNDS, most=_MAX_ROUNDS, limit_s=limit_s):
            for size in batches:
                barrier(device)  # ranks compute at the same time, as in training
                taken[size].append(measure(size))
    return part, _agreed(
        lambda: {size: torch.stack([_by_segment(part, one) for one in passes]) for size, passes in taken.items()}
    )


def _prepared(model: nn.Module, timed: TimedModel, description: ModelDescription) -> nn.Module:
    """Recompute blocks, and compile them, as training will."""
    disable_cache(model)
    if timed.compute_dtype is not None and not timed.autocast:
        frozen_norms_keep_dtype(model)
    if timed.activation_checkpointing:
        checkpoint_blocks(model, description.block_classes)
    if timed.compile:
        compile_blocks(model, description, description.units)
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
        reason = "One block of each kind does not fit the device; use smaller micro-batches."
    except ProfileError as error:
        reason = str(error)
    except Exception as error:  # a model may raise anything
        reason = f"A copy of the model does not run: {first_line(error)}."
    if reason := next(filter(None, all_gather_objects(reason)), ""):
        raise ProfileError(reason)
    return result  # type: ignore[return-value]


def _by_segment(description: ModelDescription, sections: Sections) -> torch.Tensor:
    """Return seconds and bytes by segment from those by section; a section of the root that costs nothing in the
    trace counts to the one before.
    """
    segments, name = description.segments, description.model_class
    by_segment = torch.zeros(len(segments), 3, dtype=torch.float64)
    at = -1
    for unit, seconds, saved in zip(*sections, strict=True):
        if at + 1 < len(segments) and segments[at + 1].unit == unit:
            at += 1
        elif unit != ROOT:
            raise ProfileError(f"{name} runs other units than its trace; its blocks cannot be timed.")
        by_segment[max(at, 0)] += torch.tensor([*seconds, saved], dtype=torch.float64)
    if at + 1 != len(segments):
        raise ProfileError(f"{name} runs fewer units than its trace; its blocks cannot be timed.")
    return by_segment


def _segment_times(
    description: ModelDescription, passes: Mapping[int, torch.Tensor], timed: TimedModel
) -> tuple[SegmentTimes, ...]:
    """Return the mean over passes of each kind of segment, on the rank where it is largest. Collective."""
    kinds: dict[Any, list[int]] = {}
    for index, segment in enumerate(description.segments):
        kinds.setdefault(segment_kind(description, segment), []).append(index)

    def point(size: int, members: list[int]) -> TimePoint:
        *phases, saved = passes[size][:, members].mean(1).unbind(1)
        means = [trimmed_mean(phase.tolist()) for phase in phases]
        forward_s, backward_s, saved_bytes = over_ranks([*means, saved.max().item()])
        return TimePoint(
            samples=size, forward_s=forward_s, backward_s=backward_s, saved_bytes=max(0, int(saved_bytes))
        )

    return tuple(
        SegmentTimes(
            class_name=class_name,
            parameter_shapes=shapes,
            sequence_length=description.sequence_length,
            compute_dtype=description.compute_dtype,
            work=work,
            compiled=timed.compile and description.compiles(class_name),
            points=tuple(point(size, members) for size in passes),
        )
        for (class_name, shapes, work), members in kinds.items()
    )


def _on_device(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)

    return tree_map_only(torch.Tensor, move, dict(batch))
