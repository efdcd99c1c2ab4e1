"""The suite's steps, most telling first; offload has tests of its own. `pytest -m gpu tests/gpu`"""

import pytest
import torch

from benchmarks.gpu_suite import catalogue  # noqa: F401
from benchmarks.gpu_suite.runner import run_step
from benchmarks.gpu_suite.step import STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


LIMITS = {step.name: pytest.mark.timeout(step.limit_s + 60) for step in STEPS.values() if step.part != 3}


@pytest.mark.parametrize("name", [pytest.param(name, marks=limit) for name, limit in LIMITS.items()])
def test_step_meets_its_aims(name, tmp_path):
    record = run_step(STEPS[name], tmp_path, rehearses="")
    assert record["status"] == "done", (record["misses"], *record["tail"])
