"""An explanation agrees with the planner's own functions; its tables fit 100 columns whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.errors import InfeasibleError, PlanError
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.files import plain
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.space import search_spaces
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.report.content import report_content, unit_rows
from hf_osdp.report.explain import BINDING, explain, prove
from hf_osdp.report.explanations import proof_lines
from hf_osdp.report.plan_file import PlanInputs
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MODEL = transformer(layers=12, hidden=256)
HARDWARE = bare_preset("titan-rtx", nodes=2, devices_per_node=4)
JOB = TrainingJob(global_batch_size=64)
LIMIT = int(1.3 * least_memory(problem(MODEL, HARDWARE, JOB)))


def best(hardware=HARDWARE, job=JOB, limit=2**40) -> Plan:
    return search(problem(MODEL, hardware, job, limit)).plan


def inputs(hardware=HARDWARE, job=JOB) -> PlanInputs:
    return PlanInputs(description=MODEL, job=job, hardware=hardware)


@pytest.mark.parametrize(
    "hardware", [HARDWARE, bare_preset("cpu", nodes=2, devices_per_node=4)], ids=["overlapping", "blocking"]
)
@pytest.mark.parametrize(("times", "every"), [(1.2, True), (100, False)])
def test_stream_times_add_up_to_the_step(hardware, times, every):
    job = replace(JOB, micro_batch_size=2, reduce_every_micro_step=every)
    plan = best(hardware, job, int(times * least_memory(problem(MODEL, hardware, job))))
    estimate = estimate_plan(plan, MODEL, job, hardware)
    content = report_content(plan, inputs(hardware, job))["estimated"]
    time, streams = estimate.time, {stream["name"]: stream for stream in content["streams"]}
    assert sum(stream["exposed_s"] for stream in content["streams"]) == pytest.approx(plan.step_s)
    collectives = [streams.pop(name) for name in ("all-gather", "reduce-scatter", "all-reduce")]
    assert sum(s["total_s"] for s in collectives) == pytest.approx(time.total("communication_s"))
    assert sum(s["exposed_s"] for s in collectives) == pytest.approx(time.total("exposed_s"))
    others = {"compute": "compute_s", "copies": "copy_s", "optimizer": "optimizer_s"}
    expected = {name: time.total(term) for name, term in others.items()}
    assert {name: s["exposed_s"] for name, s in streams.items()} == pytest.approx(expected)
    assert all(0 <= s["exposed_s"] <= s["total_s"] * (1 + 1e-9) for s in collectives)


@pytest.mark.parametrize(("reserved", "margin"), [(0, 0.0), (2**20, 0.0), (0, 0.25)])
def test_reasons_cost_what_the_changed_plan_costs(reserved, margin):
    hardware = replace(HARDWARE, device=replace(HARDWARE.device, reserved_bytes=reserved)).with_margin(margin)
    limit = hardware.limit_for(LIMIT + reserved)
    plan = best(hardware, limit=limit)
    estimated, room = explain(plan, inputs(hardware))["estimated"], hardware.room_bytes(limit)
    assert estimated["peak_bytes"] + sum(estimated["outside"].values()) == plan.peak_bytes
    assert estimated["margin_bytes"] == limit - room
    rows, units = estimated["units"], unit_rows(plan, MODEL)
    assert any(row["faster"] for row in rows) and any(row["next_fitting"] for row in rows)
    *_, space = search_spaces(problem(MODEL, hardware, JOB, limit), plan.batch)
    for row, indices in zip(rows, units, strict=True):
        for other in filter(None, (row["faster"], row["next_fitting"])):
            (choice,) = [layout for layout in space[indices[0]] if plain(layout) == other["choice"]]
            chosen = list(plan.units)
            for i in indices:
                chosen[i] = UnitDecision.of(chosen[i].fqn, choice)
            after = estimate_plan(replace(plan, units=tuple(chosen)), MODEL, JOB, hardware)
            assert other["added_s"] == pytest.approx(after.time.step_s - estimated["step_s"], abs=1e-12)
            assert other["peak_bytes"] == after.memory.peak_bytes + reserved == other["over_bytes"] + room
        if faster := row["faster"]:
            assert faster["added_s"] < 0 < faster["over_bytes"] and not faster["fits"]
        if fitting := row["next_fitting"]:
            assert fitting["added_s"] >= 0 >= fitting["over_bytes"] and fitting["fits"]


ALONE, ALONE_JOB = bare_preset("h100"), TrainingJob(global_batch_size=2**14)


@pytest.mark.parametrize(("kind", "hardware", "job", "limit", "loosened"), [
    ("memory", HARDWARE, JOB, LIMIT, {"limit": 2**48}),
    ("batch", HARDWARE, JOB, 2**40, {"job": replace(JOB, global_batch_size=128)}),
    ("micro-batch", HARDWARE, replace(JOB, micro_batch_size=1), 2**40, {"job": JOB}),
    ("nothing", ALONE, ALONE_JOB, 2**48, {}),
])  # fmt: skip
def test_binding_is_what_gains_most_where_it_is_loosened(kind, hardware, job, limit, loosened):
    asked = {"hardware": hardware, "job": job, "limit": limit}
    plan, free = best(**asked), best(**{**asked, **loosened})
    found = explain(plan, inputs(hardware, job))["bottleneck"]
    assert found["kind"] == kind and found["gain"] == pytest.approx(free.samples_per_s / plan.samples_per_s)
    if kind == "memory":
        assert found["peak_bytes"] == free.peak_bytes
    batches = {"batch": 128, "micro-batch": free.micro_batch_size}
    assert kind not in batches or found["batch_size"] == batches[kind]


@pytest.mark.parametrize("simplicity", [0.0, 0.05])
def test_proof_bounds_every_batch_and_names_the_moments_at_the_limit(simplicity):
    asked = replace(problem(MODEL, HARDWARE, JOB, LIMIT), simplicity=simplicity)
    plan, bound_s = search(asked).plan, search(replace(asked, simplicity=0.0)).time.step_s
    content = prove(plan, PlanInputs.of(asked))
    assert content["bound_s"] == pytest.approx(bound_s) and content["gap"] == pytest.approx(1 - bound_s / plan.step_s)
    sizes = [one["micro_batch_size"] for one in content["batches"]]
    assert sizes == list(JOB.micro_batch_sizes(HARDWARE.world_size))
    for one in content["batches"]:
        fixed = replace(asked, job=replace(JOB, micro_batch_size=one["micro_batch_size"]), simplicity=0.0)
        try:
            assert one["bound_s"] <= search(fixed).time.step_s * (1 + 1e-9)
        except InfeasibleError:
            assert one["bound_s"] is None
    free = [one["free_bytes"] for one in content["binding"]]
    assert len(free) == BINDING and free == sorted(free) and free[0] == asked.room_bytes - plan.peak_bytes
    lines = proof_lines(content)
    assert len(lines) <= 10 and any(line.startswith("Gap: 0") for line in lines) == (content["gap"] < 1e-6)
    assert any(line.startswith("Simpler than the fastest: ") for line in lines) == bool(plan.simplified)


def test_nothing_is_proven_of_a_plan_that_does_not_fit():
    asked = problem(MODEL, HARDWARE, JOB, LIMIT)
    plan, tight = search(asked).plan, search(replace(asked, memory_limit_bytes=int(LIMIT / 1.2))).plan
    with pytest.raises(PlanError, match=r"The plan needs .*; plan again"):
        prove(replace(plan, memory_limit_bytes=tight.memory_limit_bytes), PlanInputs.of(asked))
    with pytest.raises(InfeasibleError):
        prove(replace(plan, memory_limit_bytes=int(LIMIT / 1.4)), PlanInputs.of(asked))
