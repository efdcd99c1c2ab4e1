"""What an observation changes in later estimates."""

import pytest

from hf_osdp.planner.cost.correction import Correction, correction_of
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.cost.timing import unit_work
from hf_osdp.planner.hardware import Collective, CollectiveTiming
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import TrainingJob
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MODEL, JOB = transformer(layers=3), TrainingJob(global_batch_size=8)
HARDWARE = bare_preset("a100-40", devices_per_node=4)


@pytest.mark.parametrize("samples", [1, 7])
def test_compute_factor_scales_every_unit_and_multiplies(samples):
    slower = Correction(compute_factor=1.5).of_description(MODEL, HARDWARE)
    slowest = Correction(compute_factor=2.0).of_description(slower, HARDWARE)
    before, after, twice = (unit_work(model, HARDWARE, samples)[0] for model in (MODEL, slower, slowest))
    assert sum(before) > 0
    assert after == pytest.approx([1.5 * seconds for seconds in before])
    assert twice == pytest.approx([3.0 * seconds for seconds in before])


def test_observed_collectives_replace_those_of_their_kind_and_size():
    def timing(size: int, latency_s: float) -> CollectiveTiming:
        kind = {"collective": Collective.ALL_GATHER, "group_size": size}
        return CollectiveTiming(**kind, latency_s=latency_s, seconds_per_byte=1e-9)

    first = Correction(timings=(timing(4, 1.0), timing(2, 2.0))).of_hardware(HARDWARE)
    second = Correction(timings=(timing(4, 3.0),)).of_hardware(first)
    assert sorted((t.group_size, t.latency_s) for t in second.timings) == [(2, 2.0), (4, 3.0)]


@pytest.mark.parametrize("name", ["a100-40", "cpu"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_correction_makes_the_step_as_long_as_the_one_seen(name, factor):
    hardware = bare_preset(name, devices_per_node=4)
    plan = search(problem(MODEL, hardware, JOB, 2**30)).plan
    seen = estimate_plan(plan, Correction(compute_factor=factor).of_description(MODEL, hardware), JOB, hardware)
    found = correction_of(plan, MODEL, hardware, JOB, peak_bytes=seen.memory.peak_bytes + 7, step_s=seen.time.step_s)
    assert (found.extra_bytes, found.compute_factor) == (7, pytest.approx(factor, rel=1e-6))


def test_correction_of_nothing_is_none_and_factor_has_bounds():
    plan = search(problem(MODEL, HARDWARE, JOB, 2**30)).plan
    assert correction_of(plan, MODEL, HARDWARE, JOB, peak_bytes=None, step_s=None) == Correction()
    found = [correction_of(plan, MODEL, HARDWARE, JOB, peak_bytes=None, step_s=step_s) for step_s in (1e-12, 1e9)]
    factors = [correction.compute_factor for correction in found]
    assert factors == [pytest.approx(0.05), pytest.approx(20.0)]
