"""Events as a walk through a step makes them."""

from __future__ import annotations

from collections.abc import Iterable

from .replay import Event

COMPUTE, COPY_IN, GATHER, REDUCE, REDUCE_REPLICAS = range(5)
"""FSDP2's streams (`FSDPCommContext` in _fsdp_param_group.py): the current one, all-gather copy-in, all-gather, reduce-scatter,
all-reduce."""


class EventLog:
    """Allocations, each with a number of its own."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._sizes: list[int] = [0]

    def make(self, nbytes: int, stream: int = COMPUTE) -> int:
        """Allocate; returns the allocation's number."""
        number = len(self._sizes)
        self._sizes.append(nbytes)
        self._events.append(Event(number, nbytes, stream))
        return number

    def bytes_of(self, number: int) -> int:
        """Size of an allocation."""
        return self._sizes[number]

    def drop(self, number: int | None) -> None:
        """Free an allocation, if there is one."""
        if number is not None:
            self._events.append(Event(number, -1, COMPUTE))

    def drop_all(self, numbers: Iterable[int]) -> None:
        """Free several."""
        for number in numbers:
            self.drop(number)

    def take(self) -> list[Event]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken
