"""What an observation changes in later estimates."""

from __future__ import annotations

import pytest

from hf_osdp.planner.cost.correction import Correction, correction_of
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.cost.timing import compute_seconds
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.hardware import Collective, CollectiveTiming
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.search.search import search
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MODEL = transformer(layers=3)
HARDWARE = bare_preset("a100-40", devices_per_node=4)
BATCH = Batch(micro_batch_size=2, accumulation_steps=1)


def test_extra_bytes_are_at_every_moment_and_add_up() -> None:
    job = TrainingJob(global_batch_size=8)
    corrected = Correction(extra_bytes=5).of_job(Correction(extra_bytes=1000).of_job(job))
    choices = [UnitLayout(shard_size=4, reshard_after_forward=True)] * len(MODEL.units)
    before = estimate_memory(MODEL, choices, 4, job, BATCH)
    after = estimate_memory(MODEL, choices, 4, corrected, BATCH)
    assert [m.total_bytes + 1005 for m in before.moments] == [m.total_bytes for m in after.moments]
    assert {m.breakdown.correction for m in after.moments} == {1005}


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_compute_factor_scales_every_unit(samples: int) -> None:
    slower = Correction(compute_factor=1.5).of_description(MODEL, HARDWARE)
    before, after = (compute_seconds(model, HARDWARE, samples) for model in (MODEL, slower))
    assert sum(before) > 0
    assert after == pytest.approx([1.5 * seconds for seconds in before])
    twice = Correction(compute_factor=2.0).of_description(slower, HARDWARE)
    assert compute_seconds(twice, HARDWARE, samples) == pytest.approx([3.0 * seconds for seconds in before])


def test_observed_collectives_replace_those_of_their_kind_and_size() -> None:
    def timing(collective: Collective, size: int, latency_s: float) -> CollectiveTiming:
        return CollectiveTiming(collective=collective, group_size=size, latency_s=latency_s, seconds_per_byte=1e-9)

    first = Correction(timings=(timing(Collective.ALL_GATHER, 4, 1.0), timing(Collective.ALL_GATHER, 2, 2.0))).of_hardware(HARDWARE)
    second = Correction(timings=(timing(Collective.ALL_GATHER, 4, 3.0),)).of_hardware(first)
    assert second.timing(Collective.ALL_GATHER, 4).latency_s == 3.0
    assert second.timing(Collective.ALL_GATHER, 2).latency_s == 2.0
    assert len(second.timings) == 2


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_that_is_no_factor_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="compute_factor"):
        Correction(compute_factor=factor)


@pytest.mark.parametrize("name", ["a100-40", "cpu"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_factor_found_makes_the_step_as_long_as_the_one_seen(name: str, factor: float) -> None:
    hardware, job = bare_preset(name, devices_per_node=4), TrainingJob(global_batch_size=8)
    plan = search(problem(MODEL, hardware, job, 2**30)).plan
    slower = Correction(compute_factor=factor).of_description(MODEL, hardware)
    seen = estimate_plan(plan, slower, job, hardware)
    found = correction_of(plan, MODEL, hardware, job, peak_bytes=seen.memory.peak_bytes + 7, step_s=seen.time.step_s)
    assert (found.extra_bytes, found.compute_factor) == (7, pytest.approx(factor, rel=1e-6))


def test_what_was_not_seen_corrects_nothing_and_the_factor_has_bounds() -> None:
    job = TrainingJob(global_batch_size=8)
    plan = search(problem(MODEL, HARDWARE, job, 2**30)).plan
    assert correction_of(plan, MODEL, HARDWARE, job, peak_bytes=None, step_s=None) == Correction()
    factors = [correction_of(plan, MODEL, HARDWARE, job, peak_bytes=None, step_s=s).compute_factor for s in (1e-12, 1e9)]
    assert factors == [pytest.approx(0.05), pytest.approx(20.0)]
