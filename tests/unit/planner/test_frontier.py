"""The front is made of searches, of which none is better in both memory and throughput."""

import pytest

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.search import compare
from hf_osdp.planner.search.compare import compare_strategies, frontier, not_dominated
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
    front = frontier(MOST, points=6)
    peaks, rates = [r.plan.peak_bytes for r in front], [r.plan.samples_per_s for r in front]
    assert peaks == sorted(set(peaks)) and rates == sorted(set(rates)) and 3 < len(front) <= len(asked) == 6
    assert peaks[0] == LEAST and rates[-1] == search(MOST).plan.samples_per_s
    for point in front:
        again = search(problem(MODEL, HARDWARE, JOB, point.plan.peak_bytes)).plan
        assert again.step_s == pytest.approx(point.plan.step_s, rel=2e-7)


def test_front_at_the_peaks_of_strategies_is_above_them():
    rows = [row.result for row in compare_strategies(problem(MODEL, HARDWARE, JOB, 2 * LEAST)) if row.result]
    front = frontier(MOST, points=2, others=rows)
    assert len(rows) > 1
    for plan in (row.plan for row in rows):
        below = [r.plan.samples_per_s for r in front if r.plan.peak_bytes <= plan.peak_bytes]
        assert max(below) >= plan.samples_per_s * (1 - 2e-7)


def test_front_takes_known_plans_and_leaves_dominated_ones_out(monkeypatch):
    known = {limit: search(problem(MODEL, HARDWARE, JOB, limit)) for limit in (2 * LEAST, 2**30)}
    slow = search(problem(MODEL, HARDWARE, JOB, 2**30, strategy="fsdp"))
    asked = []
    monkeypatch.setattr(compare, "search", lambda problem: asked.append(problem.memory_limit_bytes) or search(problem))
    front = frontier(MOST, points=5, known=known, others=[*known.values(), slow], at_once=2)
    assert known[2**30] in front and known[2 * LEAST] in front and slow not in front
    assert asked[0] == LEAST and len(set(asked) - set(known)) == len(asked) == 3
    again = frontier(MOST, points=5, known={result.peak_bytes: result for result in front})
    assert len(again) == len(front)


def test_not_dominated_leaves_out_worse_and_equal_results():
    small, large = frontier(MOST, points=2)
    slow = search(problem(MODEL, HARDWARE, JOB, 2**30, strategy="fsdp"))
    assert slow.plan.step_s > large.plan.step_s
    assert not_dominated([large, slow, small, large]) in ((small, large), (small, slow, large))


def test_frontier_refuses_one_point_and_a_limit_that_nothing_fits():
    with pytest.raises(ValueError, match="points=1 must be at least 2"):
        frontier(MOST, points=1)
    with pytest.raises(InfeasibleError):
        frontier(problem(MODEL, HARDWARE, JOB, 1000))
