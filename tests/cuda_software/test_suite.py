"""Steps of the GPU suite on the device, from the command on: those whose values or ends are compared, not times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_small_steps_are_done_on_the_device(tmp_path):
    """Those that no other test here has; values of large tensors are left out, or they take minutes."""
    steps = ("clock", "hardware", "profile", "attention", "trainer", "accelerator", "checkpoint", "four-ranks")
    command = f"{sys.executable} -m benchmarks.gpu_suite --rehearse cuda --minutes 12 --out {tmp_path} --only"
    subprocess.run(
        [*command.split(), *steps, "layouts", "limits", "out-of-memory"], cwd=ROOT, timeout=800, check=True,
        env={**os.environ, "FAKE_CUDA_COMPUTE_MAX": "262144"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("step", ["two-ranks", "ranks-trainer", "recalibration", "killed"])
def test_step_of_the_suite_is_done_on_the_device(step, tmp_path):
    command = (sys.executable, "-m", "benchmarks.gpu_suite", "--minutes", "6", "--out", tmp_path, "--only", step)
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(record["step"], record["status"]) for record in records] == [(step, "done")], records[-1]["tail"]
    assert done.returncode == 0, done.stderr[-2000:]
