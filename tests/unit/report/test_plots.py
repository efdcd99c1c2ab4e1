"""Charts are files of the right type, and hold what was estimated."""

from __future__ import annotations

import json
import re
import sys
from functools import cache

import pytest

from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.search.compare import compare_strategies, frontier
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.report.explain import stream_times
from hf_osdp.report.plots import check_plot_path, frontier_chart, moment_rows, plan_chart, save_chart
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

MODEL = transformer()
HARDWARE = bare_preset("titan-rtx", devices_per_node=4)
JOB = TrainingJob(global_batch_size=32)
LIMIT = 2 * least_memory(problem(MODEL, HARDWARE, JOB))
FOUND = search(problem(MODEL, HARDWARE, JOB, LIMIT))
STREAMS = stream_times(FOUND.plan, MODEL, JOB, HARDWARE)
STARTS = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<svg", ".html": b"<!DOCTYPE html>"}


@cache
def charts() -> dict:
    rows = compare_strategies(problem(MODEL, HARDWARE, JOB, LIMIT))
    return {
        "plan": plan_chart("a plan", FOUND.memory, 2**20, LIMIT, STREAMS),
        "memory alone": plan_chart("no hardware", FOUND.memory, 0, None, ()),
        "front": frontier_chart("a front", frontier(problem(MODEL, HARDWARE, JOB, 2**30), points=4), rows, LIMIT),
        "one point": frontier_chart("a point", [FOUND], rows[:1], LIMIT),
    }


@pytest.mark.parametrize(
    ("name", "suffix"),
    [*((name, ".svg") for name in ("plan", "memory alone", "front", "one point")), ("plan", ".png"), ("front", ".png"), ("plan", ".html")],
)
def test_files_are_of_their_type(tmp_path, name, suffix):
    path = save_chart(charts()[name], tmp_path / f"chart{suffix}")
    content = path.read_bytes()
    assert content.lstrip().startswith(STARTS[suffix])
    assert len(content) > 2000


def test_html_needs_no_network(tmp_path):
    text = save_chart(charts()["front"], tmp_path / "chart.html").read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link)[^>]*(?:src|href)=", text)


def test_every_moment_adds_up_and_nothing_is_left_out():
    rows = moment_rows(FOUND.memory, 2**20, 2**10)
    for index, moment in enumerate(FOUND.memory.moments):
        mine = [row for row in rows if row["moment"] == index]
        assert sum(row["size"] for row in mine) * 2**10 == pytest.approx(moment.total_bytes + 2**20)
        assert {(row["unit"], row["phase"]) for row in mine} == {(moment.unit, moment.phase)}


def test_the_front_shows_every_strategy_that_fits():
    rows = compare_strategies(problem(MODEL, HARDWARE, JOB, LIMIT))
    text = json.dumps(frontier_chart("", [FOUND], rows, LIMIT).to_dict())
    for row in rows:
        assert (f'"name": "{row.strategy.value}"' in text) == (row.result is not None)


@pytest.mark.parametrize(("name", "message"), [("a.pdf", "use one of .png, .svg, .html"), ("a", "use one of"), ("none/a.png", "no folder")])
def test_wrong_files_are_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        check_plot_path(tmp_path / name)


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=r"pip install 'hf_osdp\[plot\]'"):
        check_plot_path(tmp_path / "a.png")
