"""The report is plain JSON, whole on disk, and says what the plan says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.hardware import Collective, CollectiveTiming
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.planner.search.search import search
from hf_osdp.report.content import REPORT_FILE, report_content, write_report
from hf_osdp.report.plan_file import PlanInputs
from tests.helpers.descriptions import transformer
from tests.helpers.problems import problem

DESCRIPTION, JOB, LIMIT = transformer(), TrainingJob(global_batch_size=8), 4 * 2**20
MEASURED = CollectiveTiming(collective=Collective.ALL_REDUCE, group_size=4, latency_s=1e-3, seconds_per_byte=1e-9)
HARDWARE = replace(preset("cpu", devices_per_node=4), timings=(MEASURED,))


def content(*, hardware=HARDWARE, measured: dict | None = None, compared: bool = True) -> dict:
    plan = search(problem(DESCRIPTION, HARDWARE, JOB, LIMIT)).plan
    return report_content(
        plan,
        PlanInputs(description=DESCRIPTION, job=JOB, hardware=hardware),
        estimate_plan(plan, DESCRIPTION, JOB, hardware),
        planning_s=0.125,
        comparison=compare_strategies(problem(DESCRIPTION, HARDWARE, JOB, LIMIT)) if compared else None,
        measured=measured,
    )


def test_report_is_read_back_as_it_was_written(tmp_path):
    report = content(measured={"steps": 10, "median_step_s": 0.5, "peak_bytes": 10**6})
    path = write_report(report, tmp_path)
    assert path == tmp_path / REPORT_FILE
    assert [p.name for p in tmp_path.iterdir()] == [REPORT_FILE]
    assert json.loads(path.read_text()) == report


def test_plan_in_the_report_can_be_run_again():
    report = content()
    plan = Plan.from_json(json.dumps(report["plan"]))
    plan.check(DESCRIPTION, 4)
    assert plan.peak_bytes == report["estimated"]["peak_bytes"]


def test_estimate_in_the_report_adds_up():
    estimated = content()["estimated"]
    assert sum(estimated["peak_breakdown"].values()) == estimated["peak_bytes"] <= LIMIT
    terms = estimated["step_breakdown"]
    assert terms["compute_s"] + terms["exposed_s"] + terms["copy_s"] + terms["optimizer_s"] == pytest.approx(estimated["step_s"])


def test_report_has_reserved_memory_of_cuda_devices():
    assert content()["estimated"]["reserved"] is None
    reserved = content(hardware=preset("a100-40", devices_per_node=4))["estimated"]["reserved"]
    assert reserved["peak_reserved_bytes"] >= reserved["peak_allocated_bytes"] > 0


def test_every_strategy_has_figures_or_a_reason():
    rows = content()["strategies"]
    assert [row["strategy"] for row in rows] == ["osdp", "fsdp", "ddp", "zero2", "hsdp"]
    without = [row for row in rows if "reason" in row]
    assert 0 < len(without) < 5
    assert all(row["least_peak_bytes"] > LIMIT for row in without)
    assert all(row["peak_bytes"] <= LIMIT and row["samples_per_s"] > 0 for row in rows if "reason" not in row)


def test_hardware_in_the_report_has_its_source_and_measurements():
    hardware = content()["hardware"]
    assert hardware["source"] == HARDWARE.device.source
    assert hardware["collectives"] == [{"collective": "all_reduce", "group_size": 4, "latency_s": 1e-3, "seconds_per_byte": 1e-9}]
    assert hardware["flops_per_s"]["float32"] == HARDWARE.device.flops_per_s["float32"]


def test_what_is_not_known_is_null():
    report = content(hardware=None, compared=False)
    assert (report["hardware"], report["strategies"], report["measured"]) == (None, None, None)
    assert (report["estimated"]["step_s"], report["estimated"]["step_breakdown"]) == (None, None)
    assert json.loads(json.dumps(report)) == report


def test_report_names_versions_and_date():
    report = content(compared=False)
    assert set(report["versions"]) == {"python", "system", "hf_osdp", "torch", "accelerate", "transformers"}
    assert report["versions"]["torch"][0].isdigit()
    assert report["date"].endswith("+00:00")


def test_report_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path):
    write_report({"kept": True}, tmp_path)
    with pytest.raises(TypeError):
        write_report({"broken": object()}, tmp_path)
    assert json.loads((tmp_path / REPORT_FILE).read_text()) == {"kept": True}
