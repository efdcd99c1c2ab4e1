"""An explanation agrees with the planner's own functions."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.report.explain import Binds, explain, stream_times
from hf_osdp.report.plan_file import PlanInputs
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MODEL = transformer(layers=12, hidden=256)
HARDWARE = bare_preset("titan-rtx", nodes=2, devices_per_node=4)
JOB = TrainingJob(global_batch_size=64)
LIMIT = int(1.3 * least_memory(problem(MODEL, HARDWARE, JOB)))
MIXED = search(problem(MODEL, HARDWARE, JOB, LIMIT)).plan


def with_row(plan: Plan, units, choice) -> Plan:
    """Return the plan with another layout for some units."""
    return replace(plan, units=tuple(UnitDecision(fqn=u.fqn, **asdict(choice)) if i in units else u for i, u in enumerate(plan.units)))


def explained(plan: Plan, hardware=HARDWARE, job=JOB):
    return explain(plan, PlanInputs(description=MODEL, job=job, hardware=hardware))


def best(hardware=HARDWARE, job=JOB, limit=2**40) -> Plan:
    return search(problem(MODEL, hardware, job, limit)).plan


@pytest.mark.parametrize("hardware", [HARDWARE, bare_preset("cpu", nodes=2, devices_per_node=4)], ids=["overlapping", "blocking"])
@pytest.mark.parametrize("times", [1.2, 100])
@pytest.mark.parametrize("every", [True, False])
def test_stream_times_add_up_to_the_step(hardware, times, every):
    job = replace(JOB, micro_batch_size=2, reduce_every_micro_step=every)
    plan = search(problem(MODEL, hardware, job, int(times * least_memory(problem(MODEL, hardware, job))))).plan
    time = estimate_plan(plan, MODEL, job, hardware).time
    streams = {stream.name: stream for stream in stream_times(plan, MODEL, job, hardware)}
    collectives = [streams.pop(name) for name in ("all-gather", "reduce-scatter", "all-reduce")]
    assert sum(s.total_s for s in collectives) == pytest.approx(time.total("communication_s"))
    assert sum(s.exposed_s for s in collectives) == pytest.approx(time.total("exposed_s"))
    assert {name: s.exposed_s for name, s in streams.items()} == pytest.approx(
        {"compute": time.total("compute_s"), "copies": time.total("copy_s"), "optimizer": time.total("optimizer_s")}
    )
    assert all(0 <= s.exposed_s <= s.total_s * (1 + 1e-9) for s in collectives)


def test_reasons_cost_what_the_changed_plan_costs():
    before = estimate_plan(MIXED, MODEL, JOB, HARDWARE).time.step_s
    reasons = explained(MIXED).reasons
    seen = [(r.row.units, other) for r in reasons for other in (r.quicker, r.next_fitting) if other is not None]
    assert len(seen) > 3
    for units, other in seen:
        after = estimate_plan(with_row(MIXED, units, other.choice), MODEL, JOB, HARDWARE)
        assert other.added_s == pytest.approx(after.time.step_s - before, abs=1e-12)
        assert other.peak_bytes == after.memory.peak_bytes
        assert other.over_bytes == after.memory.peak_bytes - LIMIT


def test_reasons_cover_the_plan_and_quicker_layouts_do_not_fit():
    reasons = explained(MIXED).reasons
    assert sorted(i for r in reasons for i in r.row.units) == list(range(len(MODEL.units)))
    assert any(r.quicker for r in reasons)
    for reason in reasons:
        if reason.quicker:
            assert reason.quicker.added_s < 0 < reason.quicker.over_bytes
            assert 0 < reason.quicker.single_over_bytes <= reason.quicker.over_bytes
        if reason.next_fitting:
            assert reason.next_fitting.added_s >= 0 >= reason.next_fitting.over_bytes


def test_binding_is_memory_where_no_limit_is_faster():
    binding, free = explained(MIXED).binding, best(limit=2**50)
    assert binding.kind is Binds.MEMORY
    assert binding.gain == pytest.approx(free.samples_per_s / MIXED.samples_per_s)
    assert binding.peak_bytes == free.peak_bytes > LIMIT


def test_binding_is_the_batch_where_memory_does_not_bind():
    free, twice = best(), best(job=replace(JOB, global_batch_size=128))
    binding = explained(free).binding
    assert (binding.kind, binding.batch_size) == (Binds.BATCH, 128)
    assert binding.gain == pytest.approx(twice.samples_per_s / free.samples_per_s)


def test_binding_is_a_fixed_micro_batch_that_is_too_small():
    job = replace(JOB, micro_batch_size=1)
    binding = explained(best(job=job), job=job).binding
    assert (binding.kind, binding.batch_size) == (Binds.MICRO_BATCH, best().micro_batch_size)


def test_nothing_binds_one_device_whose_batch_is_all_compute():
    alone, job = bare_preset("h100"), TrainingJob(global_batch_size=2**14)
    assert explained(best(alone, job, 2**50), alone, job).binding.kind is Binds.NOTHING


def test_explain_without_hardware_gives_bytes_alone():
    explanation = explained(MIXED, hardware=None)
    assert explanation.estimate.memory == estimate_plan(MIXED, MODEL, JOB).memory
    assert explanation.streams == () and explanation.reasons == () and explanation.binding is None


def test_explain_counts_what_the_device_reserves_once():
    reserved = 2**20
    hardware = replace(HARDWARE, device=replace(HARDWARE.device, reserved_bytes=reserved))
    plan = best(hardware, limit=LIMIT)
    explanation = explained(plan, hardware)
    assert explanation.estimate.memory.peak_bytes + explanation.outside_bytes == plan.peak_bytes
    for reason in explanation.reasons:
        for other in filter(None, (reason.quicker, reason.next_fitting)):
            changed = estimate_plan(with_row(plan, reason.row.units, other.choice), MODEL, JOB, hardware)
            assert other.over_bytes == changed.memory.peak_bytes + reserved - LIMIT


def test_explain_keeps_the_margin_free():
    hardware = HARDWARE.with_margin(0.25)
    limit = hardware.limit_for(LIMIT)
    explanation = explained(best(hardware, limit=limit), hardware)
    assert explanation.margin_bytes == limit - hardware.room_bytes(limit) > 0
    for reason in explanation.reasons:
        if reason.next_fitting:
            assert reason.next_fitting.peak_bytes <= hardware.room_bytes(limit)
        if reason.quicker:
            assert reason.quicker.over_bytes == reason.quicker.peak_bytes - hardware.room_bytes(limit)


def test_reasons_are_none_on_one_device():
    alone, job = bare_preset("titan-rtx"), TrainingJob(global_batch_size=4)
    reasons = explained(best(alone, job, 2**32), alone, job).reasons
    assert all(reason.quicker is None and reason.next_fitting is None for reason in reasons)
