"""What a run finds in its folder: a best checkpoint elsewhere, steps that no training took, another run's settings."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from hf_osdp.errors import CheckpointError
from tests.helpers.models import tiny_model
from tests.helpers.sampling import slow_but
from tests.unit.integrations.test_checkpoints import names, planned

pytestmark = pytest.mark.filterwarnings("ignore")

BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
BEST["greater_is_better"] = True  # the loss falls, so that the first checkpoint is the best


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run that ended after two steps, with checkpoints of both."""
    folder = tmp_path_factory.mktemp("ended")
    planned(folder, **{**BEST, "save_total_limit": None, "max_steps": 2}).train()
    assert names(folder) == ["checkpoint-1", "checkpoint-2"]
    return folder


def changes_said(caplog) -> str:
    """The one line about another run's settings."""
    (line,) = (record.getMessage() for record in caplog.records if "was saved with" in record.getMessage())
    return line


@pytest.mark.parametrize(
    "copied", slow_but((["checkpoint-2"], ["checkpoint-1", "checkpoint-2"]), daily=(["checkpoint-2"],))
)
def test_best_checkpoint_in_another_folder_loses_none_and_changes_nothing(ended, tmp_path, caplog, copied):
    weights, away = [], tmp_path / "away"
    for keeps_old in (True, False):
        new = tmp_path / f"new-{keeps_old}"
        for name in copied:
            shutil.copytree(ended / name, new / name)
        trainer = planned(new, **BEST)
        place = ended if keeps_old else ended.rename(away)
        trainer.train(resume_from_checkpoint=True)
        place.rename(ended)
        weights.append(trainer.model.state_dict())
        assert names(new), "a checkpoint is left"
        assert trainer.state.best_model_checkpoint == (str(new / "checkpoint-1") if len(copied) == 2 else None)
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    if len(copied) == 1:
        assert caplog.text.count("so it will not be loaded; to keep it, copy it there") == 1


def test_step_that_no_training_took_is_damage(ended, tmp_path):
    folder = shutil.copytree(ended / "checkpoint-2", tmp_path / "checkpoint-2")
    (folder / "osdp_checkpoint.json").unlink()  # as of the stock Trainer
    state = json.loads((folder / "trainer_state.json").read_text())
    trainer = planned(tmp_path)
    for step in (10**15, 1e15, -1, None, "2", 1):
        (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": step}))
        with pytest.raises(CheckpointError, match=r"checkpoint-2 is damaged: trainer_state.json says step .*; use"):
            trainer.train(resume_from_checkpoint=True)


CHANGED = {
    "learning_rate": ("0.01", "0.02"), "weight_decay": ("0.0", "0.1"), "lr_scheduler_type": ("linear", "cosine"),
    "n_head": ("4", "2"), "activation_function": ("'gelu_new'", "'relu'"),
}  # fmt: skip


def test_trainer_names_each_change_between_save_and_resume(ended, tmp_path, caplog):
    shutil.copytree(ended / "checkpoint-1", tmp_path / "checkpoint-1")
    model = tiny_model("gpt2", layers=1)
    model.config.n_head, model.config.activation_function = 2, "relu"
    changes = {"learning_rate": 2e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    again = planned(tmp_path, max_steps=2, model=model, **changes)
    rows = again.train_dataset
    other = [{name: value.flip(0) for name, value in row.items()} for row in rows]
    same = (0, len(rows) // 2, len(rows) - 1)
    again.train_dataset = [rows[at] if at in same else row for at, row in enumerate(other)]
    again.train(resume_from_checkpoint=True)
    saved, now = changes_said(caplog).split("; this run has ")
    for name, (before, after) in CHANGED.items():
        assert f"{name} {before}" in saved and f"{name} {after}" in now, (saved, now)
    assert "dataset of 16 rows (" in saved and "it does not continue the same training" in now
