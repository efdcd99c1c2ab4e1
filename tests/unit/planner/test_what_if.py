"""Changed problems, and the bisection for the largest size."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hf_osdp.planner.hardware import Collective, CollectiveTiming
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem, Strategy
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.search.what_if import answer, fits, largest, next_batch, one_more_device, twice_the_memory
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset

PROBLEM = PlanningProblem(
    description=transformer(),
    hardware=bare_preset("titan-rtx", devices_per_node=4),
    job=TrainingJob(global_batch_size=32),
    memory_limit_bytes=2**30,
)
PROBLEM = replace(PROBLEM, memory_limit_bytes=2 * least_memory(PROBLEM))


def test_largest_is_within_its_precision_and_asks_each_size_once():
    for target, start, step, most in itertools.product([0, 3, 64, 65, 1000, 5000], [1, 64, 1000], [1, 8], [40, 4000]):
        asked = []
        found = largest(lambda size: asked.append(size) or size <= target, max(step, start // step * step), step=step, most=most)  # noqa: B023
        best = min(target, most) // step * step
        assert (found or 0) <= best and best - (found or 0) <= max(step, (found or 0) // 16)
        assert (found is None) == (best == 0)
        assert all(size % step == 0 and 0 < size <= most for size in asked)
        assert len(set(asked)) == len(asked) <= 24


@pytest.mark.parametrize(
    ("batch", "micro", "world_size", "expected"), [(64, None, 8, 64), (64, None, 9, 72), (64, 4, 9, 72), (64, 16, 3, 96), (1, None, 5, 5)]
)
def test_next_batch_fills_whole_micro_steps(batch, micro, world_size, expected):
    job = TrainingJob(global_batch_size=batch, micro_batch_size=micro)
    assert next_batch(job, world_size) == expected
    assert replace(job, global_batch_size=expected).micro_batch_sizes(world_size)


def test_one_more_device_in_one_node_raises_the_batch_and_says_so():
    changed, words = one_more_device(PROBLEM)
    assert (changed.hardware.nodes, changed.hardware.devices_per_node) == (1, 5)
    assert changed.job.global_batch_size == 35
    assert words == "5 devices, global batch raised from 32 to 35"


def test_one_more_device_adds_a_node_where_there_are_several():
    problem = replace(PROBLEM, hardware=bare_preset("titan-rtx", nodes=3, devices_per_node=1), job=TrainingJob(global_batch_size=24))
    changed, words = one_more_device(problem)
    assert (changed.hardware.nodes, changed.hardware.devices_per_node) == (4, 2)
    assert words == "4 nodes x 2 devices"
    assert changed.job == problem.job


def test_one_more_device_says_that_measurements_are_dropped():
    timing = CollectiveTiming(collective=Collective.ALL_GATHER, group_size=4, latency_s=1e-5, seconds_per_byte=1e-10)
    changed, words = one_more_device(replace(PROBLEM, hardware=replace(PROBLEM.hardware, timings=(timing,))))
    assert changed.hardware.timings == ()
    assert "measured collectives" in words


def test_answer_is_what_a_search_gives():
    row = answer("twice the memory", *twice_the_memory(PROBLEM))
    expected = search(replace(PROBLEM, memory_limit_bytes=2 * PROBLEM.memory_limit_bytes))
    assert row.result == expected
    assert row.tokens_per_s == pytest.approx(expected.plan.samples_per_s * PROBLEM.description.sequence_length)


def test_answer_says_why_there_is_none():
    row = answer("now", replace(PROBLEM, memory_limit_bytes=1000), "")
    assert row.result is None and row.tokens_per_s is None and row.reason.startswith("needs ")
    prime = one_more_device(replace(PROBLEM, strategy=Strategy.HSDP))
    assert "group size" in answer("one more device", *prime).reason


def test_fits_agrees_with_the_search():
    assert fits(PROBLEM) and search(PROBLEM).plan.peak_bytes <= PROBLEM.memory_limit_bytes
    assert not fits(replace(PROBLEM, memory_limit_bytes=1000))


def test_more_devices_of_a_preset_are_the_preset_and_keep_the_margin():
    problem = replace(PROBLEM, hardware=preset("titan-rtx"), job=TrainingJob(global_batch_size=2))
    assert one_more_device(problem)[0].hardware == preset("titan-rtx", devices_per_node=2)
    half = replace(problem, hardware=problem.hardware.with_margin(0.5))
    assert one_more_device(half)[0].hardware.free_share == 0.5 and half.room_bytes == problem.memory_limit_bytes // 2
