"""The front is made of searches, of which none is better in both memory and throughput."""

from __future__ import annotations

import pytest

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.search.compare import compare_strategies, frontier, not_dominated
from hf_osdp.planner.search.search import least_memory, search
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MODEL = transformer(layers=6)
HARDWARE = bare_preset("titan-rtx", devices_per_node=4)
JOB = TrainingJob(global_batch_size=32)
MOST = 2**30


LEAST = least_memory(problem(MODEL, HARDWARE, JOB))


def test_the_least_is_what_an_error_states_and_what_fits():
    with pytest.raises(InfeasibleError) as error:
        search(problem(MODEL, HARDWARE, JOB, LEAST - 1))
    assert error.value.least_peak_bytes == LEAST == search(problem(MODEL, HARDWARE, JOB, LEAST)).plan.peak_bytes


def test_points_rise_in_both_and_reach_both_ends():
    front = frontier(problem(MODEL, HARDWARE, JOB, MOST))
    peaks, rates = [r.plan.peak_bytes for r in front], [r.plan.samples_per_s for r in front]
    assert peaks == sorted(set(peaks)) and rates == sorted(set(rates)) and len(front) > 3
    assert peaks[0] == LEAST
    assert rates[-1] == search(problem(MODEL, HARDWARE, JOB, MOST)).plan.samples_per_s


def test_every_point_is_the_fastest_under_its_own_peak():
    for point in frontier(problem(MODEL, HARDWARE, JOB, MOST), points=6):
        assert search(problem(MODEL, HARDWARE, JOB, point.plan.peak_bytes)).plan.step_s == pytest.approx(point.plan.step_s, rel=2e-7)


def test_no_strategy_lies_above_a_front_that_was_searched_at_its_peak():
    rows = [row.result.plan for row in compare_strategies(problem(MODEL, HARDWARE, JOB, 2 * LEAST)) if row.result is not None]
    front = frontier(problem(MODEL, HARDWARE, JOB, MOST), points=2, at=[plan.peak_bytes for plan in rows])
    assert len(rows) > 1
    for plan in rows:
        assert max(r.plan.samples_per_s for r in front if r.plan.peak_bytes <= plan.peak_bytes) >= plan.samples_per_s * (1 - 2e-7)


def test_points_bound_the_searches(monkeypatch):
    asked = []
    monkeypatch.setattr("hf_osdp.planner.search.frontier.search", lambda asked_for: asked.append(asked_for) or search(asked_for))
    frontier(problem(MODEL, HARDWARE, JOB, MOST), points=5)
    assert len(asked) <= 5 + 1  # the one that finds the least


def test_dominated_and_equal_results_are_left_out():
    small, large = frontier(problem(MODEL, HARDWARE, JOB, MOST), points=2)
    slow = search(problem(MODEL, HARDWARE, JOB, MOST, strategy="fsdp"))
    assert slow.plan.step_s > large.plan.step_s
    assert not_dominated([large, slow, small, large]) in ((small, large), (small, slow, large))
    assert not_dominated([large, large]) == (large,)


def test_one_point_is_no_front():
    with pytest.raises(ValueError, match="points=1 must be at least 2"):
        frontier(problem(MODEL, HARDWARE, JOB, MOST), points=1)


def test_nothing_fits():
    with pytest.raises(InfeasibleError):
        frontier(problem(MODEL, HARDWARE, JOB, 1000))
