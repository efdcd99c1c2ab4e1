"""Each rule of torch's CUDA caching allocator, one by one (c10/cuda/CUDACachingAllocator.cpp)."""

from __future__ import annotations

import random

import pytest

from benchmarks.gpu_suite.snapshot_replay import replay_snapshot
from hf_osdp.planner.allocator.caching import CachingAllocator, DeviceFullError

MiB = 2**20


def fixed(**options):
    return CachingAllocator(expandable_segments=False, **options)


@pytest.mark.parametrize(("nbytes", "held"), [(1, 512), (512, 512), (513, 1024), (0, 0)])
def test_sizes_are_rounded_up_to_512_bytes(nbytes, held):
    allocator = fixed()
    allocator.allocate("a", nbytes)
    assert allocator.allocated_bytes == held
    allocator.free("a")
    assert (allocator.allocated_bytes, allocator.peak_allocated_bytes) == (0, held)


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MiB), (MiB, 2 * MiB), (MiB + 1, 20 * MiB), (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB), (10 * MiB + 1, 12 * MiB), (33 * MiB, 34 * MiB),
    ],
)  # fmt: skip
def test_segments_are_2_mib_20_mib_or_a_multiple_of_2_mib(nbytes, segment):
    allocator = fixed()
    allocator.allocate("a", nbytes)
    assert allocator.reserved_bytes == segment


def test_small_and_large_pools_share_nothing():
    allocator = fixed()
    allocator.allocate("large", 30 * MiB)
    allocator.free("large")
    allocator.allocate("small", MiB)
    assert allocator.reserved_bytes == 32 * MiB


def test_freed_memory_serves_its_own_stream_alone():
    allocator = fixed()
    allocator.allocate("a", 30 * MiB, stream=1)
    allocator.free("a")
    allocator.allocate("b", 30 * MiB, stream=2)
    assert allocator.reserved_bytes == 60 * MiB
    allocator.allocate("c", 30 * MiB, stream=1)
    assert allocator.reserved_bytes == 60 * MiB


def test_smallest_block_that_fits_is_taken():
    allocator = fixed()
    for key, size in (("big", 40), ("small", 24)):
        allocator.allocate(key, size * MiB)
    allocator.free("big"), allocator.free("small")
    allocator.allocate("a", 24 * MiB)  # of the 24, so that 40 are still free
    allocator.allocate("b", 40 * MiB)
    assert allocator.reserved_bytes == 64 * MiB


def test_large_block_is_split_when_more_than_1_mib_remains():
    allocator = fixed()
    allocator.allocate("a", 20 * MiB)
    allocator.free("a")
    allocator.allocate("b", 19 * MiB)  # exactly 1 MiB more: taken whole
    assert allocator.allocated_bytes == 20 * MiB
    allocator.free("b")
    allocator.allocate("c", 19 * MiB - 512)
    assert allocator.allocated_bytes == 19 * MiB - 512


def test_small_block_is_split_down_to_512_bytes():
    allocator = fixed()
    for key, nbytes in (("a", MiB), ("b", MiB - 512), ("c", 512)):
        allocator.allocate(key, nbytes)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 2 * MiB


def test_free_neighbours_in_a_segment_become_one():
    allocator = fixed()
    for key in "abc":
        allocator.allocate(key, 6 * MiB)
    for key in "acb":
        allocator.free(key)
    allocator.allocate("all", 20 * MiB)
    assert allocator.reserved_bytes == 20 * MiB


def test_whole_free_segments_are_released_when_the_device_is_full():
    allocator = fixed(capacity_bytes=64 * MiB)
    for key in "ab":
        allocator.allocate(key, 30 * MiB)
    allocator.free("a")
    allocator.allocate("c", 32 * MiB)
    assert (allocator.alloc_retries, allocator.reserved_bytes, allocator.peak_reserved_bytes) == (1, 62 * MiB, 60 * MiB + 2 * MiB)


def test_segment_that_is_partly_taken_is_not_released():
    allocator = fixed(capacity_bytes=60 * MiB)
    for key in "ab":
        allocator.allocate(key, 20 * MiB)
    allocator.free("a")
    allocator.allocate("c", 4 * MiB)
    with pytest.raises(DeviceFullError, match="do not fit"):
        allocator.allocate("d", 30 * MiB)


def test_expandable_segment_grows_by_pages_of_20_mib_or_2_mib():
    allocator = CachingAllocator()
    allocator.allocate("a", 5 * MiB)
    allocator.allocate("b", 17 * MiB)
    assert allocator.reserved_bytes == 40 * MiB
    allocator.allocate("c", 18 * MiB)  # all of the two pages
    assert allocator.reserved_bytes == allocator.allocated_bytes == 40 * MiB
    allocator.allocate("d", 100)
    assert allocator.reserved_bytes == 42 * MiB


def test_expandable_segment_grows_onto_the_free_block_at_its_end():
    allocator = CachingAllocator()
    allocator.allocate("a", 30 * MiB)  # 10 of 40 MiB are free
    allocator.allocate("b", 50 * MiB)
    assert allocator.reserved_bytes == 80 * MiB


def test_no_slivers_remain_where_segments_expand():
    """A fixed segment of 33 MiB that is free cannot serve 34; an expandable one becomes larger."""
    peaks = []
    for expandable in (False, True):
        allocator = CachingAllocator(expandable_segments=expandable)
        for size in range(32, 64, 4):
            allocator.allocate(size, size * MiB)
            allocator.free(size)
        peaks.append(allocator.peak_reserved_bytes)
    assert peaks == [sum(range(32, 64, 4)) * MiB, 60 * MiB]


def test_expandable_block_is_split_down_to_512_bytes():
    allocator = CachingAllocator()
    allocator.allocate("a", 20 * MiB)
    allocator.free("a")
    allocator.allocate("b", 20 * MiB - 512)
    assert allocator.allocated_bytes == 20 * MiB - 512


def test_block_at_the_end_of_an_expandable_segment_is_taken_last():
    """For best fit it counts as large as it could become."""
    allocator = CachingAllocator()
    for key, size in (("a", 18), ("b", 2), ("c", 4)):
        allocator.allocate(key, size * MiB)  # 16 MiB are free at the end
    allocator.free("a")
    allocator.allocate("d", 10 * MiB)
    allocator.allocate("e", 16 * MiB)  # there is room at the end, for "d" took of the 18
    assert allocator.reserved_bytes == 40 * MiB


def test_empty_pages_are_unmapped_when_the_device_is_full():
    allocator = CachingAllocator(capacity_bytes=100 * MiB)
    allocator.allocate("a", 70 * MiB, stream=1)
    allocator.allocate("b", MiB + 512, stream=1)
    allocator.free("a")
    allocator.allocate("c", 60 * MiB, stream=2)
    assert (allocator.alloc_retries, allocator.reserved_bytes) == (1, 20 * MiB + 60 * MiB)
    allocator.allocate("d", 20 * MiB, stream=1)  # its pages lie at the lowest address, where there are none now
    assert allocator.reserved_bytes == 100 * MiB


def test_freed_key_is_unknown():
    with pytest.raises(KeyError):
        fixed().free("a")


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_tile_their_segments_whatever_comes_and_goes(expandable):
    """All that is reserved is free or taken, and the free lists hold each free block once."""
    chance, allocator, live = random.Random(5), CachingAllocator(expandable_segments=expandable, capacity_bytes=400 * MiB), []
    for number in range(4000):
        if live and chance.random() < 0.5:
            allocator.free(live.pop(chance.randrange(len(live))))
        else:
            try:
                allocator.allocate(number, int(2 ** chance.uniform(5, 26)), chance.randrange(3))
                live.append(number)
            except DeviceFullError:
                pass
        free = sum(size for pool in allocator._pools.values() for size, _, _ in pool.blocks)
        assert free + allocator.allocated_bytes == allocator.reserved_bytes <= 400 * MiB
    assert allocator.alloc_retries
    for key in live:
        allocator.free(key)
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0


def entry(action, addr, size, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream, "device": 0, "frames": [], "time_us": 0}


def test_snapshot_history_replays_to_what_its_segments_say():
    history = [
        entry("segment_alloc", 0x1000000, 20 * MiB), entry("alloc", 0x1000000, 6 * MiB),
        entry("alloc", 0x1600000, 9 * MiB),
        entry("free_requested", 0x1000000, 6 * MiB), entry("free_completed", 0x1000000, 6 * MiB),
        entry("segment_alloc", 0x9000000, 2 * MiB), entry("alloc", 0x9000000, 700),
        entry("alloc", 0x1000000, 5 * MiB),
        entry("segment_alloc", 0x5000000, 20 * MiB, stream=7), entry("alloc", 0x5000000, 6 * MiB, stream=7),
        entry("free_requested", 0x77, 100), entry("free_completed", 0x77, 100),  # from before the recording
    ]  # fmt: skip
    replay = replay_snapshot({"segments": [], "device_traces": [history]})
    assert replay.recorded_reserved_bytes == replay.replayed_reserved_bytes == 42 * MiB
    assert replay.allocated_bytes == 20 * MiB + 1024


def test_snapshot_of_expandable_segments_is_replayed_as_such():
    history = [
        entry("segment_map", 0x1000000, 20 * MiB), entry("alloc", 0x1000000, 18 * MiB),
        entry("segment_map", 0x2400000, 20 * MiB), entry("alloc", 0x2200000, 20 * MiB),
        entry("free_requested", 0x1000000, 18 * MiB), entry("free_completed", 0x1000000, 18 * MiB),
        entry("segment_unmap", 0x1000000, 0),
    ]  # fmt: skip
    replay = replay_snapshot({"device_traces": [history]})
    assert (replay.recorded_reserved_bytes, replay.replayed_reserved_bytes, replay.allocated_bytes) == (40 * MiB, 40 * MiB, 38 * MiB)


@pytest.mark.parametrize("snapshot", [{}, {"device_traces": []}, {"device_traces": [[]]}])
def test_snapshot_without_history_is_refused(snapshot):
    with pytest.raises(ValueError, match="_record_memory_history"):
        replay_snapshot(snapshot)
