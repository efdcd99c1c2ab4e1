"""Time and peak memory of real steps, to hold estimates against."""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..profiling.live_bytes import LiveBytes
from .mesh import collective_device, world_size

_KEPT_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What was measured, over all ranks."""

    steps: int
    """Optimizer steps that ended."""
    median_step_s: float | None
    """Median over the timed steps on the slowest rank, in seconds; None before any was timed."""
    peak_bytes: int | None
    """Peak on the fullest rank; None before it was measured."""


class StepMeter:
    """Measures optimizer steps between `step_begins` and `step_ends`; what lies between steps does not count.

    CUDA: times come from events on the current stream, without synchronising; the peak is the largest of the steps' peaks
    in the allocator (`max_memory_allocated`, which is reset as each step begins). The first step warms up and is not timed.

    CPU: the peak is that of the second step, from live tensor bytes (`LiveBytes`: what is held when the step begins, and
    what its operators make). Counting slows that step down, so neither it nor the first is timed.
    """

    def __init__(self, device: torch.device | str, held: Callable[[], Iterable[torch.Tensor]] | None = None) -> None:
        """
        Args:
            device: where the model runs, for example `"cuda"` or `"cpu"`.
            held: on the CPU, called as the second step begins: the tensors that count beside those that the step makes, for
                example `training_tensors` of model and optimizer. None counts every tensor, a data set in memory included,
                as the allocator does on CUDA.
        """
        self._held = held or existing_tensors
        self._device = torch.device(device)
        self._on_cuda = self._device.type == "cuda"
        self._untimed = 1 if self._on_cuda else 2
        self._durations: deque[float | tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_KEPT_STEPS)
        self._began: float | torch.cuda.Event | None = None
        self._live: LiveBytes | None = None
        self._peak_bytes: int | None = None
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

    def step_begins(self) -> None:
        """The first micro-batch of an optimizer step starts. A step that was begun and did not end is forgotten."""
        self._stop_counting()
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self.steps == 1:
            self._start_counting()
        self._began = self._now()

    def step_ends(self) -> None:
        """The optimizer has stepped.

        Raises:
            ValueError: no step was begun.
        """
        if self._began is None:
            raise ValueError("step_ends was called without step_begins; call the two around each optimizer step.")
        if self.steps >= self._untimed:
            ended = self._now()
            self._durations.append((self._began, ended) if self._on_cuda else ended - self._began)
        if self._on_cuda:
            self._peak_bytes = max(self._peak_bytes or 0, torch.cuda.max_memory_allocated(self._device))
        elif self._live is not None:
            self._peak_bytes = self._live.peak_bytes
        self._stop_counting()
        self._began = None
        self.steps += 1

    def summary(self) -> StepSummary:
        """Steps, median time and peak over all ranks, the worst rank counting. Collective."""
        values = [-1.0 if value is None else float(value) for value in (self.steps, self.median_step_s, self.peak_bytes)]
        if world_size() > 1:
            worst = torch.tensor(values, dtype=torch.float64, device=collective_device())
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            values = worst.tolist()
        steps, median, peak = values
        return StepSummary(steps=int(steps), median_step_s=None if median < 0 else median, peak_bytes=None if peak < 0 else int(peak))

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _start_counting(self) -> None:
        self._live = LiveBytes(block_bytes=1, device_type=self._device.type)
        self._live.track(self._held())
        self._live.__enter__()

    def _stop_counting(self) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters, gradients, buffers and optimizer state."""
    for parameter in model.parameters():
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


def _seconds(duration: float | tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    if isinstance(duration, float):
        return duration
    began, ended = duration
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
