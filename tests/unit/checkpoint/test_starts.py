"""Which start goes on with an interrupted training, and which checkpoints are an earlier one's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_osdp.checkpoint import starts
from hf_osdp.checkpoint.finding import last_checkpoint, recorded_batch
from hf_osdp.checkpoint.starts import begin_anew, go_on, is_restart
from hf_osdp.errors import CheckpointError

from .test_folders import small


def test_a_restart_does_not_go_on_from_an_earlier_training(tmp_path, monkeypatch):
    for name in ("checkpoint-4", "checkpoint-6"):
        small(tmp_path, name)
    begin_anew(tmp_path)
    assert last_checkpoint(tmp_path).name == "checkpoint-6", "one that is asked for"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    begin_anew(tmp_path)
    assert last_checkpoint(tmp_path) is None
    small(tmp_path, "checkpoint-4", content="new")
    assert last_checkpoint(tmp_path).name == "checkpoint-4", "written again by this training"
    go_on(tmp_path)
    assert last_checkpoint(tmp_path).name == "checkpoint-6"


def test_a_damaged_note_of_older_checkpoints_is_not_taken_for_none(tmp_path, monkeypatch):
    small(tmp_path)
    begin_anew(tmp_path)
    note = tmp_path / ".partial" / "older.json"
    note.write_text(note.read_text()[:-4])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(CheckpointError, match=r"older.json is not JSON .* Remove it to go on from the last checkpoint"):
        last_checkpoint(tmp_path)
    note.unlink()
    assert last_checkpoint(tmp_path).name == "checkpoint-1"


def test_a_launcher_that_starts_again_without_counting_goes_on(tmp_path, monkeypatch):
    """torchrun where machines come and go."""
    small(tmp_path, "checkpoint-9")
    monkeypatch.setattr(starts, "_launcher", lambda: "node 77 1234")
    begin_anew(tmp_path)
    small(tmp_path, "checkpoint-2")
    assert not is_restart(tmp_path), "another training of the same process"
    monkeypatch.setattr(starts, "_noted", set())  # as in a new process
    assert is_restart(tmp_path)
    begin_anew(tmp_path)
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    monkeypatch.setattr(starts, "_launcher", lambda: "node 77 5678")
    assert not is_restart(tmp_path), "another torchrun that has the process id"
    begin_anew(tmp_path)
    monkeypatch.setattr(starts, "_noted", set())
    assert is_restart(tmp_path) and last_checkpoint(tmp_path) is None
    go_on(tmp_path)
    assert last_checkpoint(tmp_path).name == "checkpoint-9"


def test_the_launcher_is_told_from_others(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert starts._launcher() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr("os.getppid", os.getpid)
    assert starts._launcher() is None, "as in a notebook, whose process launches many trainings"
    program = Path("/proc/self/cmdline").read_text().split("\0")[1:3]
    monkeypatch.setattr(starts, "_LAUNCHERS", {Path(word).name for word in program})
    assert starts._launcher() == starts._launcher() is not None


def test_a_start_without_anything_to_note_writes_nothing(tmp_path):
    begin_anew(tmp_path), go_on(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert recorded_batch(tmp_path) is None
