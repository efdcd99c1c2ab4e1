"""An explanation agrees with the planner's own functions; its tables fit 100 columns whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.quantities import format_bytes, format_seconds
from hf_osdp.report.content import explanation_content
from hf_osdp.report.explain import BottleneckKind, Explanation, explain, stream_times
from hf_osdp.report.explain_tables import explanation_tables, peak_table, reason_table, stream_table
from hf_osdp.report.plan_file import PlanInputs
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem
from tests.unit.report.test_tables import rendered

MODEL = transformer(layers=12, hidden=256)
HARDWARE = bare_preset("titan-rtx", nodes=2, devices_per_node=4)
JOB = TrainingJob(global_batch_size=64)
LIMIT = int(1.3 * least_memory(problem(MODEL, HARDWARE, JOB)))


def best(hardware=HARDWARE, job=JOB, limit=2**40) -> Plan:
    return search(problem(MODEL, hardware, job, limit)).plan


def explained(plan: Plan, hardware=HARDWARE, job=JOB) -> Explanation:
    return explain(plan, PlanInputs(description=MODEL, job=job, hardware=hardware))


MIXED = best(limit=LIMIT)
EXPLANATION = explained(MIXED)


@pytest.mark.parametrize(
    "hardware", [HARDWARE, bare_preset("cpu", nodes=2, devices_per_node=4)], ids=["overlapping", "blocking"]
)
@pytest.mark.parametrize("times", [1.2, 100])
@pytest.mark.parametrize("every", [True, False])
def test_stream_times_add_up_to_the_step(hardware, times, every):
    job = replace(JOB, micro_batch_size=2, reduce_every_micro_step=every)
    plan = best(hardware, job, int(times * least_memory(problem(MODEL, hardware, job))))
    estimate = estimate_plan(plan, MODEL, job, hardware)
    time, streams = estimate.time, {stream.name: stream for stream in stream_times(estimate)}
    collectives = [streams.pop(name) for name in ("all-gather", "reduce-scatter", "all-reduce")]
    assert sum(s.total_s for s in collectives) == pytest.approx(time.total("communication_s"))
    assert sum(s.exposed_s for s in collectives) == pytest.approx(time.total("exposed_s"))
    others = {"compute": "compute_s", "copies": "copy_s", "optimizer": "optimizer_s"}
    expected = {name: time.total(term) for name, term in others.items()}
    assert {name: s.exposed_s for name, s in streams.items()} == pytest.approx(expected)
    assert all(0 <= s.exposed_s <= s.total_s * (1 + 1e-9) for s in collectives)


@pytest.mark.parametrize(("reserved", "margin"), [(0, 0.0), (2**20, 0.0), (0, 0.25)])
def test_reasons_cost_what_the_changed_plan_costs(reserved, margin):
    hardware = replace(HARDWARE, device=replace(HARDWARE.device, reserved_bytes=reserved)).with_margin(margin)
    limit = hardware.limit_for(LIMIT + reserved)
    plan = best(hardware, limit=limit)
    explanation = explained(plan, hardware)
    room, before = hardware.room_bytes(limit), explanation.estimate.time.step_s
    assert explanation.estimate.memory.peak_bytes + explanation.outside_bytes == plan.peak_bytes
    assert explanation.margin_bytes == limit - room
    assert sorted(i for r in explanation.reasons for i in r.row.units) == list(range(len(MODEL.units)))
    assert any(r.faster for r in explanation.reasons) and any(r.next_fitting for r in explanation.reasons)
    for reason in explanation.reasons:
        for other in filter(None, (reason.faster, reason.next_fitting)):
            chosen = list(plan.units)
            for i in reason.row.units:
                chosen[i] = UnitDecision.of(chosen[i].fqn, other.choice)
            after = estimate_plan(replace(plan, units=tuple(chosen)), MODEL, JOB, hardware)
            assert other.added_s == pytest.approx(after.time.step_s - before, abs=1e-12)
            assert other.peak_bytes == after.memory.peak_bytes + reserved == other.over_bytes + room
        if reason.faster:
            assert reason.faster.added_s < 0 < reason.faster.single_over_bytes <= reason.faster.over_bytes
        if reason.next_fitting:
            assert reason.next_fitting.added_s >= 0 >= reason.next_fitting.over_bytes


ALONE, ALONE_JOB = bare_preset("h100"), TrainingJob(global_batch_size=2**14)
ONE_SAMPLE = replace(JOB, micro_batch_size=1)
BINDING = {
    BottleneckKind.MEMORY: (lambda: MIXED, HARDWARE, JOB, lambda: best(limit=2**50)),
    BottleneckKind.BATCH: (best, HARDWARE, JOB, lambda: best(job=replace(JOB, global_batch_size=128))),
    BottleneckKind.MICRO_BATCH: (lambda: best(job=ONE_SAMPLE), HARDWARE, ONE_SAMPLE, best),
    BottleneckKind.NOTHING: (
        lambda: best(ALONE, ALONE_JOB, 2**50), ALONE, ALONE_JOB, lambda: best(ALONE, ALONE_JOB, 2**50),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BottleneckKind)
def test_binding_is_what_gains_most_where_it_is_loosened(kind):
    plan, hardware, job, loosened = BINDING[kind]
    plan, free = plan(), loosened()
    bottleneck = explained(plan, hardware, job).bottleneck
    assert bottleneck.kind is kind and bottleneck.gain == pytest.approx(free.samples_per_s / plan.samples_per_s)
    assert bottleneck.peak_bytes == (free.peak_bytes if kind is BottleneckKind.MEMORY else None)
    batches = {BottleneckKind.BATCH: 128, BottleneckKind.MICRO_BATCH: free.micro_batch_size}
    assert bottleneck.batch_size == batches.get(kind)


def test_explain_without_hardware_gives_bytes_alone():
    explanation = explained(MIXED, hardware=None)
    assert explanation.estimate.memory == estimate_plan(MIXED, MODEL, JOB).memory
    assert explanation.streams == () and explanation.reasons == () and explanation.bottleneck is None
    assert len(explanation_tables(explanation)) == 3
    alone, job = bare_preset("titan-rtx"), TrainingJob(global_batch_size=4)
    assert not any(r.faster or r.next_fitting for r in explained(best(alone, job, 2**32), alone, job).reasons)


def test_tables_and_content_hold_the_explanation_in_full():
    text, peak = "\n".join(rendered(peak_table(EXPLANATION))), EXPLANATION.estimate.memory.peak
    for name in peak.breakdown.__slots__:
        assert (name.replace("_", " ") in text) == (getattr(peak.breakdown, name) > 0)
    assert format_bytes(peak.total_bytes) in text and format_bytes(LIMIT - peak.total_bytes) in text
    lines = rendered(stream_table(EXPLANATION))
    for stream in EXPLANATION.streams:
        assert any(line.startswith(stream.name) and format_seconds(stream.exposed_s) in line for line in lines)
    flat = " ".join(" ".join(rendered(reason_table(EXPLANATION), width=400)).split())
    for reason in EXPLANATION.reasons:
        if other := reason.faster:
            assert f"{format_seconds(other.added_s)}, {format_bytes(other.over_bytes)} over the limit" in flat
        if other := reason.next_fitting:
            assert f"{format_seconds(other.added_s)}, peak {format_bytes(other.peak_bytes)}" in flat
    content = explanation_content(EXPLANATION)
    assert content["peak"]["total_bytes"] == MIXED.peak_bytes and content["step_s"] == MIXED.step_s
    assert [fqn for row in content["rows"] for fqn in row["units"]] == [unit.fqn for unit in MODEL.units]
    assert sum(row["bytes"]["parameters"] for row in content["rows"]) == content["peak"]["breakdown"]["parameters"]
    assert content["binds"]["kind"] == EXPLANATION.bottleneck.kind.value
    assert sum(stream["exposed_s"] for stream in content["streams"]) == pytest.approx(MIXED.step_s)
