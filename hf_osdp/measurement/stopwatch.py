"""Times the stretches of a real forward and backward pass: each unit's, and the root's between them.

In forward a stretch begins when a unit's module is called, and the root's when it returns. In backward it begins when the
gradient of its output is complete: a hook on that tensor runs just before autograd goes on into the stretch.

On the CPU all ranks wait for each other where a unit begins and at the end, as the collectives of training make them: a
stretch takes until the slowest rank is through. What such a meeting takes by itself is left out. Where ranks share cores they do
not meet: a rank that waits leaves its core to another, so that nothing is lost by waiting, and a meeting would count for more
than the stretch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..modeling.units import modules_by_name, segment_modules
from ..modeling.wrapping import cast_floating, forward_replaced
from ..planner.description import UnitDescription
from .synchronize import synchronize, wait_for_all

ROOT = 0
"""Index of the root's unit."""


class Stopwatch:
    """Wraps a model's units while `attached`, and times one pass between `start` and `stop`.

    Args:
        model: real, on `device`.
        units: its units; the root's rest first.
        device: whose time counts; on CUDA events are recorded, so that nothing waits.
        compute_dtype: units' floating-point inputs are cast to it, as FSDP2 casts them; None leaves them.
        meets: ranks wait for each other between stretches.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitDescription],
        device: torch.device,
        compute_dtype: torch.dtype | None,
        *,
        meets: bool,
    ) -> None:
        self._meets = meets
        self._model, self._device, self._compute_dtype = model, device, compute_dtype
        self._modules = segment_modules(modules_by_name(model), units)
        self._inside = self._in_backward = False
        self._marks: list[tuple[int, Any, bool]] = []  # stretch, moment, whether ranks met before it
        self._meeting_s = 0.0
        self._current = 0
        self.stretches: list[int] = []
        """Units of the pass's stretches, in forward order; root and others alternate."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Time the units' calls, and drop each gradient as soon as it is there: passes start from none."""
        with ExitStack() as stack:
            for unit, module in self._modules:
                stack.enter_context(forward_replaced(module, self._timed(unit, module.forward)))
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(_drop_gradient)
                    stack.callback(handle.remove)
            yield

    def start(self) -> None:
        """Forward begins."""
        self.stretches, self._marks, self._in_backward = [], [], False
        wait_for_all(self._device)
        if self._meets:
            began = time.perf_counter()
            wait_for_all(self._device)
            self._meeting_s = time.perf_counter() - began
        self._begin(ROOT)

    def turn(self) -> None:
        """Forward is over and backward begins."""
        self._in_backward = True
        self._current = len(self.stretches) - 1
        self._mark()

    def stop(self) -> list[tuple[float, float]]:
        """Backward is over. Returns seconds of each stretch's forward and backward."""
        self._mark()
        synchronize(self._device)
        seconds = [[0.0, 0.0] for _ in self.stretches]
        turn = len(self.stretches)  # forward has one mark a stretch
        for number, ((stretch, began, _), (_, ended, met)) in enumerate(zip(self._marks, self._marks[1:], strict=False)):
            seconds[stretch][number >= turn] += max(0.0, _seconds_between(began, ended) - met * self._meeting_s)
        return [(forward, backward) for forward, backward in seconds]

    def _timed(self, unit: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside or self._in_backward:
                return original(*args, **kwargs)  # a call inside another, or recomputed in backward
            self._hook((args, kwargs), len(self.stretches) - 1)
            self._inside = True
            stretch = self._begin(unit)
            try:
                args, kwargs = cast_floating((args, kwargs), self._compute_dtype)
                output = original(*args, **kwargs)
                self._hook(output, stretch)
            finally:
                self._inside = False
            self._begin(ROOT)
            return output

        return forward

    def _begin(self, unit: int) -> int:
        self.stretches.append(unit)
        self._current = len(self.stretches) - 1
        self._mark(meet=unit != ROOT)
        return self._current

    def _mark(self, *, meet: bool = True) -> None:
        meet = meet and self._meets
        if meet:
            wait_for_all(self._device)
        self._marks.append((self._current, self._now(), meet))

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def _hook(self, value: Any, stretch: int) -> None:
        """Backward enters the stretch when the gradient of one of these tensors is complete."""

        def enter(_: torch.Tensor) -> None:
            if self._in_backward and stretch < self._current:
                self._current = stretch
                self._mark()

        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(enter)


def _seconds_between(began: Any, ended: Any) -> float:
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3


def _drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None
