"""Charts are files of the right type, and hold what was estimated."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import cache

import pytest

from hf_osdp.planner.search.compare import compare_strategies, frontier
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.report.plan_file import PlanInputs
from hf_osdp.report.plots import check_plot_path, frontier_chart, moment_rows, plan_chart, save_chart
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
    points = frontier(problem(MODEL, HARDWARE, JOB, 2**30), points=4)
    front = frontier_chart("a front", points, rows, LIMIT)
    text = json.dumps(front.to_dict())
    assert all((f'"name": "{row.strategy.value}"' in text) == (row.result is not None) for row in rows)
    estimate = INPUTS.estimate(FOUND.plan)
    return {
        "plan": plan_chart(FOUND.plan, INPUTS, estimate),
        "memory alone": plan_chart(FOUND.plan, replace(INPUTS, hardware=None), estimate),
        "front": front,
        "one point": frontier_chart("a point", [FOUND], rows[:1], LIMIT),
    }


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("plan", ".png"), ("front", ".html"), ("memory alone", ".svg"), ("one point", ".svg"), ("front", ".svg")],
)
def test_save_chart_writes_the_format_of_the_suffix(tmp_path, name, suffix):
    content = save_chart(charts()[name], tmp_path / f"chart{suffix}").read_bytes()
    assert content.lstrip().startswith(STARTS[suffix]) and len(content) > 2000
    assert not re.findall(rb"<(?:script|link)[^>]*(?:src|href)=", content), "it needs no network"


def test_moment_rows_add_up_at_every_moment():
    rows = moment_rows(FOUND.memory, 2**20, 2**10)
    for index, moment in enumerate(FOUND.memory.moments):
        mine = [row for row in rows if row["moment"] == index]
        assert sum(row["size"] for row in mine) * 2**10 == pytest.approx(moment.total_bytes + 2**20)
        assert {(row["unit"], row["phase"]) for row in mine} == {(moment.unit, moment.phase)}


def test_check_plot_path_refuses_other_files_and_missing_packages(tmp_path, monkeypatch):
    for name, message in (("a.pdf", "use one of .png, .svg, .html"), ("a", "use one of"), ("none/a.png", "not exist")):
        with pytest.raises(ValueError, match=message):
            check_plot_path(tmp_path / name)
    for package in ("altair", "vl_convert"):
        with monkeypatch.context() as without, pytest.raises(ValueError, match=r"pip install 'hf_osdp\[plot\]'"):
            without.setitem(sys.modules, package, None)
            check_plot_path(tmp_path / "a.png")
