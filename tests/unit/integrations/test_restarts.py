"""A Trainer that is started again: which checkpoint it takes, which it removes, how many samples a step has."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from hf_osdp.errors import CheckpointError
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.presets import preset
from tests.helpers.models import VOCABULARY, tiny_model


def trainer(folder, *, trains: bool = True, samples: int = 4, osdp=(), **options) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, VOCABULARY, (16, 12), generator=generator)]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=samples, save_strategy="steps", use_cpu=True, report_to=[], disable_tqdm=True,
        **{"max_steps": 2, "save_steps": 1, **options},
    )  # fmt: skip
    config = {"hardware": preset("cpu", devices_per_node=1), "compare": False, "sequence_length": 12, **dict(osdp)}
    return Trainer(
        model=tiny_model("gpt2", layers=1), args=arguments, train_dataset=data if trains else None, eval_dataset=data, osdp=config
    )  # fmt: skip


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("in_background", [False, True])
def test_save_total_limit_removes_checkpoints_of_earlier_training_first(tmp_path, in_background):
    trainer(tmp_path, max_steps=8, save_steps=4).train()
    again = trainer(tmp_path, save_total_limit=1, osdp={"async_save": in_background})
    again.train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert not list((tmp_path / ".partial").glob("checkpoint*"))


def test_restart_resumes_training_after_evaluation_in_between(tmp_path, monkeypatch):
    trainer(tmp_path).train()
    trainer(tmp_path, trains=False).evaluate()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again, begins = trainer(tmp_path, max_steps=3), _Begins()
    again.add_callback(begins)
    again.train()
    assert begins.step == 2


class _Begins(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


def test_restart_on_fewer_processes_keeps_global_batch(tmp_path, monkeypatch, caplog):
    trainer(tmp_path).train()
    by_hand = trainer(tmp_path, samples=2, max_steps=3)  # as half as many processes would have it
    by_hand.train(resume_from_checkpoint=True)
    assert by_hand.plan.global_batch_size == 2
    assert "checkpoint-2 was saved with global batch 4; this run has global batch 2" in caplog.text
    assert "set what was saved (OSDPConfig(global_batch_size=4))" in caplog.text
    caplog.clear()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (tmp_path / "checkpoint-3").rename(tmp_path / "other")
    again = trainer(tmp_path, samples=2, max_steps=3)
    again.train()
    assert again.plan.global_batch_size == 4 and again.state.global_step == 3
    assert "keeps the global batch of 4 samples that training began with; the arguments make 2" in caplog.text
    assert "was saved with" not in caplog.text
    assert trainer(tmp_path, samples=2, osdp={"global_batch_size": 8}).plan.global_batch_size == 8
    assert trainer(tmp_path, samples=2, osdp={"resume_after_restart": False}).plan.global_batch_size == 2


def test_load_best_model_refuses_damaged_checkpoint(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    damaged = trainer(tmp_path, **best)
    stock = damaged._load_best_model

    def damage():
        path = f"{damaged.state.best_model_checkpoint}/model.safetensors"
        with open(path, "r+b") as file:
            file.seek(-8, 2)
            file.write(b"\xff" * 8)
        stock()

    damaged._load_best_model = damage
    with pytest.raises(CheckpointError, match=r"is damaged: model.safetensors has another checksum"):
        damaged.train()


def test_best_checkpoint_may_be_last_that_is_not_complete_yet(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "save_total_limit": 1}
    run = trainer(tmp_path, osdp={"async_save": True}, learning_rate=1e-2, **best)
    run.train()
    assert names(tmp_path) == ["checkpoint-2"] and run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
