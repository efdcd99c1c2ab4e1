"""Time, peak memory and collectives of real steps, to hold estimates against."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ..distributed.mesh import collective_device, world_size
from ..planner.fit import fit_line
from ..planner.hardware import Collective, CollectiveTiming
from ..tracing.memory_tracker import MemoryTracker
from .collective_clock import CollectiveCall, CollectiveClock, of_last_rank

_KEPT_STEPS = 1000


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
        """
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
        self._durations: deque[float | tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_KEPT_STEPS)
        self._began: float | torch.cuda.Event | None = None
        self._mode: MemoryTracker | CollectiveClock | None = None
        self._left: list[TorchDispatchMode] = []
        self._peak_bytes: int | None = None
        self._reserved_bytes: int | None = None
        self._clock: CollectiveClock | None = None
        self.steps = 0
        """Optimizer steps that ended."""

    @property
    def median_step_s(self) -> float | None:
        """Median over this rank's timed steps (the last 1,000), in seconds; None before any was timed."""
        return statistics.median(_seconds(duration) for duration in self._durations) if self._durations else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak on this rank; None before it was measured."""
        return self._peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """What the allocator had taken at most on this rank; None before it was measured, and on the CPU."""
        return self._reserved_bytes

    @property
    def untimed(self) -> int:
        """Steps at the start that are not timed."""
        return (1 if self._on_cuda else 2) + (self._clocked_steps if world_size() > 1 else 0)

    def step_begins(self) -> None:
        """The first micro-batch of an optimizer step starts. A step that was begun and did not end is forgotten."""
        self._leave()
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._enter()
        self._began = self._now()

    def step_ends(self) -> None:
        """The optimizer has stepped.

        Raises:
            ValueError: no step was begun.
        """
        if self._began is None:
            raise ValueError("step_ends was called without step_begins; call the two around each optimizer step.")
        if self.steps >= self.untimed:
            ended = self._now()
            self._durations.append((self._began, ended) if self._on_cuda else ended - self._began)
        if isinstance(self._mode, CollectiveClock):
            self._clock = self._mode
        elif isinstance(self._mode, MemoryTracker):
            self._peak_bytes = self._mode.peak_bytes
        elif self._on_cuda:
            self._peak_bytes = max(self._peak_bytes or 0, torch.cuda.max_memory_allocated(self._device))
            self._reserved_bytes = max(self._reserved_bytes or 0, torch.cuda.max_memory_reserved(self._device))
        self._leave()
        self._began = None
        self.steps += 1

    def abandon(self) -> None:
        """Forget a step that was begun, and count no more."""
        self._leave()
        self._began = None

    def summary(self) -> Observation:
        """What was measured over all ranks, the worst rank counting. Collective."""
        figures = self.steps, self.median_step_s, self.peak_bytes, self.reserved_bytes
        values = [-1.0 if value is None else float(value) for value in figures]
        if world_size() > 1:
            worst = torch.tensor(values, dtype=torch.float64, device=collective_device())
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            values = worst.tolist()
        steps, median, peak, reserved = values
        calls = of_last_rank(() if self._clock is None else self._clock.calls())
        return Observation(
            steps=int(steps),
            median_step_s=None if median < 0 else median,
            peak_bytes=None if peak < 0 else int(peak),
            reserved_bytes=None if reserved < 0 else int(reserved),
            collectives=_totals(calls, steps=self._clocked_steps),
            timings=_timings(calls),
        )

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _enter(self) -> None:
        """Start counting where this step's turn has come."""
        if self._left:
            return
        warm = 1
        if self.steps == warm and not self._on_cuda:
            self._mode = MemoryTracker(block_bytes=1, device_type=self._device.type)
            self._mode.track(self._held())
        elif warm <= self.steps < self.untimed and world_size() > 1:
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
    """Parameters, gradients, buffers and optimizer state.

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
    """Every tensor that Python can reach: parameters, optimizer state, buffers, the data in memory."""
    for candidate in gc.get_objects():
        # isinstance would ask proxies such as lazy modules for their __class__.
        if issubclass(type(candidate), torch.Tensor):
            yield candidate
            if candidate.is_leaf and candidate.grad is not None:
                yield candidate.grad


def _totals(calls: Sequence[CollectiveCall], *, steps: int) -> tuple[CollectiveTotal, ...]:
    """Of one step, where `calls` has those of several."""
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
    """A line through the median time of each size of message."""
    timings = []
    groups = _grouped(calls, lambda call: (call.collective, call.group_size, call.crosses_nodes))
    for (collective, size, crosses), members in sorted(groups.items()):
        by_bytes: dict[int, list[float]] = defaultdict(list)
        for call in members:
            by_bytes[call.nbytes].append(max(call.seconds, 1e-9))
        latency_s, seconds_per_byte = fit_line([(nbytes, statistics.median(taken)) for nbytes, taken in by_bytes.items()])
        line = CollectiveTiming(
            collective=collective, group_size=size, crosses_nodes=crosses, latency_s=latency_s, seconds_per_byte=seconds_per_byte
        )  # fmt: skip
        timings.append(line)
    return tuple(timings)


def _grouped(calls: Sequence[CollectiveCall], key: Callable[[CollectiveCall], tuple]) -> dict[tuple, list[CollectiveCall]]:
    groups: dict[tuple, list[CollectiveCall]] = defaultdict(list)
    for call in calls:
        groups[key(call)].append(call)
    return groups


def _seconds(duration: float | tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    if isinstance(duration, float):
        return duration
    began, ended = duration
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
