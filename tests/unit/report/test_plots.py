"""Charts are files of the right type, and hold what was estimated."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest

from hf_osdp.planner.cost.moments import MemoryBreakdown
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.report.content import comparison_content, outcome_content, report_content
from hf_osdp.report.plan_file import PlanInputs
from hf_osdp.report.plots import _COLORS, moment_rows, report_chart, save_chart
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

MODEL, HARDWARE, JOB = transformer(), bare_preset("titan-rtx", devices_per_node=4), TrainingJob(global_batch_size=32)
LIMIT = 2 * least_memory(problem(MODEL, HARDWARE, JOB))
INPUTS = PlanInputs(description=MODEL, job=JOB, hardware=HARDWARE)
FOUND = search(problem(MODEL, HARDWARE, JOB, LIMIT))
STARTS = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<svg", ".html": b"<!DOCTYPE html>"}


def front():
    """Strategies that fit have points of their own."""
    asked = problem(MODEL, HARDWARE, JOB, LIMIT)
    rows = list(compare_strategies(asked))
    chart = report_chart({**comparison_content(asked, rows), "front": [outcome_content(FOUND.plan)]})
    text = json.dumps(chart.to_dict())
    assert all((f'"name": "{row.strategy.value}"' in text) == (row.result is not None) for row in rows)
    return chart


@pytest.mark.parametrize(
    ("chart", "suffix"),
    [
        (lambda: report_chart(report_content(FOUND.plan, INPUTS)), ".png"),
        (lambda: report_chart(report_content(FOUND.plan, replace(INPUTS, hardware=None))), ".svg"),
        (front, ".html"),
    ],
)
def test_save_chart_writes_the_format_of_the_suffix(tmp_path, chart, suffix):
    save_chart(chart(), tmp_path / f"chart{suffix}")
    content = (tmp_path / f"chart{suffix}").read_bytes()
    assert content.lstrip().startswith(STARTS[suffix]) and len(content) > 2000
    assert not re.findall(rb"<(?:script|link)[^>]*(?:src|href)=", content), "it needs no network"


def test_moment_rows_add_up_at_every_moment():
    estimated = report_content(FOUND.plan, INPUTS)["estimated"]
    rows, outside = moment_rows(estimated, 2**10), sum(estimated["outside"].values())
    for index, moment in enumerate(FOUND.memory.moments):
        mine = [row for row in rows if row["moment"] == index]
        assert sum(row["size"] for row in mine) * 2**10 == pytest.approx(moment.total_bytes + outside)
        assert {(row["unit"], row["phase"]) for row in mine} == {(moment.unit, moment.phase)}


def test_each_kind_of_bytes_has_a_colour():
    kinds = {field.name.replace("_", " ") for field in fields(MemoryBreakdown)}
    assert kinds <= set(_COLORS)
