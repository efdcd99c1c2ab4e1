"""A plan is held against the limit as the allocator serves it, and another is found where it cannot."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from transformers import GPT2Config

import hf_osdp.planner.search.search as search_module
from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.cost.evaluate import capacity_needed, capacity_of, is_replayed
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.tracing.describe import describe
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MODEL, JOB = transformer(layers=6), TrainingJob(global_batch_size=32)
HARDWARE = bare_preset("titan-rtx", devices_per_node=4).with_margin(0.1)
LEAST = least_memory(problem(MODEL, HARDWARE, JOB))
H100, BATCH = preset("h100", devices_per_node=4), TrainingJob(global_batch_size=64)
ASKED = problem(MODEL, HARDWARE, JOB, 3 * LEAST)


def peak_of(plan, description, job) -> int:
    return estimate_memory(description, plan.layouts(description), plan.world_size, job, plan.batch).peak_bytes


@pytest.fixture
def allocator(monkeypatch):
    """Set an allocator that needs so many times the estimate above some peak; return what it was asked."""

    def set_up(factor: float, above: int = 0) -> list[bool]:
        asked = []

        def needed(plan, description, job, *, retries: bool = True, enough_bytes: int | None = None) -> int:
            asked.append(retries)
            peak = peak_of(plan, description, job)
            return math.ceil(peak * factor) if peak > above else peak

        def runs(plan, description, job, capacity_bytes: int) -> bool:
            return needed(plan, description, job) <= capacity_bytes

        monkeypatch.setattr(search_module, "capacity_needed", needed)
        monkeypatch.setattr(search_module, "runs_within", runs)
        monkeypatch.setattr(search_module, "is_replayed", lambda description, hardware: True)
        search_module._searched.cache_clear()
        return asked

    return set_up


def test_search_keeps_the_first_plan_that_the_allocator_serves(allocator):
    first = search(ASKED)
    asked = allocator(1.0)
    assert search(ASKED) == first and asked == [False]


@pytest.mark.parametrize("factor", [1.1, 1.2])
def test_search_finds_another_plan_where_gaps_are_too_large(allocator, factor):
    free = search(ASKED)
    assert free.plan.peak_bytes * factor > ASKED.room_bytes, "or there is nothing to find"
    asked = allocator(factor)
    found = search(ASKED)
    assert len(asked) > 1 and found.plan.step_s >= free.plan.step_s and not found.plan.proven_optimal
    assert found.memory.peak_bytes * factor <= ASKED.room_bytes + 1
    assert found.peak_bytes == peak_of(found.plan, MODEL, JOB), "what was added for the search is not in the estimate"


def test_search_adds_less_where_no_plan_is_left(allocator):
    above = HARDWARE.room_bytes(2 * LEAST)
    allocator(9.0, above)
    assert search(ASKED).memory.peak_bytes <= above


def test_search_raises_where_the_allocator_serves_no_plan(allocator):
    allocator(9.0)
    with pytest.raises(InfeasibleError):
        search(ASKED)


@pytest.fixture(scope="module")
def traced():
    return describe(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=5000), sequence_length=128, device_type="cuda")


@pytest.mark.parametrize("part", [1.0, 1.05, 1.5])
def test_search_gives_a_plan_that_the_replayed_allocator_serves_with_its_cache_if_it_can(traced, part):
    assert is_replayed(traced, H100) and not is_replayed(traced, preset("cpu", devices_per_node=4))
    limit = int(part * least_memory(problem(traced, H100, BATCH)))
    plan = search(problem(traced, H100, BATCH, limit)).plan
    capacity = capacity_of(plan, H100, BATCH, limit)
    assert capacity_needed(plan, traced, BATCH, retries=part < 1.5, enough_bytes=capacity) <= capacity
    assert plan.peak_bytes <= H100.room_bytes(limit)


@pytest.mark.slow
def test_search_names_a_limit_that_can_be_met(traced):
    hardware, job = H100, BATCH
    with pytest.raises(InfeasibleError, match="Use a memory limit of") as caught:
        search(problem(traced, hardware, job, 2**30))
    least = caught.value.least_peak_bytes
    assert least == least_memory(problem(traced, hardware, job))
    plan = search(problem(traced, hardware, job, least)).plan
    assert plan.peak_bytes <= hardware.room_bytes(least) and plan.memory_limit_bytes == least
    with pytest.raises(InfeasibleError):
        search(problem(traced, hardware, job, int(0.98 * least)))


def test_search_counts_a_correction_once(traced):
    hardware, job = H100, BATCH
    more = replace(job, correction_bytes=2**28)
    added = least_memory(problem(traced, hardware, more)) - least_memory(problem(traced, hardware, job))
    assert hardware.room_bytes(added) == pytest.approx(2**28, rel=0.05)
