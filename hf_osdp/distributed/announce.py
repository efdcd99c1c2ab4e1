"""Collectives that are made of several calls say so, for whoever measures them as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from ..planner.hardware import Collective


class Listener(Protocol):
    """Hears of every collective that begins and ends on this rank."""

    def begins(self, collective: Collective, group: dist.ProcessGroup, nbytes: int) -> None:
        """`nbytes` are those of the whole tensor; on CUDA what is issued from now on belongs to it."""

    def ends(self) -> None:
        """All of it has been issued; on the CPU it is done, unless it returned a work to wait for."""


_listeners: list[Listener] = []
"""Of the whole process: backward runs in threads of autograd's, to which context variables do not go along."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell the listener of collectives inside the context."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def announced(collective: Collective, group: dist.ProcessGroup, whole: torch.Tensor) -> Iterator[None]:
    """Inside the context one collective is issued, of the tensor `whole`."""
    heard = tuple(_listeners)
    for listener in heard:
        listener.begins(collective, group, whole.numel() * whole.element_size())
    try:
        yield
    finally:
        for listener in heard:
            listener.ends()
