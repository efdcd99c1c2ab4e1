"""Tables of an explanation fit 100 columns whole, and say what it says."""

from __future__ import annotations

import pytest

from hf_osdp.planner.cost.memory import MemoryBreakdown
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.search.compare import frontier
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.search.what_if import Answer, answer, twice_the_memory
from hf_osdp.quantities import format_bytes, format_seconds
from hf_osdp.report.content import answers_content, comparison_content, explanation_content
from hf_osdp.report.explain import Binding, Binds, explain
from hf_osdp.report.explain_tables import (
    binding_text,
    explanation_tables,
    peak_table,
    reason_table,
    stream_table,
)
from hf_osdp.report.plan_file import PlanInputs
from hf_osdp.report.run_tables import simulation_table
from hf_osdp.report.tables import frontier_table, what_if_table
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem
from tests.unit.report.test_tables import assert_whole, named_like, rendered

MODEL = named_like("bert.encoder.layer", "BertLayer")
HARDWARE = bare_preset("a100-40", nodes=16, devices_per_node=8)
JOB = TrainingJob(global_batch_size=1024)
LIMIT = int(1.2 * least_memory(problem(MODEL, HARDWARE, JOB)))
FOUND = search(problem(MODEL, HARDWARE, JOB, LIMIT))
EXPLANATION = explain(FOUND.plan, PlanInputs(description=MODEL, job=JOB, hardware=HARDWARE))


@pytest.mark.parametrize("table", explanation_tables(EXPLANATION)[:-1], ids=lambda table: table.title)
def test_explanation_tables_fit_100_columns(table):
    assert_whole(rendered(table))


def test_peak_table_has_each_kind_and_the_sum():
    text = "\n".join(rendered(peak_table(EXPLANATION)))
    peak = EXPLANATION.estimate.memory.peak
    for name in peak.breakdown.__slots__:
        assert (name.replace("_", " ") in text) == (getattr(peak.breakdown, name) > 0)
    assert format_bytes(peak.total_bytes) in text and format_bytes(LIMIT - peak.total_bytes) in text


def test_stream_table_has_what_each_stream_takes():
    lines = rendered(stream_table(EXPLANATION))
    for stream in EXPLANATION.streams:
        (line,) = [line for line in lines if line.startswith(stream.name)]
        assert format_seconds(stream.total_s) in line and format_seconds(stream.exposed_s) in line


def test_reason_table_has_both_alternatives():
    flat = " ".join(" ".join(rendered(reason_table(EXPLANATION), width=400)).split())
    assert any(r.quicker for r in EXPLANATION.reasons) and any(r.next_fitting for r in EXPLANATION.reasons)
    for reason in EXPLANATION.reasons:
        if reason.quicker:
            assert f"{format_seconds(reason.quicker.added_s)}, {format_bytes(reason.quicker.over_bytes)} over the limit" in flat
        if reason.next_fitting:
            assert f"{format_seconds(reason.next_fitting.added_s)}, peak {format_bytes(reason.next_fitting.peak_bytes)}" in flat


@pytest.mark.parametrize("kind", Binds)
def test_every_binding_is_a_sentence(kind):
    text = binding_text(Binding(kind=kind, gain=1.5, peak_bytes=2**33, batch_size=128), FOUND.plan)
    assert text.startswith("What binds: ") and text.endswith(".")
    assert ("1.50x" in text) == (kind is not Binds.NOTHING)


def test_frontier_table_marks_the_fastest_within_the_limit():
    front = frontier(problem(MODEL, HARDWARE, JOB, 2**30), points=4, at=[LIMIT])
    lines = rendered(frontier_table(front, LIMIT))
    assert_whole(lines)
    (marked,) = [line for line in lines if line.startswith("*")]
    best = max((r.plan for r in front if r.plan.peak_bytes <= LIMIT), key=lambda plan: plan.samples_per_s)
    assert format_bytes(best.peak_bytes) in marked
    content = comparison_content(HARDWARE, LIMIT, (), front)
    assert [point["peak_bytes"] for point in content["frontier"]] == [r.plan.peak_bytes for r in front]


def test_what_if_table_counts_gains_from_the_first_row():
    case = problem(MODEL, HARDWARE, JOB, LIMIT)
    rows = [
        answer("now", case, "limit 12.0 MiB"),
        answer("twice the memory", *twice_the_memory(case)),
        Answer(question="largest width", change="", reason="not even 1 heads fit"),
    ]
    lines = rendered(what_if_table(rows))
    assert_whole(lines)
    gain = rows[1].tokens_per_s / rows[0].tokens_per_s
    assert any(line.endswith(f"{gain:.2f}x") for line in lines)
    assert "not even 1" in " ".join(lines)
    content = answers_content(rows)["answers"]
    assert content[1]["result"]["samples_per_s"] == rows[1].result.plan.samples_per_s
    assert content[2]["result"] is None


def test_simulation_table_gives_the_error_of_each_kind():
    estimated = EXPLANATION.estimate.memory.peak
    simulated = MemoryBreakdown(parameters=estimated.breakdown.parameters, activations=2 * estimated.breakdown.activations)
    lines = rendered(simulation_table(estimated, 2 * estimated.total_bytes, simulated))
    assert_whole(lines)
    ends = {line.split()[0]: line.split()[-2:] for line in lines if "%" in line}
    assert ends["parameters"] == ["+0.0", "%"]
    assert ends["activations"] == ["-50.0", "%"]
    assert ends["peak"] == ["-50.0", "%"]


def test_content_holds_the_explanation_in_full():
    content = explanation_content(EXPLANATION)
    assert content["peak"]["total_bytes"] == FOUND.plan.peak_bytes
    assert content["step_s"] == FOUND.plan.step_s
    assert [fqn for row in content["rows"] for fqn in row["units"]] == [unit.fqn for unit in MODEL.units]
    assert sum(row["bytes"]["parameters"] for row in content["rows"]) == content["peak"]["breakdown"]["parameters"]
    assert content["binds"]["kind"] == EXPLANATION.binding.kind.value
    assert sum(stream["exposed_s"] for stream in content["streams"]) == pytest.approx(FOUND.plan.step_s)
