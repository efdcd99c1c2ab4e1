"""A memory snapshot of torch beside the replay of its allocations: whether the model of the allocator holds on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_osdp.planner.allocator.caching import CachingAllocator

_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReplay:
    """Peaks while a snapshot's history was recorded, in bytes above what was reserved when it began."""

    recorded_reserved_bytes: int
    """As the segments' own entries say."""
    replayed_reserved_bytes: int
    """As `CachingAllocator` has it, given the allocations and frees alone."""
    allocated_bytes: int
    """Of what was allocated since; a block that other streams used counts until they were done."""


def replay_snapshot(snapshot: Mapping[str, Any], *, device: int = 0) -> SnapshotReplay:
    """Replay the history in a memory snapshot.

    For a comparison, begin with an empty cache: `torch.cuda.empty_cache()`, then
    `torch.cuda.memory._record_memory_history(max_entries=...)` with room for all entries, then the steps.

    Args:
        snapshot: as `torch.cuda.memory._snapshot()` gives it, or as unpickled from `_dump_snapshot`'s file.
        device: whose history.

    Returns:
        Recorded and replayed peaks.

    Raises:
        ValueError: the snapshot has no history of this device.
    """
    traces = snapshot.get("device_traces") or ()
    if device >= len(traces) or not traces[device]:
        raise ValueError(f"The snapshot has no history of device {device}; record it with torch.cuda.memory._record_memory_history().")
    entries = traces[device]
    allocator = CachingAllocator(expandable_segments=any(entry["action"] == "segment_map" for entry in entries))
    reserved = peak = 0
    known: set[int] = set()
    for entry in entries:
        action, address = entry["action"], entry.get("addr", 0)
        if action in _RESERVES:
            reserved += _RESERVES[action] * entry["size"]
            peak = max(peak, reserved)
        elif action == "alloc":
            known.add(address)
            allocator.allocate(address, entry["size"], entry["stream"])
        elif action == "free_completed" and address in known:
            known.remove(address)
            allocator.free(address)
    return SnapshotReplay(
        recorded_reserved_bytes=peak, replayed_reserved_bytes=allocator.peak_reserved_bytes, allocated_bytes=allocator.peak_allocated_bytes
    )
