"""Checkpoints of one process: the Trainer's and Accelerate's."""

from __future__ import annotations

import json
import pickle
import resource
from contextlib import contextmanager

import pytest
import torch
from accelerate.state import GradientState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainingArguments

from hf_osdp.checkpoint.folders import MANIFEST_NAME
from hf_osdp.checkpoint.resume import check_checkpoint
from hf_osdp.errors import CheckpointError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.planner.presets import preset
from tests.helpers.models import VOCABULARY, tiny_model
from tests.unit.checkpoint.checkpoints import saved


def trainer(
    folder, *, model=None, trains: bool = True, samples: int = 4, osdp: dict | None = None, **options
) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, VOCABULARY, (16, 12), generator=generator)]
    small = {"per_device_train_batch_size": samples, "save_strategy": "steps", "use_cpu": True, "report_to": []}
    steps = {"learning_rate": 1e-2, "max_steps": 4, "seed": 1, "save_steps": 1}
    arguments = TrainingArguments(str(folder), **small, **{**steps, **options})
    model = tiny_model("gpt2", layers=1) if model is None else model
    return Trainer(model=model, args=arguments, train_dataset=data if trains else None, eval_dataset=data, osdp=osdp)


def planned(folder, osdp=(), **options) -> Trainer:
    config = {"hardware": preset("cpu", devices_per_node=1), "sequence_length": 12, **dict(osdp)}
    return trainer(folder, osdp=config, **options)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_best_checkpoint_stays_and_is_loaded(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    trainer, weights = planned(tmp_path, save_total_limit=2, **best), {}

    class Weights(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            states = trainer.model.state_dict()
            weights[state.global_step] = {name: value.clone() for name, value in states.items()}

    trainer.add_callback(Weights())
    trainer.train()  # the loss falls: the first is the best of a metric that should be high
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-4"]
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].endswith("/checkpoint-1")
    assert all(torch.equal(value, weights[1][name]) for name, value in trainer.model.state_dict().items())
    check_checkpoint(tmp_path / "checkpoint-1")


def divide_weights(folder) -> None:
    """Write a checkpoint's weights again as two files and an index, as transformers' tools do."""
    weights, map_of = load_file(folder / "model.safetensors"), {}
    for number, names in enumerate((sorted(weights)[:3], sorted(weights)[3:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
        map_of |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": map_of}))
    (folder / "model.safetensors").unlink()


def test_trainer_refuses_damaged_path_and_takes_the_one_before(tmp_path, caplog):
    planned(tmp_path, save_total_limit=2).train()
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-4 is damaged: model.safetensors is missing"):
        planned(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    again = planned(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4 and len(again.state.log_history) == 1, "went on from checkpoint-3"
    assert "was saved with" not in caplog.text
    divided = tmp_path / "checkpoint-3"
    divide_weights(divided)
    (divided / "model-00001-of-00002.safetensors").rename(tmp_path / "kept")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-3 is damaged: model-00001-of-00002.safetensors, which .* is"
    ):
        planned(tmp_path).train(resume_from_checkpoint=str(divided))
    (tmp_path / "kept").rename(divided / "model-00001-of-00002.safetensors")
    again = planned(tmp_path)
    again.train(resume_from_checkpoint=str(divided))
    assert again.state.global_step == 4, "went on from checkpoint-3"
    again = planned(tmp_path, seed=2, bf16=True)
    again.train_dataset = again.train_dataset[1:]
    again.train(resume_from_checkpoint=True)
    lines = [record.getMessage() for record in caplog.records if "was saved with" in record.getMessage()]
    assert len(lines) == 1 and "checkpoint-4 was saved with seed 1, precision no, dataset of 16 rows" in lines[0]
    assert "this run has seed 2, precision bf16, dataset of 15 rows" in lines[0]
    assert "To continue it, use the saved settings." in lines[0]
    with pytest.raises(ValueError, match=r"No valid checkpoint found in output directory \(.*\)"):
        planned(tmp_path / "empty").train(resume_from_checkpoint=True)


def test_state_of_another_schedule_is_refused_with_its_file(tmp_path):
    planned(tmp_path, max_steps=1).train()
    file = tmp_path / "checkpoint-1" / "scheduler.pt"
    (tmp_path / "checkpoint-1" / MANIFEST_NAME).unlink()
    again, line = planned(tmp_path, max_steps=1), rf"{file} is not the state of a LambdaLR .*; make the one that was"
    for state in ({"last_epoch": 1}, [1, 2], "text"):
        torch.save(state, file)
        with pytest.raises(CheckpointError, match=line):
            again.train(resume_from_checkpoint=str(file.parent))


def test_file_in_a_checkpoints_place_is_kept_and_named(tmp_path):
    (tmp_path / "checkpoint-2").write_text("a user's")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="checkpoint-2 is a file, where a checkpoint may come; rename it"):
            planned(tmp_path).train()
    assert (tmp_path / "checkpoint-2").read_text() == "a user's" and names(tmp_path) == ["checkpoint-2"]


@contextmanager
def full_disk():
    """No file may grow beyond some bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_named_with_the_file(tmp_path):
    line = r"the disk is full, or a quota is reached; free some space: '.*/{}'"
    made = planned(tmp_path)
    made.plan  # noqa: B018  # beforehand
    with full_disk(), pytest.raises(CheckpointError, match=line.format("checkpoint-1")):
        made.train()
    with (
        full_disk(),
        pytest.raises(CheckpointError, match=line.format("checkpoint-7/pytorch_model_fsdp.bin")),
    ):
        saved(tmp_path / "checkpoint-7", sharded=False)
    assert names(tmp_path) == []


def test_nested_state_of_the_trainer_is_damage(tmp_path):
    planned(tmp_path, max_steps=1).train()
    (tmp_path / "checkpoint-1" / MANIFEST_NAME).unlink()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("[" * 10**5)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 is damaged: trainer_state.json says step None"):
        planned(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


class Counter:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_accelerator_can_be_pickled_as_the_stock_one():
    GradientState._reset_state()  # other tests' loaders
    accelerator = OSDPAccelerator(cpu=True)
    accelerator.prepare(torch.utils.data.DataLoader(torch.zeros(4, 2), batch_size=2))
    again = pickle.loads(pickle.dumps(accelerator))
    assert vars(again.state) == vars(accelerator.state) and again.config == accelerator.config


def test_save_state_follows_accelerates_own_naming(tmp_path):
    naming = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = OSDPAccelerator(osdp={"hardware": preset("cpu", devices_per_node=1)}, project_config=naming)
    model = tiny_model("gpt2", layers=1)
    accelerator.plan(model, sequence_length=12, global_batch_size=2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    counter = Counter(0)
    accelerator.register_for_checkpointing(counter)
    for counter.value in range(4):
        assert accelerator.save_state() == str(tmp_path / "checkpoints" / f"checkpoint_{counter.value}")
    left = [tmp_path / "checkpoints" / name for name in ("checkpoint_2", "checkpoint_3")]
    assert sorted((tmp_path / "checkpoints").glob("checkpoint_*")) == left
    (tmp_path / "checkpoints" / "checkpoint_3" / "optimizer.bin").write_bytes(b"")
    accelerator.load_state()
    assert counter.value == 2
    accelerator.load_state(strict=True)  # for load_state_dict of one process
    for call, folder in ((accelerator.save_state, None), (accelerator.load_state, saved(tmp_path / "shards"))):
        with pytest.raises(ValueError, match="state would ignore strict, tag with this run"):
            call(folder, strict=True, tag=1)
    counter.value = Counter(1)  # could be written, and never read again
    with pytest.raises(CheckpointError, match="The state of Counter, registered for checkpointing"):
        accelerator.save_state()
    assert sorted((tmp_path / "checkpoints").glob("checkpoint_*")) == left


def test_save_total_limit_removes_checkpoints_of_earlier_training_first(tmp_path):
    planned(tmp_path, max_steps=8, save_steps=4).train()
    again = planned(tmp_path, max_steps=2, save_total_limit=1, osdp={"async_save": True})
    again.train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert not list((tmp_path / ".partial").glob("checkpoint*"))


def test_restart_resumes_training_after_evaluation_in_between(tmp_path, monkeypatch):
    planned(tmp_path, max_steps=2).train()
    planned(tmp_path, trains=False).evaluate()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again, steps = planned(tmp_path, max_steps=3), []

    class Begins(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    again.add_callback(Begins())
    again.train()
    assert steps == [2]


def test_restart_on_fewer_processes_keeps_global_batch(tmp_path, monkeypatch, caplog):
    planned(tmp_path, max_steps=2).train()
    by_hand = planned(tmp_path, samples=2, max_steps=3)  # as half as many processes would have it
    by_hand.train(resume_from_checkpoint=True)
    assert by_hand.plan.global_batch_size == 2
    assert "checkpoint-2 was saved with global batch 4; this run has global batch 2" in caplog.text
    assert "use the saved settings (OSDPConfig(global_batch_size=4))" in caplog.text
    caplog.clear()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (tmp_path / "checkpoint-3").rename(tmp_path / "other")
    again = planned(tmp_path, samples=2, max_steps=3)
    again.train()
    assert again.plan.global_batch_size == 4 and again.state.global_step == 3
    assert "keeps the global batch of 4 samples that training began with; the arguments make 2" in caplog.text
    assert "was saved with" not in caplog.text
    assert planned(tmp_path, max_steps=2, samples=2, osdp={"global_batch_size": 8}).plan.global_batch_size == 8
    assert planned(tmp_path, max_steps=2, samples=2, osdp={"resume_after_restart": False}).plan.global_batch_size == 2


def test_best_checkpoint_may_be_last_that_is_not_complete_yet(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "save_total_limit": 1}
    run = planned(tmp_path, max_steps=2, osdp={"async_save": True}, learning_rate=1e-2, **best)
    run.train()
    assert names(tmp_path) == ["checkpoint-2"] and run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
