"""Which checkpoint a start resumes from: of which training, and what is passed over."""

from __future__ import annotations

import shutil

import pytest

from hf_osdp.checkpoint import resume
from hf_osdp.checkpoint.folders import MANIFEST_NAME
from hf_osdp.checkpoint.resume import checkpoint_to_resume, last_checkpoint
from hf_osdp.errors import CheckpointError

from .checkpoints import saved
from .test_folders import small


@pytest.fixture
def restarted(monkeypatch):
    """Calls after which this start counts as a restart."""
    return lambda: monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


def test_last_checkpoint_has_the_highest_number_and_its_marker(tmp_path, caplog):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint_2", "other-99"):
        small(tmp_path, name)
    (tmp_path / "checkpoint-77").write_text("no folder")
    (tmp_path / "checkpoint-99").mkdir()  # half removed, or no checkpoint
    assert last_checkpoint(tmp_path).name == "checkpoint-10" and "has no weights" in caplog.text
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path, marker="trainer_state.json").name == "checkpoint-9"
    assert "checkpoint-10: trainer_state.json is missing" in caplog.text
    assert last_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("copied", [False, True])
def test_restart_takes_checkpoints_of_its_own_training_only(tmp_path, restarted, copied):
    folder = tmp_path / "run"
    for name in ("checkpoint-4", "checkpoint-6"):
        small(folder, name)
    assert checkpoint_to_resume(folder) is None
    assert last_checkpoint(folder).name == "checkpoint-6", "one that is asked for"
    saved(folder / "checkpoint-4")  # written again by this training
    if copied:  # other inodes and times
        folder = shutil.copytree(folder, tmp_path / "copy")
    restarted()
    assert checkpoint_to_resume(folder).name == "checkpoint-4"
    assert checkpoint_to_resume(folder, False) is checkpoint_to_resume(folder, after_restart=False) is None
    assert checkpoint_to_resume(folder, True).name == "checkpoint-6"


def test_given_path_is_checked_and_resumed(tmp_path, restarted):
    given = saved(tmp_path / "elsewhere")
    assert checkpoint_to_resume(tmp_path / "run", given) == given
    with pytest.raises(CheckpointError, match=r"Can't find a valid checkpoint at .*; give the path of a checkpoint"):
        checkpoint_to_resume(tmp_path / "run", tmp_path / "nowhere")
    checkpoint_to_resume(tmp_path / "run", given)
    saved(tmp_path / "run" / "checkpoint-2")
    restarted()
    assert checkpoint_to_resume(tmp_path / "run", given).name == "checkpoint-2", "what this training wrote since"


def test_newest_checkpoint_without_manifest_yields_to_those_with_one(tmp_path, restarted, caplog):
    saved(tmp_path / "checkpoint-4")
    (saved(tmp_path / "checkpoint-6") / MANIFEST_NAME).unlink()
    restarted()
    assert checkpoint_to_resume(tmp_path).name == "checkpoint-4"
    line = "checkpoint-6: osdp_checkpoint.json is missing, so it is incomplete or another program's;"
    assert caplog.text.count(line) == 1
    (tmp_path / "checkpoint-4" / MANIFEST_NAME).unlink()
    assert checkpoint_to_resume(tmp_path, True).name == "checkpoint-6"


@pytest.mark.parametrize(("note", "line"), [('{"training": "ab', "is not JSON"), ("[]", "holds no training id")])
def test_damaged_note_of_the_training_is_not_taken_for_none(tmp_path, restarted, note, line):
    checkpoint_to_resume(tmp_path)
    small(tmp_path)
    path = tmp_path / ".partial" / "training.json"
    path.write_text(note)
    restarted()
    with pytest.raises(CheckpointError, match=f"training.json {line}.* Remove it, and set resume_from"):
        last_checkpoint(tmp_path)
    small(tmp_path, "checkpoint-2")  # is not lost for it
    path.unlink()
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    assert resume.recorded_manifest(tmp_path) is None
