"""A plan file and a run's report are plain JSON, whole on disk; each runs and is explained from itself alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.hardware import Collective, CollectiveTiming
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.report.content import report_content
from hf_osdp.report.plan_file import PlanInputs, plan_file_content, read_plan_file, write_json
from tests.helpers.descriptions import transformer
from tests.helpers.problems import problem

MODEL = transformer()
TIMES = Affine(constant=1e-3, per_sample=2e-3)
MODEL = replace(MODEL, segments=tuple(replace(s, forward=replace(s.forward, seconds=TIMES)) for s in MODEL.segments))
MEASURED = CollectiveTiming(collective=Collective.ALL_REDUCE, group_size=4, latency_s=1e-3, seconds_per_byte=1e-9)
HARDWARE = replace(preset("cpu", devices_per_node=4), timings=(MEASURED,))
JOB, LIMIT = TrainingJob(global_batch_size=8), 4 * 2**20
PLAN = search(problem(MODEL, HARDWARE, JOB, LIMIT)).plan
INPUTS = PlanInputs(description=MODEL, job=JOB, hardware=HARDWARE)


@pytest.mark.parametrize("hardware", [HARDWARE, None], ids=["hardware", "none"])
def test_plan_and_inputs_are_read_back_equal(tmp_path, hardware):
    inputs = replace(INPUTS, hardware=hardware)
    write_json(plan_file_content(PLAN, inputs), tmp_path / "plan.json")
    assert read_plan_file(tmp_path / "plan.json") == (PLAN, inputs)
    assert Plan.load(tmp_path / "plan.json") == PLAN
    content = report_content(PLAN, inputs, planning_s=0.125)
    write_json(content, tmp_path / "report.json")
    assert read_plan_file(tmp_path / "report.json") == (PLAN, inputs)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text()) == content
    PLAN.save(tmp_path / "bare.json")
    assert read_plan_file(tmp_path / "bare.json") == (PLAN, None)


def test_report_gives_rates_versions_and_strategies():
    compared = list(compare_strategies(problem(MODEL, HARDWARE, JOB, LIMIT)))
    content = report_content(PLAN, INPUTS, comparison=compared)
    assert content["plan"]["peak_bytes"] == sum(content["estimated"]["peak_breakdown"].values()) <= LIMIT
    rates = {"group_size": 4, "latency_s": 1e-3, "seconds_per_byte": 1e-9}
    assert content["hardware"]["collectives"] == [{"collective": "all_reduce", **rates, "crosses_nodes": False}]
    assert set(content["versions"]) == {"python", "hf_osdp", "torch", "accelerate", "transformers"}
    assert [row["strategy"] for row in content["strategies"]] == ["osdp", "fsdp", "ddp", "zero2", "hsdp"]
    for row in content["strategies"]:
        assert (row["least_peak_bytes"] > LIMIT) if "reason" in row else (row["peak_bytes"] <= LIMIT)
