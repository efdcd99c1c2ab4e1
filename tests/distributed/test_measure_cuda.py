"""The step meter's peaks on CUDA, with the allocator's counters played by numbers. No device is needed."""

from __future__ import annotations

import pytest
import torch

from hf_osdp.measurement.step_meter import StepMeter


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


def step(meter: StepMeter, allocator: Allocator, peak: int) -> None:
    meter.step_begins()
    allocator.reaches(peak)
    meter.step_ends()


def test_step_meter_ignores_peaks_between_steps(allocator):
    meter = StepMeter("cuda")
    assert meter.peak_bytes is None
    allocator.reaches(900)  # loading the model
    step(meter, allocator, 300)
    allocator.reaches(1000)  # an evaluation
    step(meter, allocator, 200)
    allocator.reaches(2000)  # a checkpoint
    assert meter.peak_bytes == 300


def test_step_meter_peak_is_the_largest_of_the_steps(allocator):
    meter = StepMeter("cuda")
    for peak in (150, 400, 250):
        step(meter, allocator, peak)
    assert meter.peak_bytes == 400
    meter.step_begins()
    allocator.reaches(700)  # a step that does not end
    step(meter, allocator, 250)
    assert (meter.steps, meter.peak_bytes) == (4, 400)
    assert meter.reserved_bytes == 800
