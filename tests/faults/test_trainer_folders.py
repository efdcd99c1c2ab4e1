"""What a Trainer finds in its folder: a best checkpoint elsewhere, steps that no training took."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from hf_osdp.errors import CheckpointError
from tests.unit.integrations.test_checkpoints import names, planned

pytestmark = pytest.mark.filterwarnings("ignore")

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "greater_is_better": True,  # the loss falls, so that the first checkpoint is the best
    "save_total_limit": 1,
}


def old_run(folder):
    """A run that ended after two steps, with checkpoints of both."""
    planned(folder, **{**BEST, "save_total_limit": None, "max_steps": 2}).train()
    assert names(folder) == ["checkpoint-1", "checkpoint-2"]
    return folder


@pytest.mark.parametrize("copied", [["checkpoint-2"], ["checkpoint-1", "checkpoint-2"]])
def test_best_checkpoint_in_another_folder_loses_none_and_changes_nothing(tmp_path, caplog, copied):
    old, weights = old_run(tmp_path / "old"), []
    for number, keeps_old in enumerate((True, False)):
        new = tmp_path / f"new-{number}"
        for name in copied:
            shutil.copytree(old / name, new / name)
        if not keeps_old:
            shutil.rmtree(old)
        trainer = planned(new, **BEST)
        trainer.train(resume_from_checkpoint=True)
        weights.append(trainer.model.state_dict())
        assert names(new), "a checkpoint is left"
        assert trainer.state.best_model_checkpoint == (str(new / "checkpoint-1") if len(copied) == 2 else None)
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    if len(copied) == 1:
        assert caplog.text.count("so it will not be loaded; to keep it, copy it there") == 1


@pytest.mark.parametrize("step", [10**15, 1e15, -1, None, "2", 1])
def test_step_that_no_training_took_is_damage(tmp_path, step):
    planned(tmp_path, max_steps=2, save_steps=2).train()
    folder = tmp_path / "checkpoint-2"
    (folder / "osdp_checkpoint.json").unlink()  # as of the stock Trainer
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": step}))
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is damaged: trainer_state.json says step .*; use"):
        planned(tmp_path).train(resume_from_checkpoint=True)


def test_nothing_left_to_train_is_said(tmp_path, caplog):
    planned(tmp_path, max_steps=3, save_steps=3).train()
    planned(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    assert "is of step 3, and this run ends after step 2: nothing is left to train" in caplog.text
