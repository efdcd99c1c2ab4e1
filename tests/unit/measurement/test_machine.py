"""Measurements of this machine: plausible alone, equal on all ranks; memory that control groups allow."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hf_osdp.measurement import rates
from hf_osdp.measurement.machine import measure_profile
from hf_osdp.measurement.memory_limits import MemoryLimit, memory_limits, rank_share, tightest
from hf_osdp.planner.description import DType
from hf_osdp.planner.hardware import Backend

CPU = torch.device("cpu")


def test_measure_profile_alone_is_plausible_and_leaves_the_random_state():
    state = torch.get_rng_state()
    profile = measure_profile(device_type="cpu", seconds=0.2)
    hardware = profile.hardware
    assert "torch" in profile.versions and profile.date
    assert (hardware.world_size, hardware.backend, hardware.timings, hardware.host) == (1, Backend.GLOO, (), None)
    assert (hardware.fsdp_overhead, profile.segments) == (None, ())
    assert hardware.device.name.startswith("cpu (")
    assert 1e8 < hardware.device.rate(DType.FLOAT32) < 1e14
    assert 1e8 < hardware.device.memory_bytes_per_s < 1e13
    assert 2**20 < hardware.device.memory_bytes < 2**50
    assert 1e8 < rates.update_rate(CPU, 0.02, elements=2**16) < 1e13
    assert torch.equal(torch.get_rng_state(), state)


GIB = 2**30
TOP = "sys/fs/cgroup"
V1 = f"{TOP}/memory/docker/abc"


def v2_group(limit: str, used: int, *, droppable: int = 0, high: str = "max") -> dict[str, str]:
    stat = f"anon {used - droppable}\ninactive_file {droppable}\n"
    return {"memory.max": limit, "memory.high": high, "memory.current": str(used), "memory.stat": stat}


def v1_group(limit: int, used: int, droppable: int) -> dict[str, str]:
    stat = f"total_inactive_file {droppable}\n"
    return {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used), "memory.stat": stat}


NESTED = {
    f"{TOP}/job.slice/step/task": v2_group("max\n", GIB),
    f"{TOP}/job.slice/step": v2_group(str(16 * GIB), 6 * GIB, droppable=2 * GIB),
    f"{TOP}/job.slice": v2_group(str(128 * GIB), 9 * GIB, high=str(20 * GIB)),
}
STEP = (f"{TOP}/job.slice/step/memory.max", 16 * GIB, 12 * GIB)
SLICE = (f"{TOP}/job.slice/memory.high", 20 * GIB, 11 * GIB)
CONTAINER = {TOP: v2_group(str(4 * GIB), GIB)}
MOUNT = (f"{TOP}/memory.max", 4 * GIB, 3 * GIB)
V1_LINES = "4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n"
V1_GROUPS = {V1: v1_group(8 * GIB, 3 * GIB, GIB), f"{TOP}/memory": v1_group(2**63 - 4096, 0, 0)}
BROKEN = {f"{TOP}/x": {"memory.max": "a lot", "memory.high": str(8 * GIB), "memory.current": "-"}}
V1_LIMIT = (f"{V1}/memory.limit_in_bytes", 8 * GIB, 6 * GIB)
FOUND = {
    "none": ("0::/\n", {}, []),
    "no path": ("", {TOP: v2_group("max", GIB)}, []),
    "version 2: each up to the root, and high too": ("0::/job.slice/step/task\n", NESTED, [STEP, SLICE]),
    "version 1: none is a large number": (V1_LINES, V1_GROUPS, [V1_LIMIT]),
    "a container that sees its group as the mount": ("0::/docker/abc\n", CONTAINER, [MOUNT]),
    "a container that sees the end of the path": ("0::/pod/job.slice/step\n", NESTED, [STEP, SLICE]),
    "a path beside the mount": ("0::/../job.slice\n", {**CONTAINER, **NESTED}, [MOUNT]),
    "not readable": ("0::/x\nnonsense\n", BROKEN, []),
}


@pytest.mark.parametrize(("cgroup", "groups", "limits"), FOUND.values(), ids=FOUND)
def test_memory_limits_are_the_machines_and_those_of_control_groups(monkeypatch, tmp_path, cgroup, groups, limits):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=32 * GIB))
    for folder, group in {"proc/self": {"cgroup": cgroup}, **groups}.items():
        Path(tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in group.items():
            Path(tmp_path / folder / name).write_text(text)
    found = memory_limits(tmp_path)
    told = [(limit.name, limit.total_bytes, limit.free_bytes) for limit in found]
    assert told == [("this machine", 64 * GIB, 32 * GIB), *limits]
    if groups is NESTED:
        assert tightest(found) == MemoryLimit(name=STEP[0], total_bytes=16 * GIB, free_bytes=11 * GIB)


def limit_of(name: str, gib: int) -> MemoryLimit:
    return MemoryLimit(name=name, total_bytes=gib * GIB, free_bytes=gib * GIB)


def test_rank_share_divides_groups_among_the_ranks_in_them():
    sizes = {"this machine": 64, "job/memory.max": 16, "job/task0/memory.max": 6}
    machine, job, own = (limit_of(name, gib) for name, gib in sizes.items())
    names = ["this machine", job.name]
    text = "16.0 GiB of job/memory.max less what others hold, among 2 ranks"
    assert rank_share([machine, job], [names, names]) == (8 * GIB, text)
    share = rank_share([machine, job, own], [[*names, own.name], [*names, "job/task1/memory.max"]])
    assert share == (6 * GIB, "6.0 GiB of job/task0/memory.max less what others hold")
