"""A checkpoint is complete or invisible; what is damaged is named; what a user keeps in its folder stays."""

from __future__ import annotations

import os
from unittest.mock import Mock

import pytest

from hf_osdp.checkpoint.folders import MANIFEST_NAME, FileRecord, Manifest, prepare_staging
from hf_osdp.checkpoint.resume import check_checkpoint, last_checkpoint
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.errors import CheckpointError


def small(folder, name="checkpoint-1", content="x", **options):
    with CheckpointWriter(**options).new(folder / name) as staging:
        (staging.path / "inside").mkdir()
        (staging.path / "inside" / "file").write_text(content)
        there = folder / name / "inside" / "file"
        assert not there.exists() or there.read_text() != content
    return folder / name


def names_in(folder):
    """Names of all but the record of the training."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".partial")


def test_complete_folder_appears_with_record_and_none_after_an_error(tmp_path):
    folder = small(tmp_path)
    manifest = Manifest.load(folder)
    assert manifest.files == {"inside/file": FileRecord.of(folder / "inside" / "file")}
    assert manifest.versions.keys() >= {"torch", "hf_osdp"} and manifest.world_size == 1
    with pytest.raises(KeyError), CheckpointWriter().new(tmp_path / "checkpoint-2") as staging:
        (staging.path / "half").write_text("x")
        raise KeyError
    assert last_checkpoint(tmp_path).name == "checkpoint-1" and names_in(tmp_path) == ["checkpoint-1"]


def test_replaced_checkpoint_leaves_files_that_are_not_its_own(tmp_path):
    folder = small(tmp_path, "state")
    kept = """log.txt plots model_best.safetensors optimizer_study sampler_outputs pytorch_model_export
        model-card.md""".split()
    for name in kept:
        (folder / name).mkdir() if "." not in name else (folder / name).write_text("a user's")
    for content in ("new", "newer", "newest"):
        small(tmp_path, "state", content=content)
        check_checkpoint(folder)
        assert (folder / "inside" / "file").read_text() == content and all((folder / name).exists() for name in kept)
        if content != "new":
            (folder / MANIFEST_NAME).unlink()  # then names alone tell what is a checkpoint's
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes").write_text("a user's, in a folder that is no checkpoint")
    small(tmp_path, "foreign")
    assert (foreign / "notes").is_file()


def test_interrupted_replacement_is_finished(tmp_path):
    folder, replaced = small(tmp_path), tmp_path / ".partial" / "checkpoint-1.replaced"

    def interrupted(path):
        replaced.parent.mkdir(exist_ok=True)
        path.rename(replaced)

    interrupted(folder)  # as if the process ended between the two renames
    assert last_checkpoint(tmp_path) == folder
    interrupted(small(tmp_path, "checkpoint-2"))  # as if it ended after them
    (replaced / "log.txt").write_text("a user's")
    assert last_checkpoint(tmp_path) == folder and (folder / "log.txt").is_file()
    interrupted(folder)
    check_checkpoint(folder)  # one that is asked for by its name


def test_leftovers_of_an_interrupted_run_are_removed_by_next_save(tmp_path):
    left = [tmp_path / ".partial" / name for name in ("checkpoint-3", "0123abcd/checkpoint-4", "checkpoint-2.removed")]
    others = [tmp_path / ".partial" / name for name in ("4567abcd/state", "training.json")]
    for path in (*left, *others):
        path.mkdir(parents=True)
    first, second = prepare_staging(tmp_path / "checkpoint-4"), prepare_staging(tmp_path / "checkpoint-5")
    assert first.is_dir() and second.is_dir() and not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


def with_bad_sector(path, monkeypatch):
    read, bad = FileRecord.of, Mock(side_effect=OSError(5, "Input/output error"))
    monkeypatch.setattr(FileRecord, "of", lambda file: (bad if file == path else read)(file))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (with_bad_sector, r"inside/file cannot be read ([Errno 5] Input/output error)"),
        (lambda path, _: os.mkfifo(path.parent / "pipe"), "inside/pipe is a pipe, a socket or a device"),
    ],
)
def test_damage_is_named_and_passed_over(tmp_path, caplog, monkeypatch, damage, line):
    small(tmp_path)
    damage(small(tmp_path, "checkpoint-20") / "inside" / "file", monkeypatch)
    assert last_checkpoint(tmp_path).name == "checkpoint-1"
    assert f"checkpoint-20: {line}." in caplog.text
    with pytest.raises(CheckpointError) as raised:
        check_checkpoint(tmp_path / "checkpoint-20")
    assert str(raised.value).endswith(f"checkpoint-20 is damaged: {line}; use an earlier checkpoint.")
