"""Memory that control groups allow: both versions, nested groups, containers, several ranks of a machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hf_osdp.measurement.machine import measure_hardware
from hf_osdp.measurement.memory_limits import MemoryLimit, memory_limits, rank_share, tightest

GIB = 2**30
V2 = "30 20 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of 64 GiB, half of them free, whose groups are below a folder."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=32 * GIB))

    def make(cgroup: str, mounts: str, groups: dict[str, dict[str, str]]) -> Path:
        files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
        files |= {f"{folder}/{name}": text for folder, group in groups.items() for name, text in group.items()}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def v2_group(limit: str, used: int, *, droppable: int = 0, high: str = "max") -> dict[str, str]:
    stat = f"anon {used - droppable}\ninactive_file {droppable}\n"
    return {"memory.max": limit, "memory.high": high, "memory.current": str(used), "memory.stat": stat}


def told(root: Path) -> list[tuple[str, int, int]]:
    return [(limit.name, limit.total_bytes, limit.free_bytes) for limit in memory_limits(root)]


def test_memory_limits_without_control_groups_are_the_machines(machine):
    assert told(machine("0::/\n", "", {})) == [("this machine", 64 * GIB, 32 * GIB)]
    assert told(machine("", "", {"sys/fs/cgroup": v2_group("max", GIB)}))[1:] == []


def test_version_2_counts_each_group_up_to_the_root_and_high_too(machine):
    root = machine("0::/job.slice/step/task\n", V2.format(root="/"), {
        "sys/fs/cgroup/job.slice/step/task": v2_group("max\n", GIB),
        "sys/fs/cgroup/job.slice/step": v2_group(str(16 * GIB), 6 * GIB, droppable=2 * GIB),
        "sys/fs/cgroup/job.slice": v2_group(str(128 * GIB), 9 * GIB, high=str(20 * GIB)),
    })  # fmt: skip
    assert told(root)[1:] == [
        ("sys/fs/cgroup/job.slice/step/memory.max", 16 * GIB, 12 * GIB), ("sys/fs/cgroup/job.slice/memory.high", 20 * GIB, 11 * GIB),
    ]  # fmt: skip
    least = tightest(memory_limits(root))
    assert (least.name, least.total_bytes, least.free_bytes) == ("sys/fs/cgroup/job.slice/step/memory.max", 16 * GIB, 11 * GIB)


def test_version_1_has_its_own_files_and_no_limit_is_a_large_number(machine):
    folder = "sys/fs/cgroup/memory/docker/abc"
    inside = {"memory.limit_in_bytes": str(8 * GIB), "memory.usage_in_bytes": str(3 * GIB), "memory.stat": f"total_inactive_file {GIB}\n"}
    outside = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "0"}
    root = machine(
        "4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n", V1.format(root="/"), {folder: inside, "sys/fs/cgroup/memory": outside}
    )
    assert told(root)[1:] == [(f"{folder}/memory.limit_in_bytes", 8 * GIB, 6 * GIB)]


@pytest.mark.parametrize(("path", "mounted"), [("/docker/abc", "/docker/abc"), ("/", "/"), ("/docker/abc", "/"), ("/../other", "/")])
def test_a_container_sees_its_own_group_at_the_mount(machine, path, mounted):
    root = machine(f"0::{path}\n", V2.format(root=mounted), {"sys/fs/cgroup": v2_group(str(4 * GIB), GIB)})
    assert told(root)[1:] == [("sys/fs/cgroup/memory.max", 4 * GIB, 3 * GIB)]


def test_memory_limits_leave_out_what_cannot_be_read(machine):
    broken = {"memory.max": "a lot", "memory.high": str(8 * GIB), "memory.current": "-"}
    assert told(machine("0::/x\nnonsense\n", V2.format(root="/"), {"sys/fs/cgroup/x": broken}))[1:] == []


def test_ranks_share_the_groups_that_they_are_in_together():
    machine = MemoryLimit(name="this machine", total_bytes=64 * GIB, free_bytes=64 * GIB)
    job = MemoryLimit(name="job/memory.max", total_bytes=16 * GIB, free_bytes=16 * GIB)
    own = MemoryLimit(name="job/task0/memory.max", total_bytes=6 * GIB, free_bytes=6 * GIB)
    names = ["this machine", job.name]
    assert rank_share([machine, job], [names, names]) == (8 * GIB, "16.0 GiB of job/memory.max less what others hold, among 2 ranks")
    share = rank_share([machine, job, own], [[*names, own.name], [*names, "job/task1/memory.max"]])
    assert share == (6 * GIB, "6.0 GiB of job/task0/memory.max less what others hold")


def test_share_is_equal_for_small_changes_of_use():
    shares = {
        MemoryLimit(name="", total_bytes=16 * GIB, free_bytes=free).share_bytes(2)
        for free in (12 * GIB + 1, 12 * GIB + 2**28, 13 * GIB - 1)
    }
    assert shares == {6 * GIB}
    assert MemoryLimit(name="", total_bytes=16 * GIB, free_bytes=0).share_bytes(2) == GIB // 2


def test_measure_hardware_on_the_cpu_has_what_control_groups_allow(monkeypatch):
    small = MemoryLimit(name="job/memory.max", total_bytes=2 * GIB, free_bytes=2 * GIB)
    monkeypatch.setattr("hf_osdp.measurement.rates.memory_limits", lambda: (small,))
    device = measure_hardware(device_type="cpu", seconds=0.05).device
    assert device.memory_bytes == 2 * GIB
    assert device.source == "measured; memory: 2.0 GiB of job/memory.max less what others hold"
