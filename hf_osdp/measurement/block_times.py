"""Measure the time of each kind of segment: a shortened copy of the real model trains without FSDP2 on all ranks at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import ProfileError
from ..modeling.batch import Inputs, loss_of
from ..modeling.build import build_on_meta, checkpoint_blocks
from ..modeling.units import class_of, find_units, modules_by_name, segment_modules
from ..modeling.wrapping import cast_floating, compile_forward, forward_replaced
from ..planner.description import DType, ModelDescription, UnitDescription
from ..planner.profile import SegmentTimes, SegmentWork, TimePoint
from ..tracing.describe import describe
from ..tracing.pictures import UsualBatch
from .model_copies import materialised, shortened
from .timing import (
    Moment,
    barrier,
    cores_are_shared,
    now,
    over_ranks,
    rounds,
    seconds_between,
    synchronize,
    trimmed_mean,
)

_COPIES = 3
"""Number of blocks of each kind that run one after the other."""
_MIN_ROUNDS, _MAX_ROUNDS = 3, 50
ROOT = 0
"""Index of the root's unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    model_or_config: object
    """A module, real or on the meta device (it is not changed), or a transformers configuration."""
    sequence_length: int
    """Tokens of one sample."""
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Sizes to time; choose them around the ones to plan for, because time is only roughly linear."""
    compute_dtype: DType | None = None
    """Dtype of gathered parameters and activations; None keeps that of the parameters."""
    activation_checkpointing: bool = False
    compile: bool = False
    auto_class: type | str | None = None
    """For a configuration: the class to build."""
    block_classes: Sequence[str] | None = None
    """Class names of the blocks; None finds them."""
    inputs: Inputs | None = None
    """A function from a number of samples to forward's keyword arguments; None makes a training batch."""

    def __post_init__(self) -> None:
        for size in self.micro_batch_sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"micro_batch_sizes has {size!r}; use whole numbers of at least 1.")
        if not self.micro_batch_sizes:
            raise ValueError("micro_batch_sizes is empty; give at least one size, for example 1,2,4.")


def measure_block_times(timed: TimedModel, *, device: torch.device, seconds: float = 5.0) -> tuple[SegmentTimes, ...]:
    """Time every distinct segment of a model: each kind of block, embedding, head with loss. Collective.

    Return times of the slowest rank, the same on every rank; in each pass equal blocks count with their mean. Raise
    ProfileError if the model does not fit, or runs other units than its trace.
    """
    source = timed.model_or_config
    whole = source if isinstance(source, nn.Module) else build_on_meta(source, timed.auto_class)
    model = shortened(whole, find_units(whole, timed.block_classes), _COPIES)
    description = describe(
        model, sequence_length=timed.sequence_length, block_classes=timed.block_classes,
        compute_dtype=timed.compute_dtype,
        device_type=device.type, inputs=timed.inputs, activation_checkpointing=timed.activation_checkpointing,
        compile=timed.compile,
        recomputation=False,
    )  # fmt: skip
    dtype = None if timed.compute_dtype is None else getattr(torch, timed.compute_dtype.value)
    model = materialised(model, device, dtype)
    if timed.activation_checkpointing:
        checkpoint_blocks(model, description.block_classes)
    for module in model.modules():
        if class_of(module).__name__ in description.compiled_classes:
            compile_forward(module)
    make = timed.inputs or UsualBatch(model, timed.sequence_length)
    batches = {size: _on_device(make(size), device, dtype) for size in sorted(set(timed.micro_batch_sizes))}
    shared = cores_are_shared(device)
    stopwatch = Stopwatch(model, description.units, device, dtype, barriers=device.type == "cpu" and not shared)
    with torch.random.fork_rng(
        devices=[device] if device.type == "cuda" else []
    ):  # dropout must not change the training's random state
        sections = _measure_sections(model, stopwatch, batches, seconds)
    passes = {size: torch.stack([_by_segment(description, *one) for one in taken]) for size, taken in sections.items()}
    return _segment_times(
        description, {size: _of_slowest_rank(one, cores_shared=shared) for size, one in passes.items()}
    )


Sections = tuple[list[int], list[list[float]]]
"""Units of a pass's sections, and the seconds of forward and backward of each section."""


def _measure_sections(
    model: nn.Module, stopwatch: Stopwatch, batches: Mapping[int, dict[str, Any]], seconds: float
) -> dict[int, list[Sections]]:
    """Return the sections of all passes of each size.

    All ranks raise ProfileError if one ran out of memory during warm-up.
    """
    taken: dict[int, list[Sections]] = {size: [] for size in batches}
    with stopwatch.attached():
        for size, batch in batches.items():
            fits = True
            try:
                stopwatch.measure(lambda: loss_of(model(**batch)))  # noqa: B023
            except (torch.OutOfMemoryError, MemoryError):
                fits = False
            if not over_ranks([fits], dist.ReduceOp.MIN)[0]:
                name = class_of(model).__name__
                raise ProfileError(
                    f"{_COPIES} blocks of {name} do not fit the device with micro_batch_size={size}; use smaller"
                    " sizes."
                )
        for _ in rounds(seconds, least=_MIN_ROUNDS, most=_MAX_ROUNDS):
            for size, batch in batches.items():
                taken[size].append(stopwatch.measure(lambda: loss_of(model(**batch))))  # noqa: B023
    return taken


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
        unit = description.units[segment.unit]
        kinds.setdefault(
            (unit.class_name, tuple(p.shape for p in unit.parameters), SegmentWork.of(segment)), []
        ).append(index)

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


class Stopwatch:
    """Time the sections of a pass while `attached`: one for each call of a unit, and those of the root between them.

    In backward a section begins when the gradient of its output is complete: a hook on that tensor runs just before
    autograd continues.

    On the CPU all ranks synchronize where a unit begins and at the end, as in the collectives of training, and the
    barrier's own time is subtracted. If ranks share cores there are no barriers: a waiting rank leaves its core to
    another one, and a barrier would take longer than the section.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitDescription],
        device: torch.device,
        compute_dtype: torch.dtype | None,
        *,
        barriers: bool,
    ) -> None:
        """Prepare to time a model on a device; with `barriers`, ranks wait for each other between sections.

        The root is the first unit.
        """
        self._barriers = barriers
        self._model, self._device, self._compute_dtype = model, device, compute_dtype
        self._modules = segment_modules(modules_by_name(model), units)
        self._inside = self._in_backward = False
        self._marks: list[tuple[int, Moment, bool]] = []  # section, moment, whether a barrier was before it
        self._current = 0
        self._sections: list[int] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Time the units' calls, and free each gradient as soon as it is complete, so that passes start without
        gradients.
        """
        with ExitStack() as stack:
            for unit, module in self._modules:
                stack.enter_context(forward_replaced(module, self._timed(unit, module.forward)))
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(
                        lambda parameter: setattr(parameter, "grad", None)
                    )
                    stack.callback(handle.remove)
            yield

    def measure(self, forward: Callable[[], torch.Tensor]) -> Sections:
        """Run `forward`, which returns the loss, and backward.

        Return the sections in forward order; root and other units alternate.
        """
        self._sections, self._marks, self._in_backward = [], [], False
        barrier(self._device)
        barrier_s = 0.0
        if self._barriers:
            began = now(self._device)
            barrier(self._device)
            barrier_s = seconds_between(began, now(self._device))
        self._begin(ROOT)
        loss = forward()
        self._in_backward = True
        self._mark()
        loss.backward()
        self._mark()
        synchronize(self._device)
        seconds = [[0.0, 0.0] for _ in self._sections]
        for number, ((section, began, _), (_, ended, with_barrier)) in enumerate(
            zip(self._marks, self._marks[1:], strict=False)
        ):
            in_backward = number >= len(self._sections)  # forward has one mark per section
            seconds[section][in_backward] += max(0.0, seconds_between(began, ended) - with_barrier * barrier_s)
        return self._sections, seconds

    def _timed(self, unit: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> object:
            if self._inside or self._in_backward:
                return original(*args, **kwargs)  # a call inside another, or recomputed in backward
            self._hook((args, kwargs), len(self._sections) - 1)
            self._inside = True
            section = self._begin(unit)
            try:
                args, kwargs = cast_floating((args, kwargs), self._compute_dtype)
                output = original(*args, **kwargs)
                self._hook(output, section)
            finally:
                self._inside = False
            self._begin(ROOT)
            return output

        return forward

    def _begin(self, unit: int) -> int:
        self._sections.append(unit)
        self._current = len(self._sections) - 1
        self._mark(with_barrier=unit != ROOT)
        return self._current

    def _mark(self, *, with_barrier: bool = True) -> None:
        with_barrier = with_barrier and self._barriers
        if with_barrier:
            barrier(self._device)
        self._marks.append((self._current, now(self._device), with_barrier))

    def _hook(self, value: object, section: int) -> None:
        """Begin the section in backward when the gradient of one of these tensors is complete."""

        def enter(_: torch.Tensor) -> None:
            if self._in_backward and section < self._current:
                self._current = section
                self._mark()

        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(enter)
