"""Rounds of trying and planning again, with observations made up: which plan runs, when it ends, what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.errors import InfeasibleError
from hf_osdp.measurement.step_meter import Observation
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.hardware import Collective, CollectiveTiming
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.preparation.recalibrate import MOST_ROUNDS, Round, recalibrate
from tests.helpers.descriptions import transformer

RESERVED = 1000
CPU = preset("cpu", devices_per_node=4)
HARDWARE = replace(CPU, device=replace(CPU.device, reserved_bytes=RESERVED))
PROBLEM = PlanningProblem(
    description=transformer(), hardware=HARDWARE, job=TrainingJob(global_batch_size=8), memory_limit_bytes=4 * 2**20
)
FIRST = search(PROBLEM).plan
LIMIT = PROBLEM.memory_limit_bytes - RESERVED


def needs(plan: Plan, *, more_bytes: int = 0, slower: float = 1.0) -> Observation:
    """What a machine would show that needs more than the first estimate says."""
    estimate = estimate_plan(plan, PROBLEM.description, PROBLEM.job, HARDWARE)
    peak_bytes = estimate.memory.peak_bytes + more_bytes
    return Observation(steps=6, median_step_s=slower * estimate.time.step_s, peak_bytes=peak_bytes)


RATES = {Collective.ALL_REDUCE: 1e-12, Collective.ALL_GATHER: 1e-6, Collective.REDUCE_SCATTER: 1e-6}
SLOW_SHARDS = tuple(
    CollectiveTiming(collective=kind, group_size=4, latency_s=0.0, seconds_per_byte=rate)
    for kind, rate in RATES.items()
)
OUT_OF_MEMORY = Observation(steps=0, median_step_s=None, peak_bytes=None, out_of_memory=True)


def run(probe) -> tuple[Plan, tuple[Round, ...], PlanningProblem]:
    return recalibrate(FIRST, PROBLEM, probe)


def test_recalibrate_tries_one_plan_where_estimates_hold():
    plan, rounds, problem = run(needs)
    assert len(rounds) == 1 and rounds[0].fits
    assert plan.fingerprint == FIRST.fingerprint
    assert rounds[0].correction.extra_bytes == 0 and rounds[0].correction.compute_factor == pytest.approx(1, rel=1e-6)
    assert plan.peak_bytes == FIRST.peak_bytes and plan.step_s == pytest.approx(FIRST.step_s)
    assert problem.job.correction_bytes == 0


def test_recalibrate_replaces_plan_above_limit_or_out_of_memory():
    more = LIMIT - needs(FIRST).peak_bytes + 1
    plan, rounds, problem = run(lambda tried: needs(tried, more_bytes=more))
    assert [past.fits for past in rounds] == [False, True]
    assert rounds[0].observed.peak_bytes == LIMIT + 1
    assert plan.fingerprint != FIRST.fingerprint and plan.fingerprint == rounds[1].plan.fingerprint
    assert rounds[1].estimated_peak_bytes == rounds[1].observed.peak_bytes, "the correction was right for all plans"
    assert problem.job.correction_bytes == more
    assert plan.peak_bytes == rounds[1].observed.peak_bytes + RESERVED
    plan, rounds, _ = run(lambda tried: OUT_OF_MEMORY if tried.fingerprint == FIRST.fingerprint else needs(tried))
    assert not rounds[0].fits and rounds[0].correction.compute_factor == 1 and plan.fingerprint != FIRST.fingerprint
    assert any(past.plan.fingerprint == plan.fingerprint and past.fits for past in rounds)


def test_recalibrate_changes_the_plan_by_observed_times():
    """Where gathers and reduce-scatters take long and all-reduces do not, what fits is replicated."""
    assert all(unit.shard_size > 1 for unit in FIRST.units)
    slow = replace(needs(FIRST, slower=50.0), timings=SLOW_SHARDS)
    _, rounds, problem = run(lambda tried: slow if tried == FIRST else replace(needs(tried), timings=SLOW_SHARDS))
    assert problem.hardware.timing(Collective.ALL_REDUCE, 4) == SLOW_SHARDS[0]
    assert any(unit.shard_size == 1 for unit in rounds[1].plan.units)


def test_recalibrate_returns_the_fastest_that_fits_and_tries_none_twice():
    more = LIMIT - needs(FIRST).peak_bytes + 1
    seen: list[str] = []

    def probe(tried: Plan) -> Observation:
        seen.append(tried.fingerprint)
        return needs(tried, more_bytes=more, slower=1.0 + len(seen))

    plan, rounds, _ = run(probe)
    fitting = [past for past in rounds if past.fits]
    assert plan.fingerprint == min(fitting, key=lambda past: past.observed.median_step_s).plan.fingerprint
    assert len(seen) == len(set(seen)) <= MOST_ROUNDS, "no plan is tried twice"


def test_recalibrated_plan_states_what_the_corrected_estimates_prove():
    """Nothing that was proven by earlier estimates, neither of the plan that is found again, nor of another."""
    first = replace(FIRST, simplified="0.50 % slower than the fastest plan found, which has 5 layouts instead of 4")
    plan, _, problem = recalibrate(first, PROBLEM, needs)
    assert plan == search(problem).plan

    # by estimates the first plan is not the fastest, as measured it is
    plan, _, problem = run(
        lambda tried: replace(needs(tried, slower=1.0 if tried == FIRST else 50.0), timings=SLOW_SHARDS)
    )
    assert plan.fingerprint == FIRST.fingerprint != search(problem).plan.fingerprint
    assert FIRST.proven_optimal and not plan.proven_optimal and plan.gap is None


def test_recalibrate_raises_infeasible_where_no_tried_plan_fits():
    with pytest.raises(InfeasibleError, match=r"fits 4.0 MiB per device: plan \w+ needed .* estimated") as caught:
        run(lambda tried: Observation(steps=6, median_step_s=0.1, peak_bytes=LIMIT + 2**20))
    assert caught.value.least_peak_bytes == LIMIT + 2**20 + RESERVED
    with pytest.raises(InfeasibleError, match="needed more memory than is available"):
        run(lambda tried: OUT_OF_MEMORY)
    tried: list[Plan] = []
    with pytest.raises(InfeasibleError, match="No plan that was tried fits"):
        run(lambda plan: tried.append(plan) or replace(needs(plan), peak_bytes=LIMIT + 1))
    assert len({plan.fingerprint for plan in tried}) == MOST_ROUNDS
