"""Steps of the GPU suite that need a GPU, on measurements that are played: rows, aims that are met and aims that are missed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_memory import LAYOUTS, LayoutRow, LimitRow
from benchmarks.gpu_suite import faults, memory, runner
from benchmarks.gpu_suite.step import STEPS, Bench

GIB = 2**30


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(device=torch.device("cuda"), rehearses=False, folder=tmp_path, out=tmp_path, found=tmp_path / "found.jsonl", limit_s=300.0)


def found(bench: Bench, step: str) -> dict[str, list]:
    STEPS[step].run(bench)
    return runner._findings(bench.found)


def limit(fits: bool) -> LimitRow:
    used = 7 * GIB if fits else None
    return LimitRow(
        model="m", precision="bf16", between=0.0, limit_bytes=8 * GIB, planned_bytes=8 * GIB, fits=fits, allocated_bytes=used,
        reserved_bytes=used, survives_bytes=used,
    )  # fmt: skip


def layout(estimated: int) -> LayoutRow:
    return LayoutRow(model="m", precision="bf16", layout="ddp", estimated_bytes=estimated, allocated_bytes=1000, reserved_bytes=2000)


@pytest.mark.parametrize(("simulated", "replayed", "misses"), [(1010, 990, 0), (1010, None, 0), (1100, 1000, 4), (900, 500, 8)])
def test_reserved_bytes_are_held_against_the_measured(bench, monkeypatch, simulated, replayed, misses):
    seen = []

    def apart(fn, *args, **variables):
        seen.append((fn, variables.get("PYTORCH_ALLOC_CONF"), args[-1]))
        if fn is memory.simulated_bytes:
            return simulated
        Path(args[-1]).write_bytes(b"snapshot")
        return {"estimated": 800, "allocated": 800, "reserved": 1000}

    monkeypatch.setattr(memory, "apart", apart)
    monkeypatch.setattr(memory, "replayed_bytes", lambda path: replayed)
    result = found(bench, "reserved")
    assert len(result["rows"]) == 4 and len(result["misses"]) == misses
    assert {setting for fn, setting, _ in seen if fn is memory.recorded} == {"expandable_segments:True", "expandable_segments:False"}
    assert {last for fn, _, last in seen if fn is memory.simulated_bytes} == {True, False}
    assert (bench.out / memory.SNAPSHOT).read_bytes() == b"snapshot"


def test_twenty_limits_are_tried_and_each_plan_that_runs_out_is_a_missed_aim(bench, monkeypatch):
    monkeypatch.setattr(memory, "apart", lambda fn, name, precision, layouts, between, walks: ([], [limit(part > 0) for part in between]))
    result = found(bench, "limits")
    assert len(result["rows"]) == 20
    assert result["misses"] == ["m bf16: the plan for 8.0 GiB runs out of memory"] * len(memory.LIMITS)
    assert {row["outcome"] for row in result["rows"]} == {"fits", "OUT OF MEMORY"}


@pytest.mark.parametrize(("estimated", "missed"), [(1005, False), (1050, True)])
def test_layouts_are_judged_by_their_mean_error(bench, monkeypatch, estimated, missed):
    monkeypatch.setattr(memory, "apart", lambda fn, name, precision, layouts, *args: ([layout(estimated)] * len(layouts), []))
    result = found(bench, "layouts")
    assert len(result["rows"]) == len(LAYOUTS) * 2 * len(memory.gpu_memory.MODELS) and bool(result["misses"]) == missed


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "ranks", "on_oom", "wrong"),
    [
        (1, "PLAN a\n", "{said}", 1, "raise", False),
        (0, "PLAN a\nPLAN b\nEND\n", "{said}", 1, "replan", False),
        (0, "PLAN a\nPLAN a\nPLAN b\nPLAN b\nEND\nEND\n", "{said}", 2, "replan", False),
        (0, "PLAN a\nPLAN a\nEND\n", "{said}", 1, "replan", True),
        (0, "PLAN a\nPLAN a\nPLAN b\nPLAN b\nEND\n", "{said}", 2, "replan", True),
        (0, "PLAN a\nEND\n", "{said}", 1, "raise", True),
        (1, "PLAN a\n", "CUDA out of memory", 1, "raise", True),
    ],
)
def test_what_a_run_that_lacks_memory_must_show(code, stdout, stderr, ranks, on_oom, wrong):
    said = (
        "hf_osdp: Out of memory on rank 1 on host in forward of h.1: the plan was estimated to need 5.8 MiB of a limit of 6.0 MiB, 3 more."
    )
    done = subprocess.CompletedProcess([], code, stdout, stderr.format(said=said))
    assert bool(faults.problem_of(done, ranks, on_oom)) == wrong
