"""What a run finds before it starts: printed once after the plan, or an error before anything is sharded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from transformers import TrainingArguments

from hf_osdp.errors import PreflightError
from hf_osdp.integrations.accelerator import project_folder
from hf_osdp.integrations.announce import announce_plan
from hf_osdp.integrations.optimizers import frozen_parameters
from hf_osdp.integrations.trainer_facts import trainer_folder
from hf_osdp.planner.job import OptimizerSpec, Precision
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.planning.plan_run import plan_run
from hf_osdp.planning.preflight.findings import Check, Severity, error, note, refuse_errors, warning
from hf_osdp.planning.preflight.folder import RunFolder
from hf_osdp.planning.preflight.run import merged_findings
from hf_osdp.planning.problem import RunFacts
from tests.helpers.models import SEQUENCE_LENGTH, tiny_model


def facts(**changes: object) -> RunFacts:
    options: dict[str, object] = {
        "world_size": 1, "device_type": "cpu", "precision": Precision(), "sequence_length": SEQUENCE_LENGTH, "global_batch_size": 4,
        "micro_batch_size": None, "reduce_every_micro_step": None, "optimizer": OptimizerSpec(), "holds_outputs": False,
    }  # fmt: skip
    return RunFacts(**{**options, **changes})


CONFIG = OSDPConfig(hardware="cpu", compare=False, operator_splitting=False)


def test_a_sound_run_says_nothing_and_writes_nothing_and_its_plan_is_checked_too(tmp_path, capsys):
    model = tiny_model("gpt2", dtype=torch.float32, layers=2)
    run = plan_run(model, CONFIG, facts(folder=RunFolder(path=tmp_path / "out")))
    assert run.findings == () and not list(tmp_path.iterdir())
    announce_plan(run, is_rank_zero=True)
    assert not any(severity.value in capsys.readouterr().out for severity in Severity)
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="is a file; give a folder"):
        plan_run(model, OSDPConfig(plan=run.plan), facts(folder=RunFolder(path=tmp_path / "file")))


def test_findings_stand_once_after_the_plan_each_in_a_line(capsys):
    model = tiny_model("gpt2", dtype=torch.bfloat16, layers=2)
    model.transformer.wpe.requires_grad_(False)
    run = plan_run(model, replace(CONFIG, block_classes="GPT2Block,[red]"), facts())
    announce_plan(run, is_rank_zero=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("warning: ", "note: "))]
    assert [line.split()[0] for line in lines] == ["note:", "warning:", "note:"]
    assert "[red]" in lines[0] and "mixed_precision=bf16" in lines[1] and "frozen" in lines[2]
    announce_plan(run, is_rank_zero=False)
    assert capsys.readouterr().out == ""


def test_a_frozen_model_is_not_trained_but_may_be_evaluated():
    frozen = tiny_model("gpt2", layers=2).requires_grad_(False)
    with pytest.raises(PreflightError, match="there is nothing to train"):
        plan_run(frozen, CONFIG, facts())
    assert plan_run(frozen, CONFIG, facts(trains=False)).plan


def test_all_errors_stand_in_one_line():
    with pytest.raises(PreflightError, match=r"^One\. Two\.$"):
        refuse_errors([error(Check.MODEL, "One."), note(Check.PLAN, "Aside."), error(Check.LINKS, "Two.")])
    assert merged_findings([warning(Check.MODEL, "One.")]) == (warning(Check.MODEL, "One."),)


def test_where_trainer_and_projects_write(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, save_total_limit=3, save_only_model=True)
    assert trainer_folder(args, None) == RunFolder(path=str(tmp_path), limit=3, states=False)
    assert not trainer_folder(TrainingArguments(output_dir="x", use_cpu=True, save_strategy="no"), None).saves
    assert project_folder(ProjectConfiguration()) is None
    assert not project_folder(ProjectConfiguration(project_dir="x")).saves
    named = ProjectConfiguration(project_dir="x", automatic_checkpoint_naming=True, total_limit=2)
    assert project_folder(named).limit == 2


def test_frozen_parameters_in_an_optimizer():
    layer = torch.nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    assert frozen_parameters(torch.optim.SGD(layer.parameters(), lr=0.1)) == 1
    assert frozen_parameters(None) == frozen_parameters(OptimizerSpec()) == 0
