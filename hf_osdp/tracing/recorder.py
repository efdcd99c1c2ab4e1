"""Attributes what operators allocate and compute to stretches of the forward pass, in forward and in backward.

A stretch is one call of a unit's module, or what the root does between two such calls. In backward an operator belongs
to the stretch in which autograd made the node that runs: its sequence number says which.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode

from ..planner.allocator.replay import Event
from .live_bytes import LiveBytes
from .operators import call_operator, operator_cost


@dataclass(slots=True, kw_only=True)
class PhaseRecord:
    """One stretch's forward or backward, in bytes and FLOPs."""

    levels: list[int] = field(default_factory=list)
    """Live bytes when the phase began and after each of its operators."""
    matmul_flops: int = 0
    traffic_bytes: int = 0
    operators: int = 0
    events: list[Event] = field(default_factory=list)
    """What was allocated and freed, gradients of parameters not freed."""


@dataclass(slots=True, kw_only=True)
class Stretch:
    """What was seen of one stretch; live bytes are levels of the whole trace."""

    unit: int
    first_node: int
    """Autograd's sequence number when it began."""
    copy_of: Stretch | None = None
    """The equal stretch that was traced in this one's place."""
    start_bytes: int = 0
    end_bytes: int = 0
    sent_bytes: int = 0
    """What was sent to the host, to wait there for backward."""
    gradients: list[str] = field(default_factory=list)
    """Names of parameters of which its backward made the gradients, as far as they were given."""
    gradient_allocations: list[int] = field(default_factory=list)
    """Those of its allocations that are gradients of parameters, in the parameters' order."""
    handed_back_bytes: int = 0
    """Live bytes above `start_bytes` when its backward was done: the gradient of its input, less an input freed with it."""
    release: Callable[[], None] | None = None
    """Drops what its modules have stored in themselves."""
    kept_bytes: int = 0
    """What that freed when backward was done: live until the next step, with all that autograd holds for it."""
    forward: PhaseRecord = field(default_factory=PhaseRecord)
    backward: PhaseRecord = field(default_factory=PhaseRecord)


class Recorder(TorchDispatchMode):
    """Splits a forward and backward pass into stretches.

    Enter it inside the `LiveBytes` that it reads. Call `enter` and `leave` around each unit's module, `begin_backward`
    between the passes and `finish` after them.

    Args:
        live: counts the bytes, and writes them down.
        root_unit: index of the unit that owns what runs outside any module that was entered.
    """

    def __init__(self, live: LiveBytes, root_unit: int = 0) -> None:
        super().__init__()
        assert live.log is not None
        self._log = live.log
        self._read = 0
        self.stretches: list[Stretch] = []
        self.inside = False
        """Whether a unit's module is running."""
        self._live = live
        self._root_unit = root_unit
        self._pending: Stretch | None = Stretch(unit=root_unit, first_node=_get_sequence_nr())
        self._current: Stretch | None = None
        self._in_backward = False
        self._graded: dict[nn.Parameter, int] = {}
        self._first_nodes: list[int] = []

    def enter(self, unit: int, copy_of: Stretch | None = None) -> Stretch:
        """A unit's module starts; returns its stretch."""
        self.inside = True
        self._pending = Stretch(unit=unit, first_node=_get_sequence_nr(), copy_of=copy_of)
        return self._pending

    def leave(self) -> None:
        """The module has returned: what follows is the root's."""
        self.inside = False
        self._pending = Stretch(unit=self._root_unit, first_node=_get_sequence_nr())

    def begin_backward(self) -> None:
        """Forward is over, and everything that does not outlive it has been released."""
        self._close_forward()
        self._in_backward = True
        self._first_nodes = [stretch.first_node for stretch in self.stretches]
        self._end_node = _get_sequence_nr()
        self._current = self.stretches[-1]
        self._current.backward.levels.append(self._live.current_bytes)

    def finish(self) -> None:
        """Backward is over."""
        self._close_backward()

    def note_gradient(self, parameter: nn.Parameter, name: str | None = None, place: int = 0) -> None:
        """For `register_post_accumulate_grad_hook`: the gradient is dropped when the stretch's backward ends. `place` is the
        parameter's among all."""
        self._graded[parameter] = place
        if name is not None:
            self._current.gradients.append(name)

    def count_flops(self, flops: int) -> None:
        """Add FLOPs that no operator shows."""
        if self._pending is not None and not self._in_backward:
            self._open()
        self._phase().matmul_flops += flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_backward:
            self._follow_backward()
        elif self._pending is not None:
            self._open()
        kwargs = kwargs or {}
        result = call_operator(func, args, kwargs)
        cost, phase = operator_cost(func, args, kwargs, result), self._phase()
        phase.matmul_flops += cost.matmul_flops
        phase.traffic_bytes += cost.traffic_bytes
        phase.operators += 1
        phase.levels.append(self._live.current_bytes)
        return result

    def _phase(self) -> PhaseRecord:
        assert self._current is not None
        return self._current.backward if self._in_backward else self._current.forward

    def _open(self) -> None:
        """The pending stretch runs its first operator: until now, frees belonged to the one before."""
        self._close_forward()
        self._current, self._pending = self._pending, None
        self._current.start_bytes = self._live.current_bytes
        self._current.forward.levels.append(self._live.current_bytes)
        self.stretches.append(self._current)

    def _close_forward(self) -> None:
        if self._current is not None:
            self._current.end_bytes = self._live.current_bytes
            self._current.forward.events += self._new_events()

    def _new_events(self) -> list[Event]:
        began, self._read = self._read, len(self._log.events)
        return self._log.events[began:]

    def _follow_backward(self) -> None:
        """Switch to the stretch whose autograd node runs; gradient accumulation and recomputation stay where they are."""
        node = torch._C._current_autograd_node()
        number = self._end_node if node is None else node._sequence_nr()
        if number >= self._end_node:
            return
        stretch = self.stretches[max(0, bisect_right(self._first_nodes, number) - 1)]
        if stretch is not self._current:
            self._close_backward()
            self._current = stretch
            stretch.backward.levels.append(self._live.current_bytes)

    def _close_backward(self) -> None:
        stretch = self._current
        stretch.backward.events += self._new_events()
        for parameter in sorted(self._graded, key=self._graded.__getitem__):
            number = None if parameter.grad is None else self._log.number_of(parameter.grad.untyped_storage()._cdata)
            stretch.gradient_allocations += [] if number is None else [number]
            parameter.grad = None
        self._graded.clear()
        self._new_events()
        if stretch.release is not None:
            before = self._live.current_bytes
            stretch.release()
            stretch.kept_bytes += before - self._live.current_bytes
            stretch.backward.events += self._new_events()
        stretch.handed_back_bytes = max(0, self._live.current_bytes - stretch.start_bytes)
