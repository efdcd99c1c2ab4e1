"""States and activations on the host: the tests of tests/gpu, each a row."""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree

from .runner import ROOT
from .step import Bench, step

REHEARSED = {
    "host": ("tests/distributed/test_host_offload.py", "-k", "1"),
    "activations": ("tests/unit/profiling/test_offloading.py",),
}
ON_GPU = {"host": ("tests/gpu/test_host_offload_cuda.py",), "activations": ("tests/gpu/test_activation_offload_cuda.py",)}


@step(part=3, expected_s=90, limit_s=300, rehearsal_s=40, proves="units on the host: weights and states as plain torch's, the peak as estimated, copies and steps timed")
def host_offload(bench: Bench) -> None:
    run_tests(bench, *(REHEARSED if bench.rehearses else ON_GPU)["host"])


@step(part=3, expected_s=60, limit_s=240, rehearsal_s=30, proves="activations on the host: plain gradients under delays of streams, what is freed, page-locked memory")
def activation_offload(bench: Bench) -> None:
    run_tests(bench, *(REHEARSED if bench.rehearses else ON_GPU)["activations"])


def run_tests(bench: Bench, *arguments: str) -> None:
    """pytest, with a row for each test."""
    report = bench.folder / "report.xml"
    marks = "not slow and not gpu" if bench.rehearses else "gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=5", "-m", marks, f"--junitxml={report}", *arguments]
    subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, env=dict(os.environ), timeout=max(10.0, bench.left_s))
    cases = ElementTree.parse(report).getroot().iter("testcase")
    for case in cases:
        wrong = [child for child in case if child.tag in ("failure", "error")]
        outcome = "failed" if wrong else "skipped" if any(child.tag == "skipped" for child in case) else "passed"
        bench.row(test=case.get("name"), outcome=outcome, seconds=f"{float(case.get('time') or 0):.1f}")
        for one in wrong:
            bench.miss(f"{case.get('name')}: {(one.get('message') or '').splitlines()[0][:300]}")
