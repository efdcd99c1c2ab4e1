"""The step meter: alone, over ranks, and on CUDA, where no device is needed."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed.process_group import of_all_ranks
from hf_osdp.measurement.collective_clock import CollectiveCall, timings_of, totals_of
from hf_osdp.measurement.step_meter import StepMeter, training_tensors
from hf_osdp.planner.hardware import Collective

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


@pytest.mark.on_ranks(2)
def test_step_meter_counts_its_ranks_peak_and_sums_up_the_worst_rank():
    rank, data = dist.get_rank(), torch.zeros(5 * ELEMENTS)
    with_data = measure(4, 0.02 + 0.05 * rank, ELEMENTS * (rank + 1))
    without = measure(2, 0.0, ELEMENTS, hold_all=False)
    assert data.numel() and with_data.peak_bytes / (4 * ELEMENTS) == pytest.approx(5 + 3 * (rank + 1), abs=0.1)
    assert without.peak_bytes / (4 * ELEMENTS) == pytest.approx(3, abs=0.1)
    summary = with_data.summary()
    assert summary.steps == 4 and summary.median_step_s >= 0.07
    assert summary.peak_bytes == max(of_all_ranks(with_data.peak_bytes)) and (rank == 0 or summary.peak_bytes == with_data.peak_bytes)


def test_collectives_inside_and_across_nodes_are_told_apart():
    def call(crosses: bool, seconds: float) -> CollectiveCall:
        return CollectiveCall(collective=Collective.ALL_GATHER, group_size=2, crosses_nodes=crosses, nbytes=2**20, seconds=seconds)

    inside, across = timings_of([call(False, 1e-3), call(True, 1e-2), call(False, 1e-3)])
    assert (inside.crosses_nodes, across.crosses_nodes) == (False, True)
    assert across.seconds_per_byte == pytest.approx(10 * inside.seconds_per_byte)
    (total,) = totals_of([call(False, 1e-3), call(True, 1e-2)], steps=1)
    assert (total.calls, total.nbytes) == (2, 2**21)


# ------------------------------------------------------------------------------- CUDA, its counters played by numbers


class Allocator:
    """Counts as the caching allocator does: what is held now, and the most since the last reset."""

    def __init__(self):
        self.held = self.most = 100

    def reaches(self, peak: int) -> None:
        """Hold `peak` bytes for a moment."""
        self.most = max(self.most, peak)

    def reset(self, device: torch.device) -> None:
        self.most = self.held

    def peak(self, device: torch.device) -> int:
        return self.most


@pytest.fixture
def allocator(monkeypatch) -> Allocator:
    played = Allocator()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", played.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", played.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * played.most)
    monkeypatch.setattr("hf_osdp.measurement.step_meter.now", lambda device: 0.0)
    return played


def cuda_step(meter: StepMeter, allocator: Allocator, peak: int) -> None:
    meter.step_begins()
    allocator.reaches(peak)
    meter.step_ends()


def test_step_meter_peak_on_cuda_is_the_largest_of_steps_that_ended(allocator):
    meter = StepMeter("cuda")
    assert meter.peak_bytes is None
    for peak, between in ((150, 900), (300, 1000), (200, 2000)):  # loading the model, an evaluation, a checkpoint
        allocator.reaches(between)
        cuda_step(meter, allocator, peak)
    assert (meter.peak_bytes, meter.reserved_bytes) == (300, 600)
    meter.step_begins()
    allocator.reaches(700)  # a step that does not end
    cuda_step(meter, allocator, 250)
    assert (meter.steps, meter.peak_bytes) == (4, 300)
