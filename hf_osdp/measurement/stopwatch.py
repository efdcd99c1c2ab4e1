"""Time the sections of a pass through a model: the calls of its units, and what runs between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..modeling.replaced import replaced
from ..modeling.units import modules_by_name, segment_modules
from ..modeling.wrapping import cast_floating
from ..planner.description import UnitDescription
from .timing import Moment, now, seconds_between

ROOT = 0
"""Index of the root's unit."""


class Sections(NamedTuple):
    """The sections of a pass, in forward order."""

    units: list[int]
    seconds: list[list[float]]
    """Of forward and backward of each section."""
    saved_bytes: list[int]
    """Bytes that each section's forward leaves allocated on the device; 0 on the CPU."""


class Stopwatch:
    """Time the sections of a pass while `attached`: one for each call of a unit, and those of the root between them.

    In backward a section begins when the gradient of its output is complete: a hook on that tensor runs just before
    autograd continues.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitDescription],
        device: torch.device,
        compute_dtype: torch.dtype | None,
    ) -> None:
        """Prepare to time a model on a device; its first unit is the root."""
        self._model, self._device, self._compute_dtype = model, device, compute_dtype
        self._modules = segment_modules(modules_by_name(model), units)
        self._inside = self._in_backward = False
        self._marks: list[tuple[int, Moment]] = []
        """Sections, and when they began."""
        self._units: list[int] = []
        """Unit of each section."""
        self._allocated: list[int] = []
        """Allocated bytes where each section's forward begins."""

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

    def measure(self, forward: Callable[[], torch.Tensor]) -> Sections:
        """Run `forward`, which returns the loss, and backward; return the sections in forward order, in which root
        and other units alternate.
        """
        self._units, self._marks, self._allocated, self._in_backward = [], [], [], False
        self._begin(ROOT)
        loss = forward()
        self._in_backward = True
        self._allocated.append(self._allocated_bytes())
        self._mark(len(self._units) - 1)
        loss.backward()
        self._mark(0)
        seconds = [[0.0, 0.0] for _ in self._units]
        for number, ((section, began), (_, ended)) in enumerate(pairwise(self._marks)):
            in_backward = number >= len(self._units)  # forward has one mark per section
            seconds[section][in_backward] += seconds_between(began, ended)
        saved = [after - before for before, after in pairwise(self._allocated)]
        return Sections(self._units, seconds, saved)

    def _timed(self, unit: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> object:
            if self._inside or self._in_backward:
                return original(*args, **kwargs)  # a call inside another, or recomputed in backward
            self._hook((args, kwargs), len(self._units) - 1)
            self._inside = True
            self._begin(unit)
            try:
                args, kwargs = cast_floating((args, kwargs), self._compute_dtype)
                output = original(*args, **kwargs)
                self._hook(output, len(self._units) - 1)
            finally:
                self._inside = False
            self._begin(ROOT)
            return output

        return forward

    def _begin(self, unit: int) -> None:
        self._units.append(unit)
        self._allocated.append(self._allocated_bytes())
        self._mark(len(self._units) - 1)

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _mark(self, section: int) -> None:
        self._marks.append((section, now(self._device)))

    def _hook(self, value: object, section: int) -> None:
        """Begin the section in backward when the gradient of one of these tensors is complete."""

        def enter(_: torch.Tensor) -> None:
            if self._in_backward and section < self._marks[-1][0]:
                self._mark(section)

        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(enter)
