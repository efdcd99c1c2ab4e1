"""Steps of the GPU suite on the device, from the command on: those whose values or ends are compared, not times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_suite import catalogue  # noqa: F401  (registers the steps)
from benchmarks.gpu_suite.step import STEPS

ROOT = Path(__file__).resolve().parents[2]
WHOLE = ("two-ranks", "ranks-trainer", "killed")
SMALL = tuple(step.name for step in STEPS.values() if step.rehearsal_s is not None and step.name not in WHOLE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [*WHOLE, *SMALL])
def test_step_of_the_suite_is_done_on_the_device(step, tmp_path):
    """The others in small sizes: values of large tensors are left out, or they take minutes."""
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--minutes", "9", "--out", str(tmp_path), "--only", step]
    env = dict(os.environ)
    if step in SMALL:
        command += ["--rehearse", "cuda"]
        env["FAKE_CUDA_COMPUTE_MAX"] = "262144"
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580, check=False)
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(record["step"], record["status"]) for record in records] == [(step, "done")], (records, done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
