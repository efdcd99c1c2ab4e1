"""States and activations on the host: the tests of tests/gpu, one row each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from xml.etree import ElementTree

from .runner import ROOT
from .step import Bench, step

REHEARSED = {
    "host": ("tests/distributed/test_exactness.py", "-k", "host and one"),
    "activations": ("tests/unit/modeling/test_offloading.py",),
    "optimizer states": ("tests/distributed/test_exactness.py", "-k", "states and group"),
}
ON_GPU = {
    "host": ("tests/gpu/test_host_offload_cuda.py", "-k", "not states_on_the_host"),
    "activations": ("tests/gpu/test_activation_offload_cuda.py",),
    "optimizer states": ("tests/gpu/test_host_offload_cuda.py", "-k", "states_on_the_host"),
}

LATE_COPIES = {"FAKE_CUDA_LATENCY_MS": "200", "FAKE_CUDA_LATE": "side"}


@step(
    part=3,
    expected_s=200,
    limit_s=400,
    rehearsal_s=40,
    proves="units on the host: weights and states as plain torch's, the peak as estimated, copies and steps timed",
)
def host_offload(bench: Bench) -> None:
    run_tests(bench, *(REHEARSED if bench.on_cpu else ON_GPU)["host"])


@step(
    part=3,
    expected_s=60,
    limit_s=240,
    rehearsal_s=60,
    proves="activations on the host: plain gradients under delays of streams, what is freed, page-locked memory",
)
def activation_offload(bench: Bench) -> None:
    late = bench.rehearses and not bench.on_cpu  # else tests/cuda_software's device copies at once
    run_tests(bench, *(REHEARSED if bench.on_cpu else ON_GPU)["activations"], env=LATE_COPIES if late else {})


@step(
    part=3,
    expected_s=60,
    limit_s=240,
    rehearsal_s=60,
    proves="optimizer states on the host: weights to the bit, the peak as estimated",
)
def optimizer_states(bench: Bench) -> None:
    run_tests(bench, *(REHEARSED if bench.on_cpu else ON_GPU)["optimizer states"])


def run_tests(bench: Bench, *arguments: str, env: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run pytest, with a row for each test function."""
    report = bench.folder / "report.xml"
    marks = "not slow and not gpu" if bench.on_cpu else "gpu"
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=5", "-m", marks, f"--junitxml={report}", *arguments]
    done = subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, timeout=max(10.0, bench.left_s),
                          env={**os.environ, **env})  # fmt: skip
    if not report.exists():
        raise RuntimeError(f"pytest ended with code {done.returncode} and ran no test.")
    found: dict[str, list[tuple[str, float]]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name, tags = case.get("name") or "", {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        found.setdefault(name.split("[")[0], []).append((outcome, float(case.get("time") or 0)))
        for one in case:
            if one.tag in ("failure", "error"):
                bench.miss(f"{name}: {(one.get('message') or '').splitlines()[0][:300]}")
    for name, outcomes in found.items():
        counts = Counter(outcome for outcome, _ in outcomes)
        bench.row(test=name.removeprefix("test_"), **{kind: counts[kind] for kind in ("passed", "failed", "skipped")},
                  seconds=f"{sum(taken for _, taken in outcomes):.1f}")  # fmt: skip
    bench.aim(
        bool(found) and not any(outcome == "skipped" for outcomes in found.values() for outcome, _ in outcomes),
        "tests were skipped",
    )
