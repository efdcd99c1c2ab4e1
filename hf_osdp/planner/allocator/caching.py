"""A model of torch's caching allocator for CUDA: what it reserves of the device when tensors come and go.

The rules are those of `DeviceCachingAllocator` (c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13); docs/allocator.md lists them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Hashable

from ...errors import OSDPError

MIN_BLOCK_BYTES = 512
"""All sizes are rounded up to a multiple of this (`kMinBlockSize`, c10/core/AllocatorConfig.h)."""
SMALL_BYTES = 2**20
"""Largest allocation of the small pool (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * 2**20
"""Segments and pages of the small pool (`kSmallBuffer`)."""
LARGE_SEGMENT_BYTES = 20 * 2**20
"""Segments of the large pool for requests below `LARGE_BYTES`, and its pages (`large_segment_size_`)."""
LARGE_BYTES = 10 * 2**20
"""Requests from here on get a segment of their own (`kMinLargeAlloc`), in multiples of `LARGE_ROUND_BYTES` (`kRoundLarge`)."""
LARGE_ROUND_BYTES = 2 * 2**20

_SEGMENT_SPACE = 2**22 * LARGE_SEGMENT_BYTES
"""Addresses of one segment: whole pages, and more than any device has memory, so that an expandable segment never ends."""


class DeviceFullError(OSDPError):
    """The replayed allocator has no room for an allocation, though it has released all that was free."""


class _Block:
    """A stretch of a segment: taken, free, or with no memory behind its addresses."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: _Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped, self.free = pool, address, size, mapped, True
        self.prev: _Block | None = None
        self.next: _Block | None = None

    def split(self, size: int, *, mapped: bool = True) -> _Block:
        """Shorten to `size` bytes, and return the rest as a free block behind."""
        rest = _Block(self.pool, self.address + size, self.size - size, mapped=mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def room(self) -> int:
        """Return the size that it could be expanded to."""
        return self.size + (self.next.size if self.next is not None and not self.next.mapped else 0)


class _Pool:
    """Free blocks of one stream, small or large."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.blocks: list[tuple[int, int, _Block]] = []
        """Free blocks by size, then address."""
        self.unmapped: list[tuple[int, int, _Block]] = []
        """Stretches of expandable segments without memory, by address."""

    def add(self, block: _Block) -> None:
        if block.mapped:
            insort(self.blocks, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, 0, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.blocks[bisect_left(self.blocks, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address, 0))]


class CachingAllocator:
    """Replay allocations and frees by the allocator's rules.

    Args:
        expandable_segments: as the allocator's setting of this name; torch's own default is off.
        capacity_bytes: what may be reserved; None for no end.

    Attributes:
        allocated_bytes, reserved_bytes: what tensors hold now, and what the device has given.
        peak_allocated_bytes, peak_reserved_bytes: the most of each since the start.
        alloc_retries: allocations that had to release what was cached first.
    """

    def __init__(self, *, expandable_segments: bool = True, capacity_bytes: int | None = None) -> None:
        self.expandable_segments, self.capacity_bytes = expandable_segments, capacity_bytes
        self.allocated_bytes = self.reserved_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = self.alloc_retries = 0
        self.taken: dict[Hashable, _Block | None] = {}
        """By key; None where a tensor has no bytes."""
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._addresses = itertools.count(_SEGMENT_SPACE, _SEGMENT_SPACE)

    def allocate(self, key: Hashable, nbytes: int, stream: int = 0) -> None:
        """Take memory for a tensor, to be freed by its key, on the stream of this number; a tensor of no bytes takes none.

        Raises:
            DeviceFullError: `capacity_bytes` are not enough.
        """
        if nbytes <= 0:
            self.taken[key] = None
            return
        size = -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        small = size <= SMALL_BYTES
        pool = self._pools.get((small, stream)) or self._pools.setdefault((small, stream), _Pool(small=small))
        block = self._best_fit(pool, size) or self._new(pool, size)
        if block is None:
            self.alloc_retries += 1
            self.empty_cache()
            block = self._new(pool, size)
        if block is None:
            raise DeviceFullError(f"{size} bytes do not fit: {self.reserved_bytes} of {self.capacity_bytes} are reserved.")
        rest = block.size - size
        if rest >= MIN_BLOCK_BYTES if small or self.expandable_segments else rest > SMALL_BYTES:
            pool.add(block.split(size))
        block.free = False
        self.taken[key] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes

    def free(self, key: Hashable) -> None:
        """Give a tensor's memory back to the pool: FSDP2 holds references instead of recording streams, so that none waits for another.

        Raises:
            KeyError: nothing is allocated under this key.
        """
        block = self.taken.pop(key)
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.free = True
        _release(block)

    def empty_cache(self) -> None:
        """Return to the device all that is free as a whole: segments, or pages of expandable ones."""
        for pool in self._pools.values():
            for _, _, block in tuple(pool.blocks):
                if self.expandable_segments:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """Take the smallest free block that is large enough; one that can be expanded counts as large as it can become."""
        blocks = pool.blocks
        at = bisect_left(blocks, (size,))
        if at == len(blocks):
            return None
        while self.expandable_segments and at + 1 < len(blocks) and blocks[at + 1][2].room() < blocks[at][2].room():
            at += 1
        return blocks.pop(at)[2]

    def _new(self, pool: _Pool, size: int) -> _Block | None:
        """Take a block of memory from the device; None where it has no more."""
        if self.expandable_segments:
            return self._expanded(pool, size)
        nbytes = pool.page_bytes if pool.small or size < LARGE_BYTES else _rounded(size, LARGE_ROUND_BYTES)
        return _Block(pool, next(self._addresses), nbytes) if self._reserve(nbytes) else None

    def _reserve(self, nbytes: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _expanded(self, pool: _Pool, size: int) -> _Block | None:
        """Take the lowest address where free and unmapped blocks side by side have room; the unmapped ones get memory."""
        if size > _SEGMENT_SPACE:  # as a plan file may say
            return None
        block = _with_room(pool, size)
        if block is None:
            block = _Block(pool, next(self._addresses), _SEGMENT_SPACE, mapped=False)
            pool.add(block)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None, "`_with_room` has found room behind it"
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        pool.remove(block)
        return block

    def _map(self, block: _Block, nbytes: int) -> bool:
        """Put whole pages behind the start of an unmapped block; it becomes free and joins its free neighbours."""
        pool = block.pool
        nbytes = _rounded(nbytes, pool.page_bytes)
        if not self._reserve(nbytes):
            return False
        pool.remove(block)
        block.mapped = True
        if nbytes < block.size:
            pool.add(block.split(nbytes, mapped=False))
        _release(block)
        return True

    def _unmap(self, block: _Block) -> None:
        """Take the pages that lie wholly inside a free block from it."""
        pool = block.pool
        start = _rounded(block.address, pool.page_bytes)
        end = (block.address + block.size) // pool.page_bytes * pool.page_bytes
        if start >= end:
            return
        pool.remove(block)
        if end < block.address + block.size:
            pool.add(block.split(end - block.address))
        if start > block.address:
            head, block = block, block.split(start - block.address)
            pool.add(head)
        block.mapped = False
        _release(block)
        self.reserved_bytes -= end - start


def _release(block: _Block) -> None:
    """Put a block into its pool, joined with free neighbours in the segment of the same kind, mapped or not."""
    pool, before, after = block.pool, block.prev, block.next
    if before is not None and before.free and before.mapped is block.mapped:
        pool.remove(before)
        block.address, block.size, block.prev = before.address, block.size + before.size, before.prev
        if before.prev is not None:
            before.prev.next = block
    if after is not None and after.free and after.mapped is block.mapped:
        pool.remove(after)
        block.size, block.next = block.size + after.size, after.next
        if after.next is not None:
            after.next.prev = block
    pool.add(block)


def _with_room(pool: _Pool, size: int) -> _Block | None:
    for _, _, unmapped in pool.unmapped:
        before = unmapped.prev
        first = before if before is not None and before.free else unmapped
        room = 0
        block: _Block | None = first
        while block is not None and block.free and room < size:
            room += block.size
            block = block.next
        if room >= size:
            return first
    return None


def _rounded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
