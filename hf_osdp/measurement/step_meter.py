"""Measure time, peak memory and collectives of real steps, for comparison with estimates."""

from __future__ import annotations

import copyreg
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..distributed.device import free_workspaces
from ..distributed.mesh import world_size
from ..modeling.step_hooks import after_step
from ..modeling.wrapping import in_any_mode
from ..planner.hardware import CollectiveTiming
from ..planner.plan import Plan
from ..tracing.memory_tracker import MemoryTracker
from .timing import (
    CollectiveClock,
    CollectiveTotal,
    Moment,
    now,
    of_last_rank,
    over_ranks,
    seconds_between,
    timings_of,
    totals_of,
)

_KEPT_STEPS = 1000
_LOOP_STEPS = 8
"""Optimizer steps of a loop that are measured before the figures are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measurements of real steps of a plan, over all ranks."""

    steps: int
    median_step_s: float | None
    """Median over the timed steps on the slowest rank; None before any was timed."""
    first_step_s: float | None = None
    """The first step on the slowest rank, which includes one-time work such as compilation; None before it ended."""
    peak_bytes: int | None = None
    """Peak of tensors on the fullest rank, without workspaces of matrix products; None before it was measured."""
    collectives: tuple[CollectiveTotal, ...] = ()
    """Totals of one step; empty before they were measured, and with one rank."""
    timings: tuple[CollectiveTiming, ...] = ()
    """The same collectives as linear functions of bytes, for the planner."""
    reserved_bytes: int | None = None
    """Most bytes that torch's allocator reserved on the device, on any rank; None on the CPU."""
    out_of_memory: bool = False
    """Whether a step ran out of device memory; nothing else was measured then."""


class StepMeter:
    """Measure optimizer steps between `step_begins` and `step_ends`; time between steps does not count.

    The first step warms up and is not timed. On CUDA the peak is the allocator's largest peak of all steps, less the
    workspaces of matrix products, which plans count as reserved by the device. On the CPU it is the peak of live
    tensor bytes (`MemoryTracker`) in the second step, which is not timed; None if code skips the tracker. With several
    ranks, the next `clocked_steps` time only their collectives (`CollectiveClock`). A step that begins in a dispatch
    mode of the loop is only timed.
    """

    def __init__(
        self,
        device: torch.device | str,
        held: Callable[[], Iterable[torch.Tensor]],
        *,
        clocked_steps: int = 1,
    ) -> None:
        """Measure on one device.

        Args:
            device: where the model runs, for example `"cuda"` or `"cpu"`.
            held: on the CPU, returns the tensors that count in addition to those that the second step makes, such as
                `training_tensors`.
            clocked_steps: number of steps whose collectives are timed.
        """
        self._clocked_steps, self._held = clocked_steps, held
        self._device = torch.device(device)
        self._on_cuda = self._device.type == "cuda"
        self._durations: deque[tuple[Moment, Moment]] = deque(maxlen=_KEPT_STEPS)
        self._began: Moment | None = None
        self._first: tuple[Moment, Moment] | None = None
        self._mode: MemoryTracker | CollectiveClock | None = None
        self._clock: CollectiveClock | None = None
        self.steps = 0
        self._allocated_bytes = self._workspace_bytes = 0
        """On CUDA: the allocator's peak, and the workspaces of matrix products in it."""
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        """As in `Observation`, but only of this rank."""

    @property
    def median_step_s(self) -> float | None:
        """Median over this rank's timed steps (the last 1,000), in seconds; None before any was timed."""
        return (
            statistics.median(seconds_between(*duration) for duration in self._durations) if self._durations else None
        )

    @property
    def untimed(self) -> int:
        """Steps at the start that do not count towards the median."""
        return (1 if self._on_cuda else 2) + (self._clocked_steps if world_size() > 1 else 0)

    def step_begins(self) -> None:
        """Begin an optimizer step, before its first micro-batch. A step that was begun and not ended is discarded."""
        self._leave()
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._enter()
        self._began = now(self._device)

    def step_ends(self) -> None:
        """End the step, after the optimizer's step; raise ValueError if no step was begun."""
        if self._began is None:
            raise ValueError("step_ends was called without step_begins; call the two around each optimizer step.")
        duration = self._began, now(self._device)
        if self.steps == 0:
            self._first = duration
        elif self.steps >= self.untimed:
            self._durations.append(duration)
        if isinstance(self._mode, CollectiveClock):
            self._clock = self._mode
        elif isinstance(self._mode, MemoryTracker):
            self.peak_bytes = None if self._mode.skipped else self._mode.peak_bytes
        elif self._on_cuda:
            self._allocated_bytes = max(self._allocated_bytes, torch.cuda.max_memory_allocated(self._device))
            self.reserved_bytes = max(self.reserved_bytes or 0, torch.cuda.max_memory_reserved(self._device))
        self.abandon()
        self.steps += 1

    def abandon(self) -> None:
        self._leave()
        self._began = None

    def summary(self) -> Observation:
        """Return the measurements over all ranks; the worst rank counts. Collective."""
        first = None if self._first is None else seconds_between(*self._first)
        if self._allocated_bytes:
            self._workspace_bytes = max(self._workspace_bytes, free_workspaces(self._device))
            self.peak_bytes = self._allocated_bytes - self._workspace_bytes
        figures = self.steps, self.median_step_s, first, self.peak_bytes, self.reserved_bytes
        largest = over_ranks([-1.0 if value is None else value for value in figures])
        steps, median, first, peak, reserved = (None if value < 0 else value for value in largest)
        calls = of_last_rank(() if self._clock is None else self._clock.calls())
        return Observation(
            steps=int(steps or 0),
            median_step_s=median,
            first_step_s=first,
            peak_bytes=None if peak is None else int(peak),
            reserved_bytes=None if reserved is None else int(reserved),
            collectives=totals_of(calls, steps=self._clocked_steps),
            timings=timings_of(calls),
        )

    def _enter(self) -> None:
        if in_any_mode():  # it may end within the step, and would take this one off
            return
        if self.steps == 1 and not self._on_cuda:
            self._mode = MemoryTracker(block_bytes=1, device_type=self._device.type)
            self._mode.track(self._held())
        elif 1 <= self.steps < self.untimed and world_size() > 1:
            self._mode = self._clock or CollectiveClock(self._device)
        if self._mode is not None:
            self._mode.__enter__()

    def _leave(self) -> None:
        """Stop counting."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
        self._mode = None


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield parameters, gradients, buffers and optimizer state.

    After an evaluation the model may hold gathered parameters; their shards are then found in the optimizer.
    """
    shards = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter in (*model.parameters(), *shards):
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class LoopMeter:
    """Measure the first optimizer steps of any loop with hooks: from the first training forward to the end of the
    optimizer's step.

    Time between steps does not count. The hooks are removed once the steps have been measured.
    """

    model: nn.Module | None = None
    """None once the steps have been measured."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        report: Callable[[Observation], None],
        plan: Plan,
        *,
        may_skip: bool,
        steps: int = _LOOP_STEPS,
    ) -> None:
        """Register hooks on the model and on all optimizers; `report` is called once, on every rank, with the summary.

        If a loss scaler `may_skip` the optimizer's step, a new step begins after the plan's number of micro-steps;
        otherwise all passes up to the optimizer's step are one step. On the CPU the peak includes the model, the
        optimizer and the batch.
        """
        self._meter = StepMeter(device, self._held)
        self._report = report
        self._steps, self._micro_steps = steps, plan.accumulation_steps if may_skip else None
        self.model = model
        self._optimizer: torch.optim.Optimizer | None = None
        self._batch: list[torch.Tensor] = []
        self._passes = 0
        self_reference = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer) -> None:
            if (meter := self_reference()) is not None:
                meter._optimizer_stepped(optimizer)

        # The optimizers' hook must not keep this model alive; the model's hook runs before FSDP2's, which gathers the
        # root.
        remove_optimizer_hook = after_step.add(stepped)
        weakref.finalize(self, remove_optimizer_hook)
        model_hook = model.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True)
        self._removers: list[Callable[[], object]] = [model_hook.remove, remove_optimizer_hook]

    def finish(self) -> None:
        """Stop measuring, and report the summary if a step was measured. Collective; a second call does nothing."""
        if self.model is None:
            return
        self.stop()
        if self._meter.steps:
            self._report(self._meter.summary())

    def stop(self) -> None:
        if self.model is None:  # as in copies
            return
        for remove in self._removers:
            remove()
        self._removers.clear()
        self.model = self._optimizer = None
        self._meter.abandon()

    def discard(self) -> None:
        """Forget a step that an error has interrupted."""
        if self.model is None:
            return
        self._passes = 0
        self._meter.abandon()

    def __reduce__(self) -> tuple[object, ...]:
        """Measure no pickle and no copy of the model, whose hooks then have a meter without a model."""
        return copyreg.__newobj__, (LoopMeter,)  # type: ignore[attr-defined]  # of pickle's own protocol

    def _forward_begins(self, module: nn.Module, args: object, kwargs: object) -> None:
        is_in_backward = torch._C._current_graph_task_id() != -1  # a mode entered there is gone after it
        if self.model is None or is_in_backward or not (module.training and torch.is_grad_enabled()):
            return
        if self._passes in (0, self._micro_steps):
            self._passes = 0
            self._batch = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self._meter.step_begins()
            self._batch = []
        self._passes += 1

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.model is None or not self._passes:
            return
        own = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return  # the hook runs for every optimizer of the process
        self._passes, self._optimizer = 0, optimizer
        self._meter.step_ends()
        if self._meter.steps >= self._steps:
            self.finish()

    def _held(self) -> list[torch.Tensor]:
        """Return the tensors that are live when a step begins; the optimizer is known since the first step."""
        assert self.model is not None and self._optimizer is not None
        return [*training_tensors(self.model, self._optimizer), *self._batch]
