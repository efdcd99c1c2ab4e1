"""How long each kind of segment of a model takes on this machine, forward and backward.

A shortened copy of the real model trains without FSDP2 on every rank at once: same kernels, dtype, attention, dropout and
checkpointing as the whole one, in a fraction of its memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..errors import ProfileError
from ..modeling.batch import Inputs, loss_of, training_batch
from ..modeling.build import build_on_meta, checkpoint_blocks
from ..modeling.units import find_units
from ..planner.description import DType, ModelDescription
from ..planner.profile import SegmentTimes, SegmentWork, TimePoint
from ..tracing.describe import describe
from .reduced import materialise, shortened
from .stopwatch import ROOT, Stopwatch
from .synchronize import average, cores_are_shared, largest, rounds, smallest, typical

_COPIES = 3
"""Blocks of each kind that run one after the other."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 50


def measure_block_times(
    model_or_config: Any,
    *,
    device: torch.device,
    sequence_length: int,
    micro_batch_sizes: Sequence[int],
    compute_dtype: DType | None = None,
    activation_checkpointing: bool = False,
    seconds: float = 5.0,
    auto_class: Any = None,
    block_classes: Sequence[str] | None = None,
    inputs: Inputs | None = None,
) -> tuple[SegmentTimes, ...]:
    """Time every distinct segment of a model: each kind of block, embedding, head with loss. Collective.

    Args:
        model_or_config: a module, real or on the meta device (it stays as it is), or a transformers configuration.
        device: where it runs.
        sequence_length: tokens of one sample.
        micro_batch_sizes: sizes to time; choose them around the ones to plan for, because time is a line only roughly.
        compute_dtype: dtype of gathered parameters and activations; None keeps the parameters' own.
        activation_checkpointing: blocks are recomputed in backward.
        seconds: about how long to measure; every size is run three times at least.
        auto_class: for a configuration, which class to build.
        block_classes: class names of the blocks; None finds them.
        inputs: from a number of samples to forward's keyword arguments; None makes a training batch.

    Returns:
        Times of the slowest rank, the same on every rank; in each pass equal blocks count with their mean.

    Raises:
        ValueError: a size is not a whole number of at least 1, or the sequence is longer than the model's positions.
        ProfileError: the model does not fit, or runs other units than its trace says.
    """
    sizes = _checked_sizes(micro_batch_sizes)
    whole = model_or_config if isinstance(model_or_config, nn.Module) else build_on_meta(model_or_config, auto_class)
    model = shortened(whole, find_units(whole, block_classes), _COPIES)
    description = describe(
        model, sequence_length=sequence_length, block_classes=block_classes, compute_dtype=compute_dtype,
        device_type=device.type, inputs=inputs, activation_checkpointing=activation_checkpointing,
    )  # fmt: skip
    dtype = None if compute_dtype is None else getattr(torch, compute_dtype.value)
    model = materialise(model, device, dtype)
    if activation_checkpointing:
        checkpoint_blocks(model, description.block_classes)
    make = inputs or training_batch(model, sequence_length)
    batches = {size: _on_device(make(size), device, dtype) for size in sizes}
    runner = _Runner(model, description, device, dtype)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # dropout; the training's own state stays as it is
        taken = runner.measure(batches, seconds)
    return _segment_times(description, taken)


class _Runner:
    """Runs passes of a model and gives the seconds of its description's segments."""

    def __init__(self, model: nn.Module, description: ModelDescription, device: torch.device, dtype: torch.dtype | None) -> None:
        self._model, self._description, self._device = model, description, device
        self._crowded = cores_are_shared(device)
        self._watch = Stopwatch(model, description.units, device, dtype, meets=device.type == "cpu" and not self._crowded)

    def measure(self, batches: Mapping[int, Mapping[str, Any]], seconds: float) -> dict[int, list[list[tuple[float, float]]]]:
        """For each size a list of passes, each with the forward and backward seconds of every segment.

        They are those of the slowest rank. Where ranks share cores, one is quick while another waits for its turn: there the
        whole pass is the slowest rank's, and its parts are as the ranks' mean has them.
        """
        taken: dict[int, list[list[tuple[float, float]]]] = {size: [] for size in batches}
        with self._watch.attached():
            for size, batch in batches.items():
                self._try(size, batch)
            for _ in rounds(seconds, self._device, least=_LEAST_ROUNDS, most=_MOST_ROUNDS):
                for size, batch in batches.items():
                    taken[size].append(self._pass(batch))
        return {size: [self._agreed(one) for one in passes] for size, passes in taken.items()}

    def _try(self, size: int, batch: Mapping[str, Any]) -> None:
        """Warm up; every rank learns whether one ran out of memory."""
        fits = 1.0
        try:
            self._once(batch)
        except (torch.OutOfMemoryError, MemoryError):
            fits = 0.0
        if not smallest([fits], self._device)[0]:
            name = self._description.model_class
            raise ProfileError(f"{_COPIES} blocks of {name} do not fit the device with micro_batch_size={size}; use smaller sizes.")

    def _pass(self, batch: Mapping[str, Any]) -> list[tuple[float, float]]:
        return self._by_segment(self._once(batch))

    def _once(self, batch: Mapping[str, Any]) -> list[tuple[float, float]]:
        self._watch.start()
        loss = loss_of(self._model(**batch))
        self._watch.turn()
        loss.backward()
        return self._watch.stop()

    def _by_segment(self, stretches: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Seconds of segments from those of stretches: a root's stretch that the trace found idle counts to the one before."""
        segments = self._description.segments
        seconds = [[0.0, 0.0] for _ in segments]
        at = -1
        for unit, (forward, backward) in zip(self._watch.stretches, stretches, strict=True):
            if at + 1 < len(segments) and segments[at + 1].unit == unit:
                at += 1
            elif unit != ROOT:
                raise ProfileError(f"{self._description.model_class} runs other units than its trace; its blocks cannot be timed.")
            seconds[max(at, 0)][0] += forward
            seconds[max(at, 0)][1] += backward
        if at + 1 != len(segments):
            raise ProfileError(f"{self._description.model_class} runs fewer units than its trace; its blocks cannot be timed.")
        return [(forward, backward) for forward, backward in seconds]

    def _agreed(self, one: list[tuple[float, float]]) -> list[tuple[float, float]]:
        own = [value for pair in one for value in pair]
        flat = largest(own, self._device)
        if self._crowded:
            means, (whole,) = average(own, self._device), largest([sum(own)], self._device)
            flat = [value * whole / sum(means) for value in means]
        return list(zip(flat[::2], flat[1::2], strict=True))


def _segment_times(description: ModelDescription, taken: Mapping[int, list[list[tuple[float, float]]]]) -> tuple[SegmentTimes, ...]:
    """Equal segments as one, with the typical mean of a pass."""
    kinds: dict[tuple, tuple[SegmentTimes, list[int]]] = {}
    for index, segment in enumerate(description.segments):
        unit = description.units[segment.unit]
        shapes, work = tuple(p.shape for p in unit.parameters), SegmentWork.of(segment)
        if (key := (unit.class_name, shapes, work)) not in kinds:
            times = SegmentTimes(
                class_name=unit.class_name, parameter_shapes=shapes, sequence_length=description.sequence_length,
                compute_dtype=description.compute_dtype, work=work, points=(TimePoint(samples=1, forward_s=0.0, backward_s=0.0),),
            )  # fmt: skip
            kinds[key] = (times, [])
        kinds[key][1].append(index)

    def seconds(passes: list[list[tuple[float, float]]], members: list[int], phase: int) -> float:
        return typical([statistics.fmean(one[i][phase] for i in members) for one in passes])

    return tuple(
        replace(
            times,
            points=tuple(
                TimePoint(samples=size, forward_s=seconds(passes, members, 0), backward_s=seconds(passes, members, 1))
                for size, passes in taken.items()
            ),
        )
        for times, members in kinds.values()
    )


def _on_device(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)

    return tree_map_only(torch.Tensor, move, dict(batch))


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"micro_batch_sizes has {size!r}; use whole numbers of at least 1.")
    if not sizes:
        raise ValueError("micro_batch_sizes is empty; give at least one size, for example 1,2,4.")
    return tuple(sorted(set(sizes)))
