"""The step meter, alone and over ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from hf_osdp.measurement.collective_clock import CollectiveCall, timings_of, totals_of
from hf_osdp.measurement.step_meter import StepMeter, training_tensors
from hf_osdp.planner.hardware import Collective
from tests.helpers.distributed import run_ranks

ELEMENTS = 1_000_000


def measure(steps: int, seconds: float, elements: int, *, hold_all: bool = True) -> StepMeter:
    """Steps that hold a parameter, a momentum, and the product in forward or the gradient in backward."""
    model = torch.nn.ParameterList([torch.zeros(elements)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    meter = StepMeter("cpu", None if hold_all else lambda: training_tensors(model, optimizer))
    for _ in range(steps):
        meter.step_begins()
        time.sleep(seconds)
        (model[0] * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step_ends()
        time.sleep(3 * seconds)
    return meter


def test_step_meter_time_leaves_out_two_steps_and_what_lies_between(monkeypatch):
    clock = iter([0.0, 200.0, 400.0, 405.0, 500.0, 501.0, 600.0, 602.0])
    monkeypatch.setattr("hf_osdp.measurement.step_meter.now", lambda device: next(clock))
    meter = StepMeter("cpu")
    for _ in range(5):
        meter.step_begins()
        meter.step_ends()
    assert (meter.steps, meter.median_step_s) == (5, 2.0)


def test_step_meter_gives_none_before_anything_is_measured():
    meter = measure(1, 0.0, 10)
    assert (meter.steps, meter.median_step_s, meter.peak_bytes) == (1, None, None)
    summary = meter.summary()
    assert (summary.steps, summary.median_step_s, summary.peak_bytes) == (1, None, None)


def test_step_meter_forgets_a_step_that_did_not_end():
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
    data = torch.zeros(5 * ELEMENTS)
    with_data = measure(4, 0.02 + 0.05 * rank, ELEMENTS * (rank + 1))
    without = measure(2, 0.0, ELEMENTS, hold_all=False)
    return with_data.peak_bytes, with_data.summary(), without.peak_bytes, data.numel()


def test_peaks_and_the_summary_of_the_worst_rank():
    found = run_ranks(measure_on_each_rank, 2)
    arrays = [[count / (4 * ELEMENTS) for count in (peak, without)] for peak, _, without, _ in found]
    assert arrays == [
        [pytest.approx(5 + 3, abs=0.1), pytest.approx(3, abs=0.1)],
        [pytest.approx(5 + 6, abs=0.1), pytest.approx(3, abs=0.1)],
    ]
    assert found[0][1] == found[1][1]
    summary = found[0][1]
    assert (summary.steps, summary.peak_bytes) == (4, found[1][0])
    assert summary.median_step_s >= 0.07


def test_collectives_inside_and_across_nodes_are_told_apart():
    def call(crosses: bool, seconds: float) -> CollectiveCall:
        return CollectiveCall(collective=Collective.ALL_GATHER, group_size=2, crosses_nodes=crosses, nbytes=2**20, seconds=seconds)

    inside, across = timings_of([call(False, 1e-3), call(True, 1e-2), call(False, 1e-3)])
    assert (inside.crosses_nodes, across.crosses_nodes) == (False, True)
    assert across.seconds_per_byte == pytest.approx(10 * inside.seconds_per_byte)
    (total,) = totals_of([call(False, 1e-3), call(True, 1e-2)], steps=1)
    assert (total.calls, total.nbytes) == (2, 2**21)
