"""The step meter, alone and over ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_osdp.runtime.measure import StepMeter
from tests.helpers.distributed import run_ranks

ELEMENTS = 1_000_000


def measure(steps: int, seconds: float, elements: int) -> StepMeter:
    """Steps that hold a parameter, its gradient, a momentum and one activation of the same size."""
    parameter = torch.nn.Parameter(torch.zeros(elements))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=False)
    meter = StepMeter("cpu")
    for _ in range(steps):
        meter.step_begins()
        time.sleep(seconds)
        (parameter * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step_ends()
        time.sleep(3 * seconds)
    return meter


def test_the_peak_of_a_step():
    meter = measure(3, 0.0, ELEMENTS)
    arrays = meter.peak_bytes / (4 * ELEMENTS)
    assert 3 <= arrays < 3.1, "parameter, momentum, and the product in forward or the gradient in backward"


def test_the_time_of_a_step_leaves_out_the_first_two_and_what_lies_between(monkeypatch):
    clock = iter([0.0, 200.0, 400.0, 405.0, 500.0, 501.0, 600.0, 602.0])
    monkeypatch.setattr("hf_osdp.runtime.measure.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    meter = StepMeter("cpu")
    for _ in range(5):
        meter.step_begins()
        meter.step_ends()
    assert (meter.steps, meter.median_step_s) == (5, 2.0)


def test_nothing_is_told_before_it_is_known():
    meter = measure(1, 0.0, 10)
    assert (meter.steps, meter.median_step_s, meter.peak_bytes) == (1, None, None)
    summary = meter.summary()
    assert (summary.steps, summary.median_step_s, summary.peak_bytes) == (1, None, None)


def test_a_step_that_did_not_end_is_forgotten():
    meter = measure(1, 0.0, 10)
    meter.step_begins()
    meter.step_begins()
    meter.step_ends()
    assert meter.steps == 2 and meter.peak_bytes is not None
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    with pytest.raises(ValueError, match="without step_begins"):
        meter.step_ends()


def measure_on_each_rank():
    rank = dist.get_rank()
    meter = measure(4, 0.02 + 0.05 * rank, ELEMENTS * (rank + 1))
    return meter.peak_bytes, meter.summary()


def test_the_summary_is_that_of_the_worst_rank():
    (small, first), (large, second) = run_ranks(measure_on_each_rank, 2)
    assert first == second
    assert first.peak_bytes == large > 1.5 * small
    assert first.median_step_s >= 0.07
