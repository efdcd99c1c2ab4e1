"""Runs that share a folder, or find what others left there: a restart continues its own training and no other, one
run at a time writes, also where a file system has no locks.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from hf_osdp.checkpoint import folders
from hf_osdp.checkpoint.folders import PARTIAL, _lock_path, lock_checkpoints, unlock_checkpoints
from hf_osdp.checkpoint.resume import checkpoint_to_resume, last_checkpoint, recorded_manifest
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import saved


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
