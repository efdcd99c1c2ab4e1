"""A plan is held against the limit as the allocator serves it, and another is found where it cannot."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from transformers import GPT2Config

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.cost.evaluate import capacity_of, is_replayed, runs_within
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import SearchResult, least_memory, search, within_reserved
from hf_osdp.tracing.describe import describe
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MODEL, JOB = transformer(layers=6), TrainingJob(global_batch_size=32)
HARDWARE = bare_preset("titan-rtx", devices_per_node=4).with_margin(0.1)
LEAST = least_memory(problem(MODEL, HARDWARE, JOB))
LIMIT = 3 * LEAST


class Gaps:
    """An allocator that needs so many times the estimate, and how often it was asked."""

    def __init__(self, factor: float, below: int = 0):
        self.factor, self.below, self.asked = factor, below, 0

    def __call__(self, plan, description, job, *, retries: bool) -> int:
        self.asked += 1
        peak = estimate_memory(description, plan.layouts(description), plan.world_size, job, plan.batch).peak_bytes
        return math.ceil(peak * self.factor if peak > self.below else peak)


def found_with(gaps: Gaps) -> SearchResult | None:
    def find(job: TrainingJob) -> SearchResult | None:
        try:
            return search(problem(MODEL, HARDWARE, job, LIMIT))
        except InfeasibleError:
            return None

    return within_reserved(
        search(problem(MODEL, HARDWARE, JOB, LIMIT)),
        find,
        lambda: search(problem(MODEL, HARDWARE, JOB, LEAST)),
        problem(MODEL, HARDWARE, JOB, LIMIT),
        needed=gaps,
    )


def test_within_reserved_keeps_a_plan_that_the_allocator_can_serve():
    gaps = Gaps(1.0)
    assert found_with(gaps) == search(problem(MODEL, HARDWARE, JOB, LIMIT))
    assert gaps.asked == 1


@pytest.mark.parametrize("factor", [1.1, 1.2])
def test_within_reserved_finds_another_plan_where_gaps_are_too_large(factor):
    free, gaps = search(problem(MODEL, HARDWARE, JOB, LIMIT)), Gaps(factor)
    assert free.plan.peak_bytes * factor > HARDWARE.room_bytes(LIMIT), "or there is nothing to find"
    found = found_with(gaps)
    assert gaps.asked > 1 and found.plan.step_s >= free.plan.step_s
    assert found.memory.peak_bytes * factor <= HARDWARE.room_bytes(LIMIT) + 1
    plain = estimate_memory(MODEL, found.plan.layouts(MODEL), 4, JOB, Batch(micro_batch_size=found.plan.micro_batch_size,
                            accumulation_steps=found.plan.accumulation_steps))  # fmt: skip
    assert found.memory == plain and found.plan.peak_bytes == plain.on(HARDWARE), "what was added for the search is not in the estimate"
    assert not found.plan.proven_optimal


def test_within_reserved_adds_less_where_no_plan_is_left():
    gaps = Gaps(9.0, below=HARDWARE.room_bytes(2 * LEAST))
    assert found_with(gaps).memory.peak_bytes <= gaps.below


def test_within_reserved_gives_nothing_where_no_plan_runs():
    assert found_with(Gaps(9.0)) is None


@pytest.fixture(scope="module")
def traced():
    return describe(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=5000), sequence_length=128, device_type="cuda")


def test_search_gives_a_plan_that_the_replayed_allocator_can_serve(traced):
    hardware, job = preset("h100", devices_per_node=4), TrainingJob(global_batch_size=64)
    assert is_replayed(traced, hardware) and not is_replayed(traced, preset("cpu", devices_per_node=4))
    least = least_memory(problem(traced, hardware, job))
    for part in (1.0, 1.01, 1.05, 1.5):
        limit = int(least * part)
        plan = search(problem(traced, hardware, job, limit)).plan
        assert runs_within(plan, traced, job, capacity_of(plan, hardware, job, limit)) and plan.peak_bytes <= hardware.room_bytes(limit)


def test_search_names_a_limit_that_can_be_met(traced):
    hardware, job = preset("h100", devices_per_node=4), TrainingJob(global_batch_size=64)
    with pytest.raises(InfeasibleError, match="Use a memory limit of") as caught:
        search(problem(traced, hardware, job, 2**30))
    least = caught.value.least_peak_bytes
    assert least == least_memory(problem(traced, hardware, job))
    plan = search(problem(traced, hardware, job, least)).plan
    assert plan.peak_bytes <= hardware.room_bytes(least) and plan.memory_limit_bytes == least
    with pytest.raises(InfeasibleError):
        search(problem(traced, hardware, job, int(0.98 * least)))


def test_search_counts_a_correction_once(traced):
    hardware, job = preset("h100", devices_per_node=4), TrainingJob(global_batch_size=64)
    more = replace(job, correction_bytes=2**28)
    added = least_memory(problem(traced, hardware, more)) - least_memory(problem(traced, hardware, job))
    assert hardware.room_bytes(added) == pytest.approx(2**28, rel=0.05)


def test_search_prefers_plans_for_which_the_cache_is_never_emptied(traced):
    hardware, job = preset("h100", devices_per_node=4), TrainingJob(global_batch_size=64)
    limit = int(1.5 * least_memory(problem(traced, hardware, job)))
    plan = search(problem(traced, hardware, job, limit)).plan
    assert runs_within(plan, traced, job, capacity_of(plan, hardware, job, limit), retries=False)
