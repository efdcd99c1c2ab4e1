"""A plan is held against the limit by what the allocator reserves, and another is found where it passes it."""

from __future__ import annotations

import pytest

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.costs import Batch
from hf_osdp.planner.evaluate import choices_of
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.memory import estimate_memory
from hf_osdp.planner.search import least_memory, search
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset

MODEL, JOB = transformer(layers=6), TrainingJob(global_batch_size=32)
HARDWARE = bare_preset("titan-rtx", devices_per_node=4).with_margin(0.1)
LEAST = least_memory(MODEL, HARDWARE, JOB)
LIMIT = 3 * LEAST


class Reserved:
    """So many bytes for each of the estimate's, and how often it was asked."""

    def __init__(self, factor: float, below: int = 0):
        self.factor, self.below, self.asked = factor, below, 0

    def __call__(self, description, choices, world_size, job, batch: Batch) -> int:
        self.asked += 1
        peak = estimate_memory(description, choices, world_size, job, batch).peak_bytes
        return int(peak * self.factor) if peak > self.below else peak


def test_a_plan_whose_reserved_peak_fits_is_the_answer_at_once():
    reserved = Reserved(1.0)
    assert search(MODEL, HARDWARE, JOB, LIMIT, reserved_peak=reserved) == search(MODEL, HARDWARE, JOB, LIMIT)
    assert reserved.asked == 1


@pytest.mark.parametrize("factor", [1.1, 1.2, 1.5, 2.5])
def test_another_plan_is_found_where_the_reserved_peak_does_not_fit(factor):
    free, reserved = search(MODEL, HARDWARE, JOB, LIMIT), Reserved(factor)
    assert free.plan.peak_bytes * factor > HARDWARE.room_bytes(LIMIT), "or there is nothing to find"
    found = search(MODEL, HARDWARE, JOB, LIMIT, reserved_peak=reserved)
    assert reserved.asked > 1 and found.plan.step_s >= free.plan.step_s
    assert found.memory.peak_bytes * factor <= HARDWARE.room_bytes(LIMIT) + 1
    plain = estimate_memory(MODEL, choices_of(found.plan, MODEL), 4, JOB, Batch(micro_batch_size=found.plan.micro_batch_size,
                            accumulation_steps=found.plan.accumulation_steps))  # fmt: skip
    assert found.memory == plain and found.plan.peak_bytes == plain.on(HARDWARE), "what was added for the search is not in the estimate"
    assert not found.plan.proven_optimal


def test_less_is_added_where_nothing_is_left_with_the_excess():
    """Only the least plan has none, and the first plan's excess is more than there is."""
    reserved = Reserved(9.0, below=HARDWARE.room_bytes(2 * LEAST))
    found = search(MODEL, HARDWARE, JOB, LIMIT, reserved_peak=reserved)
    assert found.memory.peak_bytes <= reserved.below


def test_no_plan_that_reserves_too_much_is_an_answer():
    with pytest.raises(InfeasibleError) as caught:
        search(MODEL, HARDWARE, JOB, LIMIT, reserved_peak=Reserved(9.0))
    assert "\n" not in str(caught.value)
