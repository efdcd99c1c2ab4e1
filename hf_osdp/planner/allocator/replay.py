"""Replay the allocations and frees of a training step: what the allocator reserves for them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .caching import CachingAllocator, DeviceFullError

COMPUTE, COPY_IN, GATHER, REDUCE, REDUCE_REPLICAS = range(5)
"""FSDP2's streams (`FSDPCommContext` in _fsdp_param_group.py): the current one, all-gather copy-in, all-gather, reduce-scatter,
all-reduce."""


class Event(NamedTuple):
    """An allocation, or a free of one."""

    key: Hashable
    nbytes: int
    """Bytes that are allocated; negative where they are freed."""
    stream: int


class EventLog:
    """Events in the order in which they are made; each allocation has a number of its own."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.sizes: list[int] = []
        """Bytes of each allocation, by its number."""

    def make(self, nbytes: int, stream: int = COMPUTE) -> int:
        """Allocate, and return the allocation's number."""
        self._events.append(Event(len(self.sizes), nbytes, stream))
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def drop(self, *numbers: int | None) -> None:
        """Free allocations, those that there are."""
        self._events += [Event(number, -1, COMPUTE) for number in numbers if number is not None]

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        taken, self._events = self._events, []
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Peaks of a replay, in bytes."""

    peak_allocated_bytes: int
    """As `torch.cuda.max_memory_allocated`."""
    peak_reserved_bytes: int
    """As `torch.cuda.max_memory_reserved`."""
    alloc_retries: int = 0
    """Allocations for which the cache has to be emptied first, under the capacity."""
    fits: bool = True
    """Whether the capacity is enough with these retries."""
    traced: bool = True
    """As of `Replay`."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What one optimizer step allocates and frees; steps one after the other through the allocator, and what that takes.

    The optimizer's states come in the first step, into memory that activations and gradients had before. The later steps begin with what
    the first has left in the cache.
    """

    held: Sequence[Event]
    """What is there before the first step: parameters, buffers."""
    before_optimizer: Sequence[Event]
    states: Sequence[Event]
    """What the optimizer makes in its first step, and holds."""
    optimizer: Sequence[Event]
    traced: bool = True
    """Whether every segment's events were traced; else some allocate once for each of their terms."""
    expandable_segments: bool = True
    steps: int = 2

    @cached_property
    def unlimited(self) -> Reserved:
        """Peaks of all steps together without an end of the memory."""
        return self._run(None)

    def within(self, capacity_bytes: int) -> Reserved:
        """Return the peaks without an end of the memory, and whether so many bytes are enough, with how many retries."""
        if self.unlimited.peak_reserved_bytes <= capacity_bytes:
            return self.unlimited
        limited = self._run(capacity_bytes)
        return replace(self.unlimited, alloc_retries=limited.alloc_retries, fits=limited.fits)

    def _run(self, capacity_bytes: int | None) -> Reserved:
        held, fits = {event.key for event in (*self.held, *self.states)}, True
        allocator = CachingAllocator(expandable_segments=self.expandable_segments, capacity_bytes=capacity_bytes)
        try:
            _run(allocator, self.held)
            for number in range(self.steps):
                _run(allocator, (*self.before_optimizer, *(() if number else self.states), *self.optimizer))
                for key in [key for key in allocator.taken if key not in held]:
                    allocator.free(key)
        except DeviceFullError:
            fits = False
        return Reserved(
            peak_allocated_bytes=allocator.peak_allocated_bytes, peak_reserved_bytes=allocator.peak_reserved_bytes,
            alloc_retries=allocator.alloc_retries, fits=fits, traced=self.traced,
        )  # fmt: skip


def _run(allocator: CachingAllocator, events: Iterable[Event]) -> None:
    for key, nbytes, stream in events:
        if nbytes >= 0:
            allocator.allocate(key, nbytes, stream)
        elif key in allocator.taken:  # what the first step has freed for good is not there in the second
            allocator.free(key)
