"""Each rule of torch's CUDA caching allocator, one by one (c10/cuda/CUDACachingAllocator.cpp)."""

from __future__ import annotations

import random

import pytest

from benchmarks.gpu_suite.snapshot_replay import replay_snapshot
from hf_osdp.planner.allocator.caching import CachingAllocator, DeviceFullError

MiB = 2**20


def replayed(*steps: str | tuple, expandable: bool = False, capacity: int | None = None) -> CachingAllocator:
    """Allocate for each key with bytes, and perhaps a stream; free each key that stands alone."""
    allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=capacity)
    for step in steps:
        allocator.free(step) if isinstance(step, str) else allocator.allocate(*step)
    return allocator


def reserved(steps: list, nbytes: int, **options) -> tuple:
    return steps, options, {"reserved_bytes": nbytes}


def allocated(steps: list, nbytes: int, **options) -> tuple:
    return steps, options, {"allocated_bytes": nbytes}


EXPANDABLE = {"expandable": True}
PAGES = [("a", 5 * MiB), ("b", 17 * MiB)]
END = [("a", 18 * MiB), ("b", 2 * MiB), ("c", 4 * MiB), "a", ("d", 10 * MiB), ("e", 16 * MiB)]
UNMAPPED = [("a", 70 * MiB, 1), ("b", MiB + 512, 1), "a", ("c", 60 * MiB, 2)]
RULES = {
    **{f"{size} bytes are rounded up to 512": allocated([("a", size)], held) for size, held in ((1, 512), (512, 512), (513, 1024), (0, 0))},
    "what is freed is allocated no more": ([("a", 513), "a"], {}, {"allocated_bytes": 0, "peak_allocated_bytes": 1024}),
    **{f"small segment for {size}": reserved([("a", size)], 2 * MiB) for size in (1, MiB)},
    **{f"segment of 20 MiB for {size}": reserved([("a", size)], 20 * MiB) for size in (MiB + 1, 10 * MiB - 512)},
    "segment of its own from 10 MiB": reserved([("a", 10 * MiB)], 10 * MiB),
    "in multiples of 2 MiB": reserved([("a", 10 * MiB + 1)], 12 * MiB),
    "small and large pools share nothing": reserved([("a", 30 * MiB), "a", ("b", MiB)], 32 * MiB),
    "freed memory serves its own stream alone": reserved([("a", 30 * MiB, 1), "a", ("b", 30 * MiB, 2), ("c", 30 * MiB, 1)], 60 * MiB),
    # the 24 for the 24, so that 40 are still free
    "smallest block that fits": reserved(
        [("big", 40 * MiB), ("small", 24 * MiB), "big", "small", ("a", 24 * MiB), ("b", 40 * MiB)], 64 * MiB
    ),
    "large block with 1 MiB more is taken whole": allocated([("a", 20 * MiB), "a", ("b", 19 * MiB)], 20 * MiB),
    "large block with more than that is split": allocated([("a", 20 * MiB), "a", ("b", 19 * MiB - 512)], 19 * MiB - 512),
    "small block is split down to 512 bytes": reserved([("a", MiB), ("b", MiB - 512), ("c", 512)], 2 * MiB),
    "free neighbours become one": reserved([("a", 6 * MiB), ("b", 6 * MiB), ("c", 6 * MiB), "a", "c", "b", ("all", 20 * MiB)], 20 * MiB),
    "whole free segments are released when the device is full": (
        [("a", 30 * MiB), ("b", 30 * MiB), "a", ("c", 32 * MiB)], {"capacity": 64 * MiB},
        {"alloc_retries": 1, "reserved_bytes": 62 * MiB, "peak_reserved_bytes": 62 * MiB},
    ),
    "expandable segment grows by pages": reserved(PAGES, 40 * MiB, **EXPANDABLE),
    "until they are full": reserved([*PAGES, ("c", 18 * MiB)], 40 * MiB, **EXPANDABLE),
    "small pages are of 2 MiB": reserved([*PAGES, ("d", 100)], 42 * MiB, **EXPANDABLE),
    "it grows onto the free block at its end": reserved([("a", 30 * MiB), ("b", 50 * MiB)], 80 * MiB, **EXPANDABLE),
    "expandable block is split down to 512 bytes": allocated([("a", 20 * MiB), "a", ("b", 20 * MiB - 512)], 20 * MiB - 512, **EXPANDABLE),
    # for best fit the block at the end counts as large as it could become: "d" takes of the 18, and there is room at the end
    "block at the end is taken last": reserved(END, 40 * MiB, **EXPANDABLE),
    "empty pages are unmapped when the device is full": (
        UNMAPPED, {"expandable": True, "capacity": 100 * MiB}, {"alloc_retries": 1, "reserved_bytes": 80 * MiB},
    ),
    # its pages lie at the lowest address, where there are none now
    "and mapped again": reserved([*UNMAPPED, ("d", 20 * MiB, 1)], 100 * MiB, expandable=True, capacity=100 * MiB),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "options", "wanted"), RULES.values(), ids=RULES)
def test_allocator_keeps_each_rule_of_torchs(steps, options, wanted):
    allocator = replayed(*steps, **options)
    assert {name: getattr(allocator, name) for name in wanted} == wanted


def test_partly_taken_segments_are_not_released_and_unknown_keys_not_freed():
    with pytest.raises(DeviceFullError, match="do not fit"):
        replayed(("a", 20 * MiB), ("b", 20 * MiB), "a", ("c", 4 * MiB), ("d", 30 * MiB), capacity=60 * MiB)
    with pytest.raises(DeviceFullError, match="do not fit"):  # more than any device has, as a damaged file may say
        replayed(("a", 10**18), expandable=True)
    with pytest.raises(KeyError):
        replayed("a")


def test_no_slivers_remain_where_segments_expand():
    """A fixed segment of 33 MiB that is free cannot serve 34; an expandable one becomes larger."""
    steps = [step for size in range(32, 64, 4) for step in ((f"{size}", size * MiB), f"{size}")]
    peaks = [replayed(*steps, expandable=expandable).peak_reserved_bytes for expandable in (False, True)]
    assert peaks == [sum(range(32, 64, 4)) * MiB, 60 * MiB]


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
