"""The suite's steps on one rank and on several, most telling first: whether CUDA and NCCL runs are right.

`pytest -m gpu tests/gpu`
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_suite import catalogue  # noqa: F401
from benchmarks.gpu_suite.runner import run_step
from benchmarks.gpu_suite.step import STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(step.name, marks=pytest.mark.timeout(step.limit_s + 60))
        for step in STEPS.values()
        if step.part in (1, 2)
    ],
)
def test_step_meets_its_aims(name, tmp_path):
    record = run_step(STEPS[name], tmp_path, rehearses="")
    assert record["status"] == "done", (record["misses"], *record["tail"])
