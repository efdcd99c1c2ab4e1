"""Runs that share a folder, or find what others left there: a restart continues its own training and no other, one
run at a time writes, also where a file system has no locks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from hf_osdp.checkpoint import folders
from hf_osdp.checkpoint.folders import PARTIAL, Holder, Manifest, lock_checkpoints, unlock_checkpoints
from hf_osdp.checkpoint.resume import checkpoint_to_resume, last_checkpoint, recorded_manifest
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import saved

DAY_S = 24 * 3600


def launched(monkeypatch, run: str, *, restarts: int = 0, job: str = "", requeued: int = 0) -> None:
    """As torchrun, which makes one folder of logs for each launch, and SLURM start a process."""
    variables = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_ERROR_FILE": f"/logs/none_{run}/attempt_{restarts}/0/error.json",
        "SLURM_JOB_ID": job,
        "SLURM_RESTART_COUNT": str(requeued) if requeued else "",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def earlier(folder: Path, monkeypatch) -> None:
    """An earlier training, of another launch, up to step 6."""
    launched(monkeypatch, "earlier", job="1")
    assert checkpoint_to_resume(folder) is None
    saved(folder / "checkpoint-6")


# ---- whose checkpoints


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


@pytest.mark.parametrize("begins", [checkpoint_to_resume, lambda folder: None])
def test_copied_checkpoints_of_another_first_training_are_not_its_own(tmp_path, monkeypatch, begins):
    earlier(tmp_path / "other", monkeypatch)
    launched(monkeypatch, "now")
    begins(tmp_path / "run")
    saved(tmp_path / "run" / "checkpoint-2")
    shutil.copytree(tmp_path / "other" / "checkpoint-6", tmp_path / "run" / "checkpoint-6")
    launched(monkeypatch, "now", restarts=1)
    assert last_checkpoint(tmp_path / "run").name == "checkpoint-2"
    assert checkpoint_to_resume(tmp_path / "run").name == "checkpoint-2"


def test_training_that_is_resumed_by_hand_stays_one_training(tmp_path, monkeypatch):
    earlier(tmp_path, monkeypatch)
    training = Manifest.load(tmp_path / "checkpoint-6").training
    launched(monkeypatch, "by hand")
    assert checkpoint_to_resume(tmp_path, True).name == "checkpoint-6"
    assert Manifest.load(saved(tmp_path / "checkpoint-8")).training == training is not None
    launched(monkeypatch, "by hand", restarts=1)
    assert checkpoint_to_resume(tmp_path, None).name == "checkpoint-8"


# ---- one run at a time


@pytest.mark.parametrize("act", [checkpoint_to_resume, lock_checkpoints])
def test_second_loop_in_a_new_folder_is_refused_before_anything_is_saved(tmp_path, monkeypatch, act):
    monkeypatch.setattr(folders, "_LOCK_WAIT_S", 0.2)
    context, new = multiprocessing.get_context("fork"), tmp_path / "new"
    begun, end = context.Event(), context.Event()
    other = context.Process(target=lambda: (act(new), begun.set(), end.wait(60)))
    other.start()
    assert begun.wait(60)
    recorded = [path.read_text() for path in new.glob(".partial/training.json")]
    line = rf"Another run \(process {other.pid} on {socket.gethostname()}, started 20.* UTC\) writes checkpoints"
    with pytest.raises(CheckpointError, match=line):
        checkpoint_to_resume(new)
    with pytest.raises(CheckpointError, match=line), CheckpointWriter().new(new / "checkpoint-1"):
        pass
    assert [path.read_text() for path in new.glob(".partial/training.json")] == recorded
    end.set()
    other.join()
    assert checkpoint_to_resume(new) is None


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def without_locks(request, monkeypatch):
    """A file system without locks."""

    def refuse(*args: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(folders, "_LOCK_WAIT_S", 0.2)


def held_by(folder: Path, **changes: object) -> Path:
    """A lock that this process, with changes, has left."""
    path = folder / PARTIAL / "lock"
    path.parent.mkdir(parents=True)
    this = Holder.this()
    said = {"host": this.host, "process": this.process, "started_s": this.started_s, **changes}
    path.write_text(json.dumps(said))
    return path


def staged(folder: Path, name: str, age_s: float) -> Path:
    """What another run has half written."""
    path = folder / PARTIAL / name / "checkpoint-4"
    path.mkdir(parents=True)
    (path / "weights").write_text("half")
    for one in (path / "weights", path, path.parent):
        os.utime(one, (time.time() - age_s,) * 2)
    return path


def test_without_locks_nothing_young_is_deleted(tmp_path, without_locks):
    young, of_yesterday = staged(tmp_path, "4f0c9a1e", 60), staged(tmp_path, "0123abcd", 2 * DAY_S)
    lock_checkpoints(tmp_path)
    assert young.exists() and not of_yesterday.exists()
    unlock_checkpoints(tmp_path)
    assert not (tmp_path / PARTIAL / "lock").exists()


def test_without_locks_a_live_run_is_named_and_a_dead_one_is_passed_over(tmp_path, without_locks):
    with subprocess.Popen(["sleep", "60"]) as live:
        import psutil

        held_by(tmp_path / "live", process=live.pid, started_s=psutil.Process(live.pid).create_time())
        with pytest.raises(CheckpointError, match=rf"Another run \(process {live.pid} on .*\) writes checkpoints"):
            lock_checkpoints(tmp_path / "live")
        held_by(tmp_path / "reused", process=live.pid, started_s=1.0)  # the number is another process's now
        lock_checkpoints(tmp_path / "reused")
        live.kill()
    held_by(tmp_path / "dead", process=live.pid)
    (tmp_path / "damaged" / PARTIAL).mkdir(parents=True)
    (tmp_path / "damaged" / PARTIAL / "lock").write_text('{"host": ')
    for name in ("dead", "damaged"):
        lock_checkpoints(tmp_path / name)
        assert Holder.of(tmp_path / name / PARTIAL / "lock") == Holder.this()


def test_without_locks_a_run_of_another_machine_is_named_and_does_not_stop_this_one(tmp_path, without_locks, caplog):
    path = held_by(tmp_path, host="machine-7")
    lock_checkpoints(tmp_path)
    assert "on machine-7, started" in caplog.text and "may still write checkpoints there" in caplog.text
    path.write_text(json.dumps({"host": "machine-7", "process": 1, "started_s": 1.0}))
    unlock_checkpoints(tmp_path)
    assert path.exists(), "the other's lock, which it took meanwhile"


def test_working_directory_that_was_deleted_does_not_stop_a_save(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    saved(tmp_path / "run" / "checkpoint-1")
    assert last_checkpoint(tmp_path / "run").name == "checkpoint-1"
    with pytest.raises(CheckpointError, match=r"checkpoint-1 cannot be written .*; give a folder that is writable"):
        saved(Path("checkpoint-1"))
