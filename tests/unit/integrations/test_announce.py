"""What a run says of compilation: its gain by the estimate, and the first step's time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.integrations.announce import announce_plan, announce_result
from hf_osdp.measurement.step_meter import Observation
from hf_osdp.preparation.block_forms import FormGain
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.plan_run import plan_run
from tests.helpers.models import SEQUENCE_LENGTH, tiny_model
from tests.helpers.problems import run_job

SEEN = Observation(steps=8, median_step_s=1.0, first_step_s=4.0, peak_bytes=2**20)


@pytest.fixture(scope="module")
def run():
    config = OSDPConfig(hardware="cpu", compare=False, sequence_length=SEQUENCE_LENGTH, global_batch_size=4)
    return plan_run(tiny_model("gpt2", layers=2), run_job(config))


@pytest.mark.parametrize(("times", "advice"), [(1.5, False), (0.5, True)])
def test_compiled_run_says_what_compilation_gains(run, capsys, times, advice):
    step_s = run.plan.step_s
    weighed = FormGain(eager_step_s=times * step_s, step_s=step_s, compile_s=1.0, steps=None)
    compiled = replace(run, plan=replace(run.plan, compiled_classes=("GPT2Block",)), gain=weighed)
    announce_plan(compiled)
    said = " ".join(capsys.readouterr().out.split())
    assert f"compiled blocks make a step {times:.2f} times as fast" in said
    assert ("Leave compilation out" in said) is advice


def test_run_without_compilation_says_nothing_of_it(run, capsys):
    announce_plan(run)
    announce_result(run, SEEN, None)
    said = " ".join(capsys.readouterr().out.split())
    assert "first step - 4.00 s" in said and "compil" not in said
