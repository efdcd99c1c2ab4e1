"""Memory that runs out on a real GPU: the message, and a program that goes on by a safer plan."""

import pytest
import torch

from benchmarks.gpu_suite import catalogue  # noqa: F401  (the catalogue has the order of steps)
from benchmarks.gpu_suite.faults import problem_of, runs_out
from tests.helpers.output import ends_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("on_oom", ["raise", "replan"])
def test_memory_that_runs_out(on_oom):
    done = runs_out(1, on_oom, "cuda", timeout_s=280)
    assert not problem_of(done, 1, on_oom), ends_of(done.stderr)
