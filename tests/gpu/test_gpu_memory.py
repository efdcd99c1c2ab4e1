"""The memory estimate and the planner's frontier on a real GPU, as rank 0 of 8. `pytest -m gpu tests/gpu`"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from benchmarks.gpu_memory import AIM_ERROR, measure_on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


MODELS = [("GPT-2 small", "bf16"), ("GPT-2 small", "no"), ("BERT large", "bf16")]
LAYOUTS = ("ddp", "zero2", "zero3", "hsdp", "mixed")


@pytest.fixture(scope="module", params=MODELS, ids=" ".join)
def found(request):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_on_cuda, *request.param, LAYOUTS, (0.0, 0.5)).result()


def test_the_estimate_is_what_the_allocator_counts(found):
    errors = {row.layout: row.error for row in found[0]}
    assert None not in errors.values(), "a layout ran out of memory without a limit"
    assert sum(map(abs, errors.values())) / len(errors) <= AIM_ERROR, errors


def test_no_plan_that_is_called_feasible_runs_out_of_memory(found):
    assert found[1] and all(row.fits for row in found[1]), found[1]
