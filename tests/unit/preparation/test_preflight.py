"""Preflight checks: each fires on its case, is silent on a sound one, and stands after the plan or stops the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_osdp.errors import PreflightError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.training_job import OptimizerSpec
from hf_osdp.preparation import preflight
from hf_osdp.preparation.announce import announce_plan
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.job import RunFolder
from hf_osdp.preparation.plan_run import plan_run
from hf_osdp.preparation.preflight import Finding
from tests.helpers.layouts import joined
from tests.helpers.models import MODELS, SEQUENCE_LENGTH, tiny_model
from tests.helpers.problems import run_job

SIZES = {"sequence_length": SEQUENCE_LENGTH, "global_batch_size": 4}
CONFIG = OSDPConfig(hardware="cpu", operator_splitting=False, **SIZES)


def test_blocks_that_a_plan_has_joined_need_no_other_classes():
    assert preflight.whole_in_one_unit(joined(8, tiny_model("gpt2", layers=2))) is None


def untied() -> nn.Module:
    model = tiny_model("gpt2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def test_untied_head_is_an_error_unless_configuration_says_so():
    with pytest.raises(
        PreflightError, match=r"^The config.* lm_head.weight to transformer.wte.weight.*tie_weights\("
    ) as no:
        plan_run(untied(), run_job(CONFIG))
    assert "\n" not in str(no.value)
    model = untied()
    model.config.tie_word_embeddings = False
    assert preflight.split_ties(model) is None
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert all(preflight.split_ties(one) is None for one in (model, nn.Linear(2, 2), *map(tiny_model, MODELS)))
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    assert preflight.split_ties(peft.get_peft_model(tiny_model("gpt2"), lora)) is None


def test_checkpoint_bytes_are_what_torch_saves():
    model = tiny_model("gpt2", dtype=torch.float32)
    assert preflight.checkpoint_bytes(find_units(model), None) == sum(p.nbytes for p in model.parameters())
    model.transformer.wte.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
    saved = sum(tensor.nbytes for tensor in (*model.parameters(), *states))
    assert preflight.checkpoint_bytes(find_units(model), OptimizerSpec(states=2)) == saved
    assert preflight.checkpoint_bytes(find_units(model), None, adapters=True) == sum(p.nbytes for p in trained)


def test_sound_run_prints_nothing_and_given_plan_is_checked(tmp_path, capsys):
    model = tiny_model("gpt2", dtype=torch.float32, layers=2)
    run = plan_run(model, run_job(CONFIG, folder=RunFolder(path=tmp_path / "out")))
    assert run.findings == () and not list(tmp_path.iterdir())
    announce_plan(run)
    printed = capsys.readouterr().out
    assert "warning" not in printed and "error" not in printed
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="is a file; give a folder"):
        plan_run(model, run_job(OSDPConfig(plan=run.plan, **SIZES), folder=RunFolder(path=tmp_path / "file")))


def test_errors_stand_in_one_line_and_warnings_stop_nothing():
    one, two = (Finding(text, text, stops=True) for text in ("One.", "Two."))
    warning = replace(one, stops=False)
    with pytest.raises(PreflightError, match=r"^One\. Two\.$"):
        preflight.merged_findings([one, warning, two])
    assert preflight.merged_findings([warning]) == (warning,)
