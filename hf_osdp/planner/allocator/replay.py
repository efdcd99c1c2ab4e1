"""Allocations and frees of a training step → what the allocator reserves for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .caching import CachingAllocator, DeviceFullError


class Event(NamedTuple):
    """An allocation, or a free of one."""

    key: Hashable
    nbytes: int
    """Bytes that are allocated; negative where they are freed."""
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """What one optimizer step allocates and frees."""

    held: Sequence[Event]
    """What is there before the first step: parameters, buffers."""
    before_optimizer: Sequence[Event]
    states: Sequence[Event]
    """What the optimizer makes in its first step, and holds."""
    optimizer: Sequence[Event]
    traced: bool = True
    """Whether every segment's events were traced; else some allocate once for each of their terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Peaks of a replay, in bytes."""

    peak_allocated_bytes: int
    """Of tensors, as `torch.cuda.max_memory_allocated` counts them."""
    peak_reserved_bytes: int
    """Of what the allocator has taken from the device, as `torch.cuda.max_memory_reserved`."""
    alloc_retries: int = 0
    """Allocations for which the cache has to be emptied first, under the capacity."""
    fits: bool = True
    """Whether the capacity is enough with these retries."""
    traced: bool = True
    """As of `StepEvents`."""


def replay_steps(events: StepEvents, *, expandable_segments: bool = True, capacity_bytes: int | None = None, steps: int = 2) -> Reserved:
    """Replay optimizer steps one after the other: the later ones begin with what the first has left in the cache.

    The optimizer's states come in the first step, into memory that activations and gradients had before.

    Args:
        events: of one step.
        expandable_segments, capacity_bytes: as `CachingAllocator` takes them.
        steps: how many are replayed.

    Returns:
        The peaks of all steps together, as they are without an end of the memory.
    """
    free = _replay(events, CachingAllocator(expandable_segments=expandable_segments), steps)
    if capacity_bytes is None or free.peak_reserved_bytes <= capacity_bytes:
        return free
    limited = _replay(events, CachingAllocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes), steps)
    return replace(free, alloc_retries=limited.alloc_retries, fits=limited.fits)


def _replay(events: StepEvents, allocator: CachingAllocator, steps: int) -> Reserved:
    fits = True
    try:
        _run(allocator, events.held)
        for number in range(steps):
            made = _run(allocator, events.before_optimizer)
            if number == 0:
                _run(allocator, events.states)
            for key in _run(allocator, events.optimizer, made):
                allocator.free(key)
    except DeviceFullError:
        fits = False
    return Reserved(
        peak_allocated_bytes=allocator.peak_allocated_bytes, peak_reserved_bytes=allocator.peak_reserved_bytes,
        alloc_retries=allocator.alloc_retries, fits=fits, traced=events.traced,
    )  # fmt: skip


def _run(allocator: CachingAllocator, events: Sequence[Event], live: set[Hashable] | None = None) -> set[Hashable]:
    """Replay events; what they and those before them have made and not freed."""
    made = set() if live is None else live
    for key, nbytes, stream in events:
        if nbytes < 0:
            if allocator.holds(key):  # what the first step has freed for good is not there in the second
                allocator.free(key)
            made.discard(key)
        else:
            allocator.allocate(key, nbytes, stream)
            made.add(key)
    return made
