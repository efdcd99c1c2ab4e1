"""Measurements of this machine: plausible alone, equal on all ranks; memory that control groups allow."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hf_osdp.errors import HardwareError
from hf_osdp.measurement import machine, rates, timing
from hf_osdp.measurement.machine import measure_hardware, measure_profile
from hf_osdp.measurement.memory_limits import MemoryLimit, memory_limits, rank_share, tightest
from hf_osdp.planner.description import DType
from hf_osdp.planner.hardware import Backend, Collective
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import OptimizerStep, Precision, TrainingJob
from hf_osdp.preparation.simulate import fake_process_group
from hf_osdp.report.run_tables import profile_tables
from hf_osdp.tracing.describe import describe
from tests.helpers.distributed import run_ranks
from tests.helpers.hardware import host_of
from tests.helpers.problems import problem
from tests.helpers.sampling import slow_but

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HOST = host_of(3 * 2**30, to_device=2e10, to_host=1e10, update=4.2e9)


def test_measure_hardware_alone_is_plausible_and_leaves_the_random_state():
    state = torch.get_rng_state()
    hardware = measure_hardware(device_type="cpu", seconds=0.2)
    assert (hardware.world_size, hardware.backend, hardware.timings, hardware.host) == (1, Backend.GLOO, (), None)
    assert hardware.device.name.startswith("cpu (")
    assert 1e8 < hardware.device.rate(DType.FLOAT32) < 1e14
    assert 1e8 < hardware.device.memory_bytes_per_s < 1e13
    assert 2**20 < hardware.device.memory_bytes < 2**50
    assert 1e8 < rates.update_rate(CPU, 0.02, elements=2**16) < 1e13
    assert torch.equal(torch.get_rng_state(), state)


def test_measure_profile_alone_has_no_links_and_nothing_to_shard():
    profile = measure_profile(device_type="cpu", seconds=0.2)
    assert (profile.hardware.timings, profile.hardware.fsdp_overhead, profile.segments) == ((), None, ())
    assert "torch" in profile.versions and profile.date


def _measure_here():
    hardware = measure_hardware(device_type="cpu", seconds=0.1)
    sizes = {(t.collective, t.group_size, t.crosses_nodes) for t in hardware.timings}
    positive = all(t.latency_s >= 0 and t.seconds_per_byte > 0 for t in hardware.timings)
    return repr(hardware), (hardware.nodes, hardware.devices_per_node), sizes, positive


PAIRS = {(Collective.ALL_GATHER, 2, False), (Collective.REDUCE_SCATTER, 2, False)}
FLAT, STAGED = PAIRS | {(Collective.ALL_REDUCE, 2, False)}, PAIRS | {(Collective.ALL_REDUCE, 2, True)}
"""Pairs that gather and scatter lie inside a node, pairs that reduce replicas across."""


@pytest.mark.parametrize(
    ("nodes", "expected"),
    slow_but([(1, FLAT), (2, STAGED | {(c, 4, True) for c in Collective})], daily=()),
)
def test_measure_hardware_is_equal_on_all_ranks(nodes, expected):
    results = run_ranks(_measure_here, 2 * nodes, nodes=nodes)
    text, shape, sizes, positive = results[0]
    assert all(result[0] == text for result in results)
    assert (shape, sizes, positive) == ((nodes, 2), expected, True)


def test_memory_of_now_does_not_count_the_communicator_of_all_ranks(monkeypatch):
    earlier = preset("rtx-4090", devices_per_node=2)
    earlier = replace(earlier, device=replace(earlier.device, reserved_bytes=500, communicator_bytes=100))
    monkeypatch.setattr(machine, "world_size", lambda: 2)
    monkeypatch.setattr(machine, "over_ranks", lambda values, op: values)
    for seen, planned in ((550, 500), (620, 520)):
        monkeypatch.setattr(machine, "_memory_bytes", lambda *given, seen=seen: (10**9, seen, ""))
        assert machine.with_memory_of_now(earlier, CPU).device.reserved_bytes == planned


def test_measurements_raise_for_bad_requests():
    with pytest.raises(ValueError, match="device_type='tpu' is not known; use cpu or cuda"):
        measure_hardware(device_type="tpu")
    with pytest.raises(ValueError, match="seconds=0 must be positive"):
        measure_profile(device_type="cpu", seconds=0)
    if not torch.cuda.is_available():
        with pytest.raises(HardwareError, match="torch sees no CUDA device here"):
            measure_hardware(device_type="cuda")


def test_profile_keeps_and_shows_the_host():
    profile = Profile(hardware=replace(preset("rtx-4090"), host=HOST))
    assert Profile.from_json(profile.to_json()).hardware.host == HOST
    told = " ".join(str(part) for part in profile_tables(profile))
    assert "Host: 3.0 GiB per device, optimizer steps at 4.2 GB/s." in told


def test_operator_seconds_of_a_gpu_are_the_cpus(monkeypatch):
    waits, clock = [], itertools.count()  # each reading of the clock is a second after the one before
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    step = rates._tiny_step(CPU)
    monkeypatch.setattr(rates, "_tiny_step", lambda device: step)
    wait = lambda device: (waits.append(device), [next(clock) for _ in range(100)])  # noqa: E731
    monkeypatch.setattr(timing, "synchronize", wait)
    with rates._Counter() as counter:
        step()
    assert rates.operator_seconds(CUDA, 0.01) * counter.operators == pytest.approx(1)  # the wait would add 100
    assert set(waits) == {CUDA}


def test_fsdp_overhead_on_gpu_is_cpu_time_of_quickest_round(monkeypatch):
    monkeypatch.setattr(rates, "barrier", lambda device: None)
    with fake_process_group(1):
        assert rates.measure_fsdp_overhead(CPU, 0.01) is None, "one process on the CPU is not sharded"
    with fake_process_group(2):
        on_cpu = rates.measure_fsdp_overhead(CPU, 0.05)
        monkeypatch.setattr(rates, "_EmptyModel", _Queued)
        found = rates.measure_fsdp_overhead(CUDA, 0.01)
    assert on_cpu.gather.call_s > 1e-6 and on_cpu.gather.seconds_per_byte > 0
    assert (found.gather.call_s, found.gather.tensor_s) == pytest.approx((3.0, 0.5))
    assert found.gather.seconds_per_byte == found.reduce.seconds_per_byte == 0, "bytes move at the speed of memory"
    assert found.updates[OptimizerStep.FUSED].tensor_s == pytest.approx(0.5)
    assert rates.measure_fsdp_overhead(CUDA, 0.01) is None, "without a process group"


class _Queued:
    """Stands in for units that are queued in 3 s and half a second for each tensor, and once in a while in more."""

    def __init__(self, tensors: int, *_: object) -> None:
        self._seconds = itertools.cycle(4 * (3.0 + 0.5 * tensors) + noise for noise in (0.0, 9.0, 2.0))

    def gather(self) -> dict[str, float]:
        return {"gather": next(self._seconds)}

    def reduce_and_update(self) -> dict[str, float]:
        return dict.fromkeys(("reduce", "for_loop", "foreach", "fused"), next(self._seconds))


def test_small_model_gets_few_micro_steps_where_issuing_takes_time(configuration):
    """Recomputing more is quicker than issuing a micro-step more often."""
    config = configuration("GPT2LMHeadModel", n_layer=4, n_embd=128, vocab_size=1000, n_positions=128)
    small = describe(config, sequence_length=128, compute_dtype=DType.BFLOAT16, device_type="cuda", capability=(9, 0))
    job = TrainingJob(global_batch_size=512, precision=Precision.named("bf16"))
    gpus = preset("h100", devices_per_node=8)
    assert gpus.device.operator_s == 8e-6

    def micro_batch(**changes) -> int:
        device = replace(gpus.device, reserved_bytes=0, communicator_bytes=0, **changes)
        hardware = replace(gpus, host=None, margin=0.0, device=device)
        return search(problem(small, hardware, job, 120_000_000)).plan.micro_batch_size

    assert micro_batch() == 64 > micro_batch(operator_s=0.0)


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


def test_share_is_equal_for_small_changes_of_use():
    frees = (12 * GIB + 1, 12 * GIB + 2**28, 13 * GIB - 1, 0)
    shares = [MemoryLimit(name="", total_bytes=16 * GIB, free_bytes=free).share_bytes(2) for free in frees]
    assert shares == [6 * GIB] * 3 + [GIB // 2]


def test_measure_hardware_on_the_cpu_has_what_control_groups_allow(monkeypatch):
    monkeypatch.setattr("hf_osdp.measurement.memory_limits.memory_limits", lambda: (limit_of("job/memory.max", 2),))
    device = measure_hardware(device_type="cpu", seconds=0.05).device
    assert device.memory_bytes == 2 * GIB
    assert device.source == "measured; memory: 2.0 GiB of job/memory.max less what others hold"
