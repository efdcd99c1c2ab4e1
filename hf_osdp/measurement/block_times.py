"""How long each kind of segment of a model takes on this machine, forward and backward.

A shortened copy of the real model trains without FSDP2 on every rank at once: same kernels, dtype, attention, dropout and
checkpointing as the whole one, in a fraction of its memory.
"""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..errors import ProfileError
from ..modeling.batch import Inputs, loss_of, training_batch
from ..modeling.build import build_on_meta, checkpoint_blocks
from ..modeling.units import find_units, modules_by_name
from ..modeling.wrapping import batch_norm_parameters
from ..planner.description import DType, GatherSpan, ModelDescription, UnitDescription
from ..planner.profile import SegmentTimes, SegmentWork, TimePoint
from ..tracing.describe import describe
from ..tracing.equal_blocks import block_key
from .stopwatch import ROOT, Pairs, Stopwatch
from .timing import cores_are_shared, max_over_ranks, mean_over_ranks, min_over_ranks, rounds, trimmed_mean

_COPIES = 3
"""Blocks of each kind that run one after the other."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    """A model whose blocks are timed, and how it computes."""

    model_or_config: object
    """A module, real or on the meta device (it stays as it is), or a transformers configuration."""
    sequence_length: int
    """Tokens of one sample."""
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Sizes to time; choose them around the ones to plan for, because time is a line only roughly."""
    compute_dtype: DType | None = None
    """Dtype of gathered parameters and activations; None keeps the parameters' own."""
    activation_checkpointing: bool = False
    """Blocks are recomputed in backward."""
    auto_class: type | str | None = None
    """For a configuration: which class to build."""
    block_classes: Sequence[str] | None = None
    """Class names of the blocks; None finds them."""
    inputs: Inputs | None = None
    """From a number of samples to forward's keyword arguments; None makes a training batch."""

    def __post_init__(self) -> None:
        for size in self.micro_batch_sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"micro_batch_sizes has {size!r}; use whole numbers of at least 1.")
        if not self.micro_batch_sizes:
            raise ValueError("micro_batch_sizes is empty; give at least one size, for example 1,2,4.")


def measure_block_times(timed: TimedModel, *, device: torch.device, seconds: float = 5.0) -> tuple[SegmentTimes, ...]:
    """Time every distinct segment of a model: each kind of block, embedding, head with loss. Collective.

    Returns:
        Times of the slowest rank, the same on every rank; in each pass equal blocks count with their mean.

    Raises:
        ValueError: the sequence is longer than the model's positions.
        ProfileError: the model does not fit, or runs other units than its trace says.
    """
    given = timed.model_or_config
    whole = given if isinstance(given, nn.Module) else build_on_meta(given, timed.auto_class)
    model = shortened(whole, find_units(whole, timed.block_classes), _COPIES)
    description = describe(
        model, sequence_length=timed.sequence_length, block_classes=timed.block_classes, compute_dtype=timed.compute_dtype,
        device_type=device.type, inputs=timed.inputs, activation_checkpointing=timed.activation_checkpointing,
    )  # fmt: skip
    dtype = None if timed.compute_dtype is None else getattr(torch, timed.compute_dtype.value)
    model = materialise(model, device, dtype)
    if timed.activation_checkpointing:
        checkpoint_blocks(model, description.block_classes)
    make = timed.inputs or training_batch(model, timed.sequence_length)
    batches = {size: _on_device(make(size), device, dtype) for size in sorted(set(timed.micro_batch_sizes))}
    runner = _Runner(model, description, device, dtype)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # dropout; the training's own state stays as it is
        taken = runner.measure(batches, seconds)
    return _segment_times(description, taken)


class _Runner:
    """Runs passes of a model and gives the seconds of its description's segments."""

    def __init__(self, model: nn.Module, description: ModelDescription, device: torch.device, dtype: torch.dtype | None) -> None:
        self._model, self._description, self._device = model, description, device
        self._crowded = cores_are_shared(device)
        self._stopwatch = Stopwatch(model, description.units, device, dtype, meets=device.type == "cpu" and not self._crowded)

    def measure(self, batches: Mapping[int, Mapping[str, Any]], seconds: float) -> dict[int, list[Pairs]]:
        """Return for each size a list of passes, each with the forward and backward seconds of every segment.

        They are those of the slowest rank. Where ranks share cores, one is quick while another waits for its turn: there the
        whole pass is the slowest rank's, and its parts are as the ranks' mean has them.
        """
        taken: dict[int, list[Pairs]] = {size: [] for size in batches}
        with self._stopwatch.attached():
            for size, batch in batches.items():
                self._try(size, batch)
            for _ in rounds(seconds, self._device, least=_LEAST_ROUNDS, most=_MOST_ROUNDS):
                for size, batch in batches.items():
                    taken[size].append(self._by_segment(self._pass(batch)))
        return {size: [self._over_ranks(one) for one in passes] for size, passes in taken.items()}

    def _try(self, size: int, batch: Mapping[str, Any]) -> None:
        """Warm up; every rank learns whether one ran out of memory."""
        fits = 1.0
        try:
            self._pass(batch)
        except (torch.OutOfMemoryError, MemoryError):
            fits = 0.0
        if not min_over_ranks([fits], self._device)[0]:
            name = self._description.model_class
            raise ProfileError(f"{_COPIES} blocks of {name} do not fit the device with micro_batch_size={size}; use smaller sizes.")

    def _pass(self, batch: Mapping[str, Any]) -> Pairs:
        self._stopwatch.start()
        loss = loss_of(self._model(**batch))
        self._stopwatch.turn()
        loss.backward()
        return self._stopwatch.stop()

    def _by_segment(self, sections: Pairs) -> Pairs:
        """Return seconds of segments from those of sections: a root's section that the trace found idle counts to the one before."""
        segments = self._description.segments
        seconds = [[0.0, 0.0] for _ in segments]
        at = -1
        for unit, (forward, backward) in zip(self._stopwatch.sections, sections, strict=True):
            if at + 1 < len(segments) and segments[at + 1].unit == unit:
                at += 1
            elif unit != ROOT:
                raise ProfileError(f"{self._description.model_class} runs other units than its trace; its blocks cannot be timed.")
            seconds[max(at, 0)][0] += forward
            seconds[max(at, 0)][1] += backward
        if at + 1 != len(segments):
            raise ProfileError(f"{self._description.model_class} runs fewer units than its trace; its blocks cannot be timed.")
        return [(forward, backward) for forward, backward in seconds]

    def _over_ranks(self, one: Pairs) -> Pairs:
        own = [value for pair in one for value in pair]
        flat = max_over_ranks(own, self._device)
        if self._crowded:
            means, (whole,) = mean_over_ranks(own, self._device), max_over_ranks([sum(own)], self._device)
            flat = [value * whole / sum(means) for value in means]
        return list(zip(flat[::2], flat[1::2], strict=True))


def _segment_times(description: ModelDescription, taken: Mapping[int, list[Pairs]]) -> tuple[SegmentTimes, ...]:
    """Return times of equal segments as one, with the mean of a pass."""
    kinds: dict[tuple[object, ...], tuple[SegmentTimes, list[int]]] = {}
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

    def seconds(passes: list[Pairs], members: list[int], phase: int) -> float:
        return trimmed_mean([statistics.fmean(one[i][phase] for i in members) for one in passes])

    def point(size: int, members: list[int]) -> TimePoint:
        return TimePoint(samples=size, forward_s=seconds(taken[size], members, 0), backward_s=seconds(taken[size], members, 1))

    return tuple(replace(times, points=tuple(point(size, members) for size in taken)) for times, members in kinds.values())


def _on_device(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)

    moved: dict[str, Any] = tree_map_only(torch.Tensor, move, dict(batch))
    return moved


def shortened(model: nn.Module, units: tuple[UnitDescription, ...], copies: int) -> nn.Module:
    """Return a copy on the meta device in which lists of blocks end once `copies` of each kind are there.

    Buffers that were real keep their values; blocks that are not in a `nn.ModuleList` all stay.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    short = copy.deepcopy(model, memo)
    modules = modules_by_name(short)
    lists: dict[str, list[str]] = {}
    for unit in units:
        parent = unit.fqn.rpartition(".")[0]
        if unit.span is GatherSpan.USE and isinstance(modules.get(parent), nn.ModuleList):
            lists.setdefault(parent, []).append(unit.fqn)
    for parent, blocks in lists.items():
        row = modules[parent]
        if isinstance(row, nn.ModuleList) and len(blocks) == len(row):
            del row[_enough([block_key(modules[name]) for name in blocks], copies) :]
    return short


def materialise(model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> nn.Module:
    """Give a model on the meta device memory and random weights, in place, and switch it to training; what is shared stays shared.

    Parameters get `compute_dtype` as FSDP2's mixed precision casts them, not those of batch norms; None keeps theirs. transformers
    models set their buffers anew, others must have real ones.
    """
    _allocate(model, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=0.02)
        if hasattr(model, "init_weights"):
            model.init_weights()  # type: ignore[operator]
    if compute_dtype is not None:
        keeping = batch_norm_parameters(model)
        for parameter in model.parameters():
            if parameter.is_floating_point() and id(parameter) not in keeping:
                parameter.data = parameter.data.to(compute_dtype)
    return model.train()


def _allocate(model: nn.Module, device: torch.device) -> None:
    memo: dict[int, torch.Tensor] = {}

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            real = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)
            memo[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
        return memo[id(tensor)]

    for module in model.modules():
        slots: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in slots:
            tensors.update({name: made(tensor) for name, tensor in tensors.items() if tensor is not None})


def _enough(keys: list[Hashable], copies: int) -> int:
    """Return how many of the first blocks hold `copies` of each kind, or all there are of it."""
    missing = Counter({key: min(copies, count) for key, count in Counter(keys).items()})
    for number, key in enumerate(keys, start=1):
        missing[key] -= 1
        if max(missing.values()) <= 0:
            return number
    return len(keys)
