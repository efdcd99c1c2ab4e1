"""What a run finds in its folder: what others left there, or write now, with and without locks; a best checkpoint
elsewhere, another run's settings; and files that say what no training wrote, each refused in one line and at once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.optim import lr_scheduler as schedulers

from hf_osdp.checkpoint import folders, resume
from hf_osdp.checkpoint.folders import (
    MANIFEST_NAME,
    PARTIAL,
    Manifest,
    _lock_path,
    lock_checkpoints,
    unlock_checkpoints,
)
from hf_osdp.checkpoint.resume import check_checkpoint, checkpoint_to_resume, last_checkpoint, recorded_manifest
from hf_osdp.checkpoint.safe import SafeReader, load_file
from hf_osdp.checkpoint.states import load_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.errors import CheckpointError
from tests.helpers.models import tiny_model
from tests.helpers.sampling import slow_but
from tests.unit.checkpoint.checkpoints import saved, trained
from tests.unit.integrations.test_checkpoints import names, planned

pytestmark = pytest.mark.filterwarnings("ignore")


def launched(monkeypatch, run: str, *, restarts: int = 0, job: str = "", requeued: int = 0) -> None:
    """As torchrun, which makes one folder of logs for each launch, and SLURM start a process."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/logs/none_{run}/attempt_{restarts}/0/error.json")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(requeued) if requeued else "")


def earlier(folder: Path, monkeypatch) -> None:
    """An earlier training, of another launch, up to step 6."""
    launched(monkeypatch, "earlier", job="1")
    assert checkpoint_to_resume(folder) is None
    saved(folder / "checkpoint-6")


def test_restart_of_launch_that_recorded_nothing_begins_anew(tmp_path, monkeypatch, caplog):
    earlier(tmp_path, monkeypatch)
    launched(monkeypatch, "now", restarts=1, job="2")  # its first start was killed while it planned
    assert recorded_manifest(tmp_path) is None, "the global batch is its own, too"
    assert checkpoint_to_resume(tmp_path) is None
    assert "written by the launch that is started again here, so training begins anew" in caplog.text
    assert last_checkpoint(tmp_path) is None, "of this training"
    saved(tmp_path / "checkpoint-2")
    launched(monkeypatch, "now", restarts=2, job="2")
    assert checkpoint_to_resume(tmp_path).name == "checkpoint-2"
    assert checkpoint_to_resume(tmp_path, True).name == "checkpoint-6", "one that is asked for"


def test_requeued_job_continues_and_a_later_job_does_not(tmp_path, monkeypatch):
    earlier(tmp_path, monkeypatch)
    launched(monkeypatch, "requeued", job="1", requeued=1)
    assert checkpoint_to_resume(tmp_path).name == "checkpoint-6"
    launched(monkeypatch, "requeued", job="1", requeued=1, restarts=1)
    assert checkpoint_to_resume(tmp_path).name == "checkpoint-6"
    launched(monkeypatch, "of the same job", job="1", restarts=1)  # another launch of it, killed while it planned
    assert checkpoint_to_resume(tmp_path) is None


@pytest.mark.parametrize("act", [checkpoint_to_resume, lock_checkpoints])
def test_second_loop_in_a_new_folder_is_refused_before_saving(tmp_path, monkeypatch, act):
    monkeypatch.setattr(folders, "_LOCK_WAIT_S", 0.2)
    context, new = multiprocessing.get_context("fork"), tmp_path / "new"
    begun, end = context.Event(), context.Event()
    other = context.Process(target=lambda: (act(new), begun.set(), end.wait(60)))
    other.start()
    assert begun.wait(60)
    recorded = [path.read_text() for path in new.glob(".partial/training.json")]
    line = "Another run writes checkpoints into .*new; give this run another folder"
    with pytest.raises(CheckpointError, match=line):
        checkpoint_to_resume(new)
    with pytest.raises(CheckpointError, match=line), CheckpointWriter().new(new / "checkpoint-1"):
        pass
    assert [path.read_text() for path in new.glob(".partial/training.json")] == recorded
    end.set()
    other.join()
    assert checkpoint_to_resume(new) is None


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_a_line_says_so_and_leftovers_stay(tmp_path, monkeypatch, caplog, reason):
    def refuse(*args: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = tmp_path / PARTIAL / "4f0c9a1e" / "checkpoint-4"
    left.mkdir(parents=True)
    assert last_checkpoint(saved(tmp_path / "checkpoint-5").parent).name == "checkpoint-5"
    assert f"{tmp_path} cannot be locked ({os.strerror(reason)}): let no other run write" in caplog.text
    unlock_checkpoints(tmp_path)
    assert left.exists()


def test_without_locks_the_run_that_began_first_is_refused_at_its_next_save(tmp_path, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert checkpoint_to_resume(tmp_path) is None
    writer = CheckpointWriter()
    with writer.new(tmp_path / "checkpoint-1"):
        pass
    other = multiprocessing.get_context("fork").Process(
        target=lambda: (folders.trainings.clear(), checkpoint_to_resume(tmp_path), saved(tmp_path / "checkpoint-2"))
    )
    other.start()
    other.join(60)
    assert other.exitcode == 0 and names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    line = r"Another run has begun to train in .*; give each run its own"
    with pytest.raises(CheckpointError, match=line), writer.new(tmp_path / "checkpoint-3"):
        pass
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    unlock_checkpoints(tmp_path)


def test_training_whose_id_cannot_be_written_is_refused(tmp_path, monkeypatch):
    assert checkpoint_to_resume(tmp_path) is None
    saved(tmp_path / "checkpoint-1")
    unlock_checkpoints(tmp_path)

    def refuse(*args: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="an earlier training's; make it writ"):
        patched.setattr(resume, "write_whole", refuse)
        checkpoint_to_resume(tmp_path)
    earlier = resume.recorded_training(tmp_path).training
    assert checkpoint_to_resume(tmp_path) is None
    (tmp_path / PARTIAL / "training.json").unlink()
    ids = [Manifest.load(saved(tmp_path / f"checkpoint-{step}")).training for step in (2, 3)]
    assert ids == [resume.recorded_training(tmp_path).training] * 2 and earlier not in ids
    unlock_checkpoints(tmp_path)


def test_waiting_run_gets_its_lock_though_the_folder_is_removed(tmp_path):
    path = _lock_path(tmp_path, "last")
    path.parent.mkdir()
    other = FileLock(path, thread_local=False)
    other.acquire()

    def ends():  # as `unlock_checkpoints` of the other run
        path.unlink()
        path.parent.rmdir()
        other.release()

    threading.Timer(0.3, ends).start()
    lock_checkpoints(tmp_path, "last")
    with pytest.raises(Timeout), FileLock(path, timeout=0):
        pass
    unlock_checkpoints(tmp_path, "last")
    assert not path.parent.exists()


BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
BEST["greater_is_better"] = True  # the loss falls, so that the first checkpoint is the best


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run that ended after two steps, with checkpoints of both."""
    folder = tmp_path_factory.mktemp("ended")
    planned(folder, **{**BEST, "save_total_limit": None, "max_steps": 2}).train()
    assert names(folder) == ["checkpoint-1", "checkpoint-2"]
    return folder


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
    (folder / MANIFEST_NAME).unlink()  # as of the stock Trainer
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
    again.train_dataset = again.train_dataset[1:]
    again.train(resume_from_checkpoint=True)
    (line,) = (record.getMessage() for record in caplog.records if "was saved with" in record.getMessage())
    before_save, now = line.split("; this run has ")
    for name, (before, after) in CHANGED.items():
        assert f"{name} {before}" in before_save and f"{name} {after}" in now, line
    assert (
        "dataset of 16 rows" in before_save
        and "dataset of 15 rows" in now
        and "it does not continue the same training" in now
    )


def halves(size: torch.Size, second: int) -> list[ChunkStorageMetadata]:
    """Two chunks along the first dim, the second beginning at this row."""
    rest, rows = size[1:], size[0] // 2
    chunks = ((0, rows), (second, size[0] - rows))
    made = (((at, *(0 for _ in rest)), (length, *rest)) for at, length in chunks)
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in made]


CHUNKS = {
    "one of two is missing": lambda size: halves(size, size[0] // 2)[:1],
    "one twice": lambda size: [halves(size, size[0] // 2)[0]] * 2,
    "the second begins too early": lambda size: halves(size, size[0] // 2 - 1),
    "the second ends outside": lambda size: halves(size, size[0] // 2 + 1),
    "none": lambda size: [],
}


@pytest.mark.parametrize("case", CHUNKS)
def test_index_whose_chunks_do_not_tile_a_tensor_is_refused(tmp_path, case):
    folder = saved(tmp_path / "checkpoint-1")
    (folder / MANIFEST_NAME).unlink()  # as of plain Accelerate
    index = SafeReader(folder / "pytorch_model_fsdp_0").read_metadata()
    for stored in index.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata) and stored.size[0] % 2 == 0:
            stored.chunks = CHUNKS[case](stored.size)
    (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(index))
    line = r"\.metadata cannot be read \(ValueError: chunks do not hold each element exactly once of model\..*; use"
    with pytest.raises(CheckpointError, match=line):
        load_loop(folder, *trained(seed=9), others={})


ABSURD = [("global_batch_size", 2**62), ("global_batch_size", -4), ("world_size", 0), ("world_size", 2**40)]


@pytest.mark.parametrize(("field", "value"), ABSURD)
def test_manifest_with_absurd_number_is_damage(tmp_path, field, value):
    folder = saved(tmp_path / "checkpoint-1")
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=rf"is damaged: .*{field}: {value} is not between 1 and"):
        check_checkpoint(folder)
    assert last_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError):
        replace(Manifest(files={}, world_size=1), **{field: value})


@pytest.mark.parametrize("content", ["class", "garbage", "cut"])
def test_refused_pickle_does_not_advise_to_load_it_unsafely(tmp_path, content):
    path = tmp_path / "optimizer.bin"
    torch.save({"state": schedulers.StepLR if content == "class" else torch.ones(2)}, path)
    if content == "garbage":
        path.write_bytes(b"\x80\x02garbage")
    if content == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values") as raised:
        load_file(path)
    said = str(raised.value)
    assert not any(word in said for word in ("weights_only", "trust", "arbitrary code", "\n")), said
