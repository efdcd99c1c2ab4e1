"""Times of the sections of a real forward and backward pass: each unit's, and the root's between them.

In forward a section begins when a unit's module is called, and the root's when it returns. In backward it begins when the
gradient of its output is complete: a hook on that tensor runs just before autograd goes on into the section.

On the CPU all ranks wait for each other where a unit begins and at the end, as the collectives of training make them: a
section takes until the slowest rank is through. The time of the barrier itself is left out. Where ranks share cores there are no
barriers: a rank that waits leaves its core to another, so that nothing is lost by waiting, and a barrier would count for more
than the section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..modeling.units import modules_by_name, segment_modules
from ..modeling.wrapping import cast_floating, forward_replaced
from ..planner.description import UnitDescription
from .timing import Moment, barrier, now, seconds_between, synchronize

ROOT = 0
"""Index of the root's unit."""
Pairs = list[tuple[float, float]]
"""Seconds of forward and backward, by section or by segment."""


class Stopwatch:
    """Wraps a model's units while `attached`, and times one pass between `start` and `stop`."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitDescription],
        device: torch.device,
        compute_dtype: torch.dtype | None,
        *,
        meets: bool,
    ) -> None:
        """Prepare to time a model on a device; where it `meets`, ranks wait for each other between sections.

        The root's rest is the first of the units. Their floating-point inputs are cast to the compute dtype, as FSDP2 casts them.
        """
        self._meets = meets
        self._model, self._device, self._compute_dtype = model, device, compute_dtype
        self._modules = segment_modules(modules_by_name(model), units)
        self._inside = self._in_backward = False
        self._marks: list[tuple[int, Moment, bool]] = []  # section, moment, whether a barrier was before it
        self._barrier_s = 0.0
        self._current = 0
        self.sections: list[int] = []
        """Units of the pass's sections, in forward order; root and others alternate."""

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
        """Begin forward."""
        self.sections, self._marks, self._in_backward = [], [], False
        barrier(self._device)
        if self._meets:
            began = now(self._device)
            barrier(self._device)
            self._barrier_s = seconds_between(began, now(self._device))
        self._begin(ROOT)

    def turn(self) -> None:
        """End forward and begin backward."""
        self._in_backward = True
        self._current = len(self.sections) - 1
        self._mark()

    def stop(self) -> Pairs:
        """End backward. Return the seconds of each section's forward and backward."""
        self._mark()
        synchronize(self._device)
        seconds = [[0.0, 0.0] for _ in self.sections]
        turn = len(self.sections)  # forward has one mark a section
        for number, ((section, began, _), (_, ended, met)) in enumerate(zip(self._marks, self._marks[1:], strict=False)):
            seconds[section][number >= turn] += max(0.0, seconds_between(began, ended) - met * self._barrier_s)
        return [(forward, backward) for forward, backward in seconds]

    def _timed(self, unit: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> object:
            if self._inside or self._in_backward:
                return original(*args, **kwargs)  # a call inside another, or recomputed in backward
            self._hook((args, kwargs), len(self.sections) - 1)
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
        self.sections.append(unit)
        self._current = len(self.sections) - 1
        self._mark(meet=unit != ROOT)
        return self._current

    def _mark(self, *, meet: bool = True) -> None:
        meet = meet and self._meets
        if meet:
            barrier(self._device)
        self._marks.append((self._current, now(self._device), meet))

    def _hook(self, value: object, section: int) -> None:
        """Enter the section in backward when the gradient of one of these tensors is complete."""

        def enter(_: torch.Tensor) -> None:
            if self._in_backward and section < self._current:
                self._current = section
                self._mark()

        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(enter)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
