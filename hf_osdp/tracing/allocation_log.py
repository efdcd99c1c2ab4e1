"""The order in which tensors' memory comes and goes, for a replay through the device's allocator."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ..planner.allocator.replay import Event


class AllocationLog:
    """Numbers allocations and writes down when each is made and freed.

    Args:
        stream: number of the stream that is current.
    """

    def __init__(self, stream: Callable[[], int] = lambda: 0) -> None:
        self.events: list[Event] = []
        self._stream = stream
        self._numbers: dict[Hashable, int] = {}
        self._made = 0

    @property
    def live(self) -> frozenset[int]:
        """Allocations that are there now."""
        return frozenset(self._numbers.values())

    def number_of(self, storage: Hashable) -> int | None:
        """The allocation that a storage has now; None where it has none."""
        return self._numbers.get(storage)

    def resize(self, storage: Hashable, nbytes: int) -> None:
        """A storage has so many bytes from now on, in new memory."""
        self.drop(storage)
        if nbytes > 0:
            self._numbers[storage] = self._made
            self.events.append(Event(self._made, nbytes, self._stream()))
            self._made += 1

    def drop(self, storage: Hashable) -> None:
        """A storage is gone, or has no memory any more."""
        number = self._numbers.pop(storage, None)
        if number is not None:
            self.events.append(Event(number, -1, 0))
