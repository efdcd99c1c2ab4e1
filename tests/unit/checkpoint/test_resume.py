"""Which checkpoint a start resumes from: of which training, and what is passed over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hf_osdp.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_osdp.checkpoint.resume import checkpoint_to_resume, last_checkpoint, recorded_batch, start_fresh, warn_of_changes
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.errors import CheckpointError

from .checkpoints import saved
from .test_folders import small


@pytest.fixture
def restarted(monkeypatch):
    """Calls after which this start counts as a restart."""
    return lambda: monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


def test_restart_takes_checkpoints_of_its_own_training_only(tmp_path, restarted):
    for name in ("checkpoint-4", "checkpoint-6"):
        small(tmp_path, name)
    assert checkpoint_to_resume(tmp_path) is None
    assert last_checkpoint(tmp_path).name == "checkpoint-6", "one that is asked for"
    restarted()
    assert checkpoint_to_resume(tmp_path) is None and last_checkpoint(tmp_path) is None
    saved(tmp_path / "checkpoint-4")
    assert checkpoint_to_resume(tmp_path).name == "checkpoint-4", "written again by this training"
    assert checkpoint_to_resume(tmp_path, False) is None
    assert checkpoint_to_resume(tmp_path, after_restart=False) is None
    assert checkpoint_to_resume(tmp_path, True).name == "checkpoint-6"


def test_restart_in_a_copied_folder_takes_its_own_training_only(tmp_path, restarted):
    """Copies have other inodes and times than what was copied."""
    small(tmp_path / "run", "checkpoint-6")
    start_fresh(tmp_path / "run")
    saved(tmp_path / "run" / "checkpoint-4")
    for path in shutil.copytree(tmp_path / "run", tmp_path / "copy").rglob("*"):
        path.touch()
    restarted()
    assert checkpoint_to_resume(tmp_path / "copy").name == "checkpoint-4"


def test_path_is_checked_and_resumed(tmp_path, restarted):
    given = saved(tmp_path / "elsewhere")
    assert checkpoint_to_resume(tmp_path / "run", given) == given
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        checkpoint_to_resume(tmp_path / "run", tmp_path / "nowhere")
    saved(tmp_path / "run" / "checkpoint-2")
    restarted()
    assert checkpoint_to_resume(tmp_path / "run", given).name == "checkpoint-2", "what this training wrote since"


def test_newest_checkpoint_without_manifest_is_passed_over(tmp_path, restarted, caplog):
    saved(tmp_path / "checkpoint-4")
    (saved(tmp_path / "checkpoint-6") / MANIFEST_NAME).unlink()
    restarted()
    assert checkpoint_to_resume(tmp_path).name == "checkpoint-4"
    line = "checkpoint-6 is damaged and passed over: osdp_checkpoint.json is missing, so it is incomplete or another program's;"
    assert caplog.text.count(line) == 1


def test_checkpoints_of_another_program_are_taken_where_none_has_a_manifest(tmp_path):
    for name in ("checkpoint-4", "checkpoint-6"):
        (saved(tmp_path / name) / MANIFEST_NAME).unlink()
    assert checkpoint_to_resume(tmp_path, True).name == "checkpoint-6"


def test_restart_passes_over_checkpoints_without_optimizer(tmp_path, restarted, caplog):
    small(tmp_path, "checkpoint-4")
    restarted()
    assert checkpoint_to_resume(tmp_path) is None
    assert "has no optimizer state" in caplog.text and "training starts from the beginning" in caplog.text


def test_damaged_note_of_the_training_is_not_taken_for_none(tmp_path, restarted):
    small(tmp_path)
    start_fresh(tmp_path)
    note = tmp_path / ".partial" / "training.json"
    note.write_text(note.read_text()[:-4])
    restarted()
    with pytest.raises(CheckpointError, match=r"training.json is not JSON .* Remove it to resume from the last checkpoint"):
        last_checkpoint(tmp_path)
    small(tmp_path, "checkpoint-2")  # is not lost for it
    note.unlink()
    assert last_checkpoint(tmp_path).name == "checkpoint-2"


def test_start_without_anything_to_note_writes_nothing(tmp_path):
    start_fresh(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert recorded_batch(tmp_path) is None


def test_changed_settings_are_named_with_value_before_and_now(tmp_path, caplog):
    settings = {"seed": "1", "precision": "bf16", "dataset": "of 80 rows (1234abcd)"}
    folder = tmp_path / "checkpoint-1"
    with CheckpointWriter(settings=settings).new(folder, optimizer="AdamW"):
        pass
    assert Manifest.load(folder).settings == {**settings, "optimizer": "AdamW"}
    warn_of_changes(folder, {**settings, "of no checkpoint yet": "1"}, None)
    assert not caplog.text
    warn_of_changes(folder, {"seed": "2", "precision": "no", "dataset": "of 80 rows (00000000)", "optimizer": "SGD"}, None)
    assert (
        "checkpoint-1 was saved with seed 1, precision bf16, dataset of 80 rows (1234abcd), optimizer AdamW; this run has seed 2,"
        " precision no, dataset of 80 rows (00000000), optimizer SGD: it does not continue the same training."
    ) in caplog.text


def test_manifest_of_an_earlier_version_is_read(tmp_path):
    folder = small(tmp_path)
    path = folder / MANIFEST_NAME
    content = json.loads(path.read_text())
    del content["training"], content["settings"]
    path.write_text(json.dumps(content))
    assert Manifest.load(folder).settings == {} and last_checkpoint(tmp_path) == Path(folder)
