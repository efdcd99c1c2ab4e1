"""Time the sections of a pass through a model: the calls of its units, and what runs between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..modeling.replaced import replaced
from ..modeling.units import modules_by_name, segment_modules
from ..modeling.wrapping import cast_floating
from ..planner.description import UnitDescription
from .timing import Moment, barrier, now, seconds_between, synchronize

ROOT = 0
"""Index of the root's unit."""
Sections = tuple[list[int], list[list[float]]]
"""Units of a pass's sections, and the seconds of forward and backward of each section."""


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
        self._barriers = self._meets = barriers
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
                stack.enter_context(replaced(module, forward=self._timed(unit, module.forward)))
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(
                        lambda parameter: setattr(parameter, "grad", None)
                    )
                    stack.callback(handle.remove)
            yield

    def measure(self, forward: Callable[[], torch.Tensor], *, alone: bool = False) -> Sections:
        """Run `forward`, which returns the loss, and backward; ranks do not wait for each other if `alone`.

        Return the sections in forward order; root and other units alternate.
        """
        self._sections, self._marks, self._in_backward, self._meets = [], [], False, self._barriers and not alone
        barrier_s = 0.0
        if not alone:
            barrier(self._device)
        if self._meets:
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
        with_barrier = with_barrier and self._meets
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
