"""Measure time and peak memory of real steps, for comparison with estimates."""

from __future__ import annotations

import copyreg
import statistics
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..distributed.device import free_workspaces
from ..modeling.step_hooks import after_step
from ..modeling.wrapping import in_any_mode
from ..planner.plan import Plan
from ..tracing.memory_tracker import MemoryTracker
from .timing import Moment, now, over_ranks, seconds_between

_STEPS = 8
"""Optimizer steps that are measured before the figures are reported."""


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
    reserved_bytes: int | None = None
    """Most bytes that torch's allocator reserved on the device, on any rank; None on the CPU."""


class StepMeter:
    """Measure the first optimizer steps of any loop with hooks, which are removed once the steps have been measured.

    A step is from the first training forward to the end of the optimizer's step; time between steps does not count.
    The first step warms up and is not timed. On CUDA the peak is the allocator's largest peak of all steps, less the
    workspaces of matrix products, which plans count as reserved by the device. On the CPU it is the peak of live
    tensor bytes (`MemoryTracker`) in the second step, which is not timed: of the model, the optimizer, the batch, what
    is beside them, and what the step makes; None if code skips the tracker, or the step begins in a dispatch mode of
    the loop.
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
        steps: int = _STEPS,
        beside: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """Register hooks on the model and on all optimizers; `report` is called once, on every rank, with the
        measurements. `beside` returns tensors of other models.

        If a loss scaler `may_skip` the optimizer's step, a new step begins after the plan's number of micro-steps;
        otherwise all passes up to the optimizer's step are one step.
        """
        self.model, self._device, self._report = model, device, report
        self._on_cuda, self._beside = device.type == "cuda", beside
        self._steps, self._micro_steps = steps, plan.accumulation_steps if may_skip else None
        self._optimizer: torch.optim.Optimizer | None = None
        self._passes = 0
        self._began: Moment | None = None
        self._durations: list[tuple[Moment, Moment]] = []
        self._tracker: MemoryTracker | None = None
        self._peak_bytes: int | None = None
        self._reserved_bytes: int | None = None
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
        """Stop measuring, and report if a step was measured. Collective; a second call does nothing."""
        if self.model is None:  # as in copies
            return
        for remove in self._removers:
            remove()
        self.discard()
        self.model = self._optimizer = None
        if self._durations:
            self._report(self._observation())

    def discard(self) -> None:
        """Forget a step that an error has interrupted."""
        if self.model is None:
            return
        self._passes = 0
        self._leave()

    def __reduce__(self) -> tuple[object, ...]:
        """Measure no pickle and no copy of the model, whose hooks then have a meter without a model."""
        return copyreg.__newobj__, (StepMeter,)  # type: ignore[attr-defined]  # of pickle's own protocol

    def _forward_begins(self, module: nn.Module, args: object, kwargs: object) -> None:
        is_in_backward = torch._C._current_graph_task_id() != -1  # a mode entered there is gone after it
        if self.model is None or is_in_backward or not (module.training and torch.is_grad_enabled()):
            return
        if self._passes in (0, self._micro_steps):
            self._passes = 0
            self._leave()
            self._enter([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
            self._began = now(self._device)
        self._passes += 1

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.model is None or not self._passes:
            return
        own = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return  # the hook runs for every optimizer of the process
        self._passes, self._optimizer = 0, optimizer
        assert self._began is not None
        self._durations.append((self._began, now(self._device)))
        if self._tracker is not None:
            self._peak_bytes = None if self._tracker.skipped else self._tracker.peak_bytes
        elif self._on_cuda:
            self._peak_bytes = max(self._peak_bytes or 0, torch.cuda.max_memory_allocated(self._device))
            self._reserved_bytes = max(self._reserved_bytes or 0, torch.cuda.max_memory_reserved(self._device))
        self._leave()
        if len(self._durations) >= self._steps:
            self.finish()

    def _enter(self, batch: list[torch.Tensor]) -> None:
        """Begin to count; the optimizer is known since the first step."""
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        elif len(self._durations) == 1 and not in_any_mode():  # a mode may end within the step, and take ours off
            assert self.model is not None and self._optimizer is not None
            self._tracker = MemoryTracker(block_bytes=1, device_type=self._device.type)
            self._tracker.track([*_training_tensors(self.model, self._optimizer), *self._beside(), *batch])
            self._tracker.__enter__()

    def _leave(self) -> None:
        """Stop counting."""
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
        self._tracker = None

    def _observation(self) -> Observation:
        """Return the measurements over all ranks; the worst rank counts. Collective."""
        seconds = [seconds_between(*duration) for duration in self._durations]
        timed = seconds[1 if self._on_cuda else 2 :]
        peak = self._peak_bytes
        if self._on_cuda and peak is not None:
            peak -= free_workspaces(self._device)
        figures = statistics.median(timed) if timed else None, seconds[0], peak, self._reserved_bytes
        largest = over_ranks([len(seconds), *(-1.0 if value is None else value for value in figures)])
        steps, median, first, peak_bytes, reserved = (None if value < 0 else value for value in largest)
        return Observation(
            steps=int(steps or 0),
            median_step_s=median,
            first_step_s=first,
            peak_bytes=None if peak_bytes is None else int(peak_bytes),
            reserved_bytes=None if reserved is None else int(reserved),
        )


def _training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
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
