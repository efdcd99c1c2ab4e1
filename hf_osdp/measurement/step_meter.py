"""Time, peak memory and collectives of real steps, to hold estimates against."""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ..distributed.mesh import collective_device, world_size
from ..planner.affine import linear_fit
from ..planner.hardware import Collective, CollectiveTiming
from ..tracing.memory_tracker import MemoryTracker
from .collective_clock import CollectiveCall, CollectiveClock, of_last_rank
from .timing import Moment, now, seconds_between

_KEPT_STEPS = 1000
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """All calls of one collective in groups of one size, in one optimizer step."""

    collective: Collective
    group_size: int
    calls: int
    nbytes: int
    """Of whole tensors, over all calls."""
    seconds: float
    """Over all calls, without waiting for ranks that come late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What real steps of a plan showed, over all ranks."""

    steps: int
    """Optimizer steps that ended."""
    median_step_s: float | None
    """Median over the timed steps on the slowest rank, in seconds; None before any was timed."""
    peak_bytes: int | None
    """Peak of tensors on the fullest rank; None before it was measured."""
    collectives: tuple[CollectiveTotal, ...] = ()
    """One step's; empty before it was measured and where there is one rank."""
    timings: tuple[CollectiveTiming, ...] = ()
    """The same as lines over bytes, for the planner."""
    reserved_bytes: int | None = None
    """Most that torch's allocator had taken from the device, on the rank where that was most; None on the CPU."""
    out_of_memory: bool = False
    """The device had not enough memory for a step; nothing else was measured then."""


class StepMeter:
    """Measures optimizer steps between `step_begins` and `step_ends`; what lies between steps does not count.

    CUDA: times come from events on the current stream, without synchronising; the peak is the largest of the steps' peaks
    in the allocator (`max_memory_allocated` and `max_memory_reserved`, which are reset as each step begins).
    The first step warms up and is not timed.
    Among several ranks the second (or `clocked_steps` from there) has its collectives timed (`CollectiveClock`), and counts
    for nothing else.

    CPU: the peak is that of the second step, from live tensor bytes (`MemoryTracker`: what is held when the step begins, and
    what its operators make). Among several ranks the third, or `clocked_steps` from there, has its
    collectives timed. Neither these nor the first is timed.
    """

    def __init__(
        self, device: torch.device | str, held: Callable[[], Iterable[torch.Tensor]] | None = None, *, clocked_steps: int = 1
    ) -> None:
        """Measure on one device.

        Args:
            device: where the model runs, for example `"cuda"` or `"cpu"`.
            held: on the CPU, called as the second step begins: the tensors that count beside those that the step makes, for
                example `training_tensors` of model and optimizer. None counts every tensor, a data set in memory included,
                as the allocator does on CUDA.
            clocked_steps: steps whose collectives are timed.
        """
        self._clocked_steps = clocked_steps
        self._held = held or existing_tensors
        self._device = torch.device(device)
        self._on_cuda = self._device.type == "cuda"
        self._durations: deque[tuple[Moment, Moment]] = deque(maxlen=_KEPT_STEPS)
        self._began: Moment | None = None
        self._mode: MemoryTracker | CollectiveClock | None = None
        self._left: list[TorchDispatchMode] = []
        self._clock: CollectiveClock | None = None
        self.steps = 0
        """Optimizer steps that ended."""
        self.peak_bytes: int | None = None
        """Peak on this rank; None before it was measured."""
        self.reserved_bytes: int | None = None
        """Most that the allocator had taken on this rank; None before it was measured, and on the CPU."""

    @property
    def median_step_s(self) -> float | None:
        """Median over this rank's timed steps (the last 1,000), in seconds; None before any was timed."""
        return statistics.median(seconds_between(*duration) for duration in self._durations) if self._durations else None

    @property
    def untimed(self) -> int:
        """Steps at the start that are not timed."""
        return (1 if self._on_cuda else 2) + (self._clocked_steps if world_size() > 1 else 0)

    def step_begins(self) -> None:
        """Begin an optimizer step, before its first micro-batch. A step that was begun and did not end is forgotten."""
        self._leave()
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._enter()
        self._began = now(self._device)

    def step_ends(self) -> None:
        """End the step, after the optimizer has stepped.

        Raises:
            ValueError: no step was begun.
        """
        if self._began is None:
            raise ValueError("step_ends was called without step_begins; call the two around each optimizer step.")
        if self.steps >= self.untimed:
            self._durations.append((self._began, now(self._device)))
        if isinstance(self._mode, CollectiveClock):
            self._clock = self._mode
        elif isinstance(self._mode, MemoryTracker):
            self.peak_bytes = self._mode.peak_bytes
        elif self._on_cuda:
            self.peak_bytes = max(self.peak_bytes or 0, torch.cuda.max_memory_allocated(self._device))
            self.reserved_bytes = max(self.reserved_bytes or 0, torch.cuda.max_memory_reserved(self._device))
        self.abandon()
        self.steps += 1

    def abandon(self) -> None:
        """Forget a step that was begun, and count no more."""
        self._leave()
        self._began = None

    def summary(self) -> Observation:
        """Return what was measured over all ranks, the worst rank counting. Collective."""
        figures = self.steps, self.median_step_s, self.peak_bytes, self.reserved_bytes
        values = torch.tensor(
            [-1.0 if value is None else float(value) for value in figures], dtype=torch.float64, device=collective_device()
        )
        if world_size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        steps, median, peak, reserved = (None if value < 0 else value for value in values.tolist())
        calls = of_last_rank(() if self._clock is None else self._clock.calls())
        return Observation(
            steps=int(steps or 0),
            median_step_s=median,
            peak_bytes=None if peak is None else int(peak),
            reserved_bytes=None if reserved is None else int(reserved),
            collectives=_totals(calls, steps=self._clocked_steps),
            timings=_timings(calls),
        )

    def _enter(self) -> None:
        """Start counting where this step's turn has come."""
        if self._left:
            return
        if self.steps == 1 and not self._on_cuda:
            self._mode = MemoryTracker(block_bytes=1, device_type=self._device.type)
            self._mode.track(self._held())
        elif 1 <= self.steps < self.untimed and world_size() > 1:
            self._mode = self._clock or CollectiveClock(self._device)
        if self._mode is not None:
            self._mode.__enter__()

    def _leave(self) -> None:
        """Stop counting. Modes are a stack: beneath another one, opened since, ours stays without use until that has gone."""
        if self._mode is not None:
            self._left.append(self._mode)
            self._mode = None
        while self._left and _get_current_dispatch_mode() is self._left[-1]:
            self._left.pop().__exit__(None, None, None)


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield parameters, gradients, buffers and optimizer state.

    After an evaluation, units that are kept show gathered parameters; their shards are those that the optimizer has.
    """
    shards = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter in (*model.parameters(), *shards):
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def existing_tensors() -> Iterator[torch.Tensor]:
    """Yield every tensor that Python can reach: parameters, optimizer state, buffers, the data in memory."""
    for candidate in gc.get_objects():
        # isinstance would ask proxies such as lazy modules for their __class__.
        if issubclass(type(candidate), torch.Tensor):
            yield candidate
            if candidate.is_leaf and candidate.grad is not None:
                yield candidate.grad


def _totals(calls: Sequence[CollectiveCall], *, steps: int) -> tuple[CollectiveTotal, ...]:
    """Return the totals of one step, where `calls` has those of several."""
    groups = _grouped(calls, lambda call: (call.collective, call.group_size))
    return tuple(
        CollectiveTotal(
            collective=collective,
            group_size=size,
            calls=len(members) // steps,
            nbytes=sum(call.nbytes for call in members) // steps,
            seconds=sum(call.seconds for call in members) / steps,
        )
        for (collective, size), members in sorted(groups.items())
    )


def _timings(calls: Sequence[CollectiveCall]) -> tuple[CollectiveTiming, ...]:
    """Return lines through the median time of each size of message."""
    timings = []
    groups = _grouped(calls, lambda call: (call.collective, call.group_size, call.crosses_nodes))
    for (collective, size, crosses), members in sorted(groups.items()):
        by_bytes = _grouped(members, lambda call: call.nbytes)
        points = [(nbytes, statistics.median(max(call.seconds, 1e-9) for call in same)) for nbytes, same in by_bytes.items()]
        latency_s, seconds_per_byte = linear_fit(points)
        line = CollectiveTiming(
            collective=collective, group_size=size, crosses_nodes=crosses, latency_s=latency_s, seconds_per_byte=seconds_per_byte
        )  # fmt: skip
        timings.append(line)
    return tuple(timings)


def _grouped(calls: Sequence[CollectiveCall], key: Callable[[CollectiveCall], _Key]) -> dict[_Key, list[CollectiveCall]]:
    groups: dict[_Key, list[CollectiveCall]] = defaultdict(list)
    for call in calls:
        groups[key(call)].append(call)
    return groups
