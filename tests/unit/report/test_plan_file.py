"""A plan file runs and is explained from itself alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hf_osdp.errors import PlanError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.description import DType, PhaseCost
from hf_osdp.planner.files import plain
from hf_osdp.planner.hardware import Collective, CollectiveTiming
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.search.search import search
from hf_osdp.report.content import report_content, write_report
from hf_osdp.report.plan_file import PlanInputs, plan_file_content, read_plan_file, write_json
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MEASURED = PhaseCost(seconds=Affine(constant=1e-3, per_sample=2e-3))
MODEL = transformer()
TIMED = replace(MODEL, segments=tuple(replace(s, forward=replace(s.forward, seconds=MEASURED.seconds)) for s in MODEL.segments))
TIMING = CollectiveTiming(collective=Collective.ALL_GATHER, group_size=4, latency_s=1e-5, seconds_per_byte=1e-10)
HARDWARE = replace(bare_preset("titan-rtx", devices_per_node=4), timings=(TIMING,))
JOB = TrainingJob(global_batch_size=32, precision=Precision(compute=DType.FLOAT32))
PLAN = search(problem(TIMED, HARDWARE, JOB, 2**30)).plan
INPUTS = PlanInputs(description=TIMED, job=JOB, hardware=HARDWARE)


def written(tmp_path, content):
    write_json(content, tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize("inputs", [INPUTS, replace(INPUTS, hardware=None)], ids=["hardware", "none"])
def test_plan_and_inputs_come_back_equal(tmp_path, inputs):
    assert read_plan_file(written(tmp_path, plan_file_content(PLAN, inputs))) == (PLAN, inputs)


def test_plan_load_takes_the_plan_from_it(tmp_path):
    path = written(tmp_path, plan_file_content(PLAN, INPUTS))
    assert Plan.load(path) == PLAN


def test_a_saved_plan_has_no_inputs(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert read_plan_file(tmp_path / "plan.json") == (PLAN, None)


def test_a_run_s_report_can_be_read(tmp_path):
    content = report_content(PLAN, INPUTS, estimate_plan(PLAN, TIMED, JOB, HARDWARE), planning_s=1.0)
    assert read_plan_file(write_report(content, tmp_path)) == (PLAN, INPUTS)


def test_plain_values_are_what_json_has():
    content = plain(INPUTS)
    assert json.loads(json.dumps(content)) == content
    assert content["hardware"]["device"]["flops_per_s"]["float32"] == HARDWARE.device.rate(DType.FLOAT32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c["inputs"]["job"].pop("precision") and c["inputs"].pop("job"), "inputs in .* cannot be read: job"),
        (lambda c: c["inputs"]["job"].update(surprise=1), "job.surprise"),
        (lambda c: c["inputs"]["description"].update(sequence_length="12"), "description.sequence_length"),
        (lambda c: c["plan"].update(micro_batch_size=3), "changed or damaged"),
        (lambda c: c["inputs"]["description"]["units"].pop(), "does not have|names unit|fingerprint"),
        (lambda c: c.update(plan=[]), "not a valid plan"),
    ],
)
def test_damage_is_one_line(tmp_path, damage, message):
    content = plan_file_content(PLAN, INPUTS)
    damage(content)
    with pytest.raises(PlanError, match=message) as error:
        read_plan_file(written(tmp_path, content))
    assert "\n" not in str(error.value)


def test_a_missing_file_is_a_plan_error(tmp_path):
    with pytest.raises(PlanError, match="Cannot read the plan"):
        read_plan_file(tmp_path / "none.json")
