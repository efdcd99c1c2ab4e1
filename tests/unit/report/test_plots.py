"""Charts are files of the right type, and hold what was estimated."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import pytest

from hf_osdp.planner.search.compare import compare_strategies, frontier
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.report.content import comparison_content, outcome_content, report_content
from hf_osdp.report.plan_file import PlanInputs
from hf_osdp.report.plots import moment_rows, report_chart, save_chart
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


@cache
def charts() -> dict:
    rows = list(compare_strategies(problem(MODEL, HARDWARE, JOB, LIMIT)))
    points = [outcome_content(result.plan) for result in frontier(problem(MODEL, HARDWARE, JOB, 2**30))]
    compared = comparison_content(problem(MODEL, HARDWARE, JOB, LIMIT), rows)
    front = report_chart({**compared, "front": points})
    text = json.dumps(front.to_dict())
    assert all((f'"name": "{row.strategy.value}"' in text) == (row.result is not None) for row in rows)
    return {
        "plan": report_chart(report_content(FOUND.plan, INPUTS)),
        "memory alone": report_chart(report_content(FOUND.plan, replace(INPUTS, hardware=None))),
        "front": front,
    }


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("plan", ".png"), ("front", ".html"), ("memory alone", ".svg")],
)
def test_save_chart_writes_the_format_of_the_suffix(tmp_path, name, suffix):
    save_chart(charts()[name], tmp_path / f"chart{suffix}")
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
