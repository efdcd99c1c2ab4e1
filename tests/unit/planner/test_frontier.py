"""The front is made of searches, of which none is better in both memory and throughput."""

import pytest

from hf_osdp.planner.search import compare
from hf_osdp.planner.search.compare import POINTS, frontier
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MODEL, JOB = transformer(layers=4), TrainingJob(global_batch_size=32)
HARDWARE = bare_preset("titan-rtx", devices_per_node=4)
MOST = problem(MODEL, HARDWARE, JOB, 2**30)
LEAST = least_memory(MOST)


def test_front_rises_from_least_memory_by_fastest_points(monkeypatch):
    asked = []
    monkeypatch.setattr(compare, "search", lambda problem: asked.append(problem) or search(problem))
    front = frontier(MOST)
    peaks, rates = [r.plan.peak_bytes for r in front], [r.plan.samples_per_s for r in front]
    assert peaks == sorted(set(peaks)) and rates == sorted(set(rates)) and 3 < len(front) <= len(asked) - 1 == POINTS
    assert peaks[0] == LEAST and rates[-1] == search(MOST).plan.samples_per_s
    for point in front:
        again = search(problem(MODEL, HARDWARE, JOB, point.plan.peak_bytes)).plan
        assert again.step_s == pytest.approx(point.plan.step_s, rel=2e-7)
