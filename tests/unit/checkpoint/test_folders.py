"""A checkpoint is complete or invisible; what is damaged is named; what a user keeps in its folder stays."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import threading

import numpy as np
import pytest
import torch

from hf_osdp.checkpoint import folders
from hf_osdp.checkpoint.folders import prepare_staging, remove_checkpoint
from hf_osdp.checkpoint.loop import load_loop, load_random_states, save_loop, save_random_states
from hf_osdp.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest
from hf_osdp.checkpoint.resume import check_checkpoint, checkpoint_to_resume, last_checkpoint
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.errors import CheckpointError

from .checkpoints import saved, trained


def small(folder, name="checkpoint-1", content="x", **options):
    with CheckpointWriter(**options).new(folder / name) as staging:
        (staging.path / "inside").mkdir()
        (staging.path / "inside" / "file").write_text(content)
        assert not (folder / name / "inside" / "file").exists() or (folder / name / "inside" / "file").read_text() != content
    return folder / name


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_when_it_is_complete_with_a_sum_of_each_file(tmp_path):
    folder = small(tmp_path)
    manifest = Manifest.load(folder)
    assert manifest.files == {"inside/file": FileRecord.of(folder / "inside" / "file")}
    assert manifest.versions.keys() >= {"torch", "hf_osdp"} and manifest.world_size == 1
    assert names_in(tmp_path) == ["checkpoint-1"]


def test_an_error_amid_writing_leaves_the_one_before(tmp_path):
    small(tmp_path)
    with pytest.raises(KeyError), CheckpointWriter().new(tmp_path / "checkpoint-2") as staging:
        (staging.path / "half").write_text("x")
        raise KeyError
    assert last_checkpoint(tmp_path).name == "checkpoint-1"
    assert names_in(tmp_path) == ["checkpoint-1"]
    small(tmp_path, "checkpoint-3")
    assert names_in(tmp_path) == ["checkpoint-1", "checkpoint-3"]


def test_a_new_one_takes_the_place_of_an_old_one_and_leaves_what_is_not_its(tmp_path):
    folder = small(tmp_path, "state")
    (folder / "log.txt").write_text("a user's")
    (folder / "plots").mkdir()
    small(tmp_path, "state", content="new")
    assert (folder / "inside" / "file").read_text() == "new" and (folder / "log.txt").read_text() == "a user's"
    assert (folder / "plots").is_dir()
    check_checkpoint(folder)
    kept = ("model_best.safetensors", "optimizer_study", "sampler_outputs", "pytorch_model_export", "model-card.md")
    for name in kept:
        (folder / name).mkdir() if "." not in name else (folder / name).write_text("a user's")
    for content in ("newer", "newest"):
        small(tmp_path, "state", content=content)
        assert all((folder / name).exists() for name in kept)
        (folder / MANIFEST_NAME).unlink()  # then names alone tell what is a checkpoint's
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes").write_text("a user's, in a folder that is no checkpoint")
    small(tmp_path, "foreign")
    assert (foreign / "notes").is_file()


def test_a_replacement_that_was_interrupted_is_finished(tmp_path):
    folder, replaced = small(tmp_path), tmp_path / ".partial" / "checkpoint-1.replaced"
    replaced.parent.mkdir(exist_ok=True)
    folder.rename(replaced)  # as if the process ended between the two renames
    assert last_checkpoint(tmp_path) == folder
    small(tmp_path, "checkpoint-2").rename(tmp_path / "elsewhere")
    replaced.parent.mkdir(exist_ok=True)
    (tmp_path / "elsewhere").rename(replaced)  # as if it ended after them
    (replaced / "log.txt").write_text("a user's")
    assert last_checkpoint(tmp_path) == folder and (folder / "log.txt").is_file()
    replaced.parent.mkdir(exist_ok=True)
    folder.rename(replaced)
    check_checkpoint(folder)  # one that is asked for by its name


def test_what_cannot_be_removed_is_warned_of(tmp_path, monkeypatch, caplog):
    elsewhere = small(tmp_path, "elsewhere")
    (tmp_path / "checkpoint-1").symlink_to(elsewhere)
    remove_checkpoint(tmp_path / "checkpoint-1")
    assert not (tmp_path / "checkpoint-1").exists() and (elsewhere / MANIFEST_NAME).is_file() and not caplog.text
    folder = small(tmp_path, "checkpoint-2")
    monkeypatch.setattr("pathlib.Path.rename", lambda *args: (_ for _ in ()).throw(OSError(39, "Directory not empty")))
    remove_checkpoint(folder)
    assert folder.is_dir() and "checkpoint-2 cannot be removed ([Errno 39] Directory not empty); remove it by hand." in caplog.text


def test_what_cannot_be_read_is_damage(tmp_path, monkeypatch, caplog):
    small(tmp_path, "checkpoint-1"), small(tmp_path, "checkpoint-2")
    read = FileRecord.of

    def bad_sector(path):
        if "checkpoint-2" in str(path):
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(FileRecord, "of", bad_sector)
    assert last_checkpoint(tmp_path).name == "checkpoint-1"
    assert "checkpoint-2 is damaged and passed over: inside/file cannot be read ([Errno 5] Input/output error)" in caplog.text


def test_states_of_another_layout_do_not_stay(tmp_path):
    folder = saved(tmp_path / "checkpoint-1", sharded=True)
    (folder / MANIFEST_NAME).unlink()  # as another program writes it
    model, optimizer = trained(seed=5)
    saved(tmp_path / "checkpoint-1", sharded=False, model=model, optimizer=optimizer)
    assert not (folder / "pytorch_model_fsdp_0").exists() and not (folder / "optimizer_0").exists()
    again, its = trained(seed=9)
    load_loop(folder, again, its, others={})
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_an_interrupted_run_left_is_removed_by_the_next_save_of_the_same_checkpoints(tmp_path):
    left = [tmp_path / ".partial" / name for name in ("checkpoint-3", "0123abcd/checkpoint-4", "checkpoint-2.removed")]
    others = [tmp_path / ".partial" / name for name in ("4567abcd/state", "training.json")]
    for path in (*left, *others):
        path.mkdir(parents=True)
    first, second = prepare_staging(tmp_path / "checkpoint-4"), prepare_staging(tmp_path / "checkpoint-5")
    assert first.is_dir() and second.is_dir() and not any(path.exists() for path in left) and all(path.exists() for path in others)


# --------------------------------------------------------------------------------------------------------- one run at a time


@pytest.fixture
def other_run(tmp_path):
    """A run in another process that has begun to write a checkpoint, and holds what it writes."""

    def write(name: str, begun, end) -> None:
        (prepare_staging(tmp_path / name) / "weights").write_text("the other's")
        begun.set()
        end.wait(60)

    processes, context = [], multiprocessing.get_context("fork")
    end = context.Event()

    def start(name: str) -> None:
        begun = context.Event()
        processes.append(context.Process(target=write, args=(name, begun, end)))
        processes[-1].start()
        assert begun.wait(60)

    start.end = end.set
    yield start
    end.set()
    for process in processes:
        process.join()


def test_two_runs_in_one_folder_the_second_is_refused_in_one_line(tmp_path, monkeypatch, other_run):
    monkeypatch.setattr(folders, "_LOCK_WAIT_S", 0.5)
    other_run("checkpoint-1")
    with pytest.raises(CheckpointError, match=r"Another run \(process \d+ on .*\) writes .*; give this run a folder of its own"):
        small(tmp_path, "checkpoint-1")
    with pytest.raises(CheckpointError, match="Another run"):
        checkpoint_to_resume(tmp_path)
    assert [path.read_text() for path in tmp_path.glob(".partial/*/checkpoint-1/weights")] == ["the other's"]
    small(tmp_path, "state"), small(tmp_path / "own")  # other checkpoints


def test_second_run_goes_on_when_the_first_has_ended(tmp_path, caplog, other_run):
    other_run("checkpoint-1")
    threading.Timer(1.0, other_run.end).start()
    folder = small(tmp_path, "checkpoint-1")
    assert Manifest.load(folder).files.keys() == {"inside/file"}, "nothing of the other's"
    assert caplog.text.count("writes checkpoints into") == 1 and "waiting up to 60 s for its end" in caplog.text
    assert not list(tmp_path.glob(".partial/*/checkpoint-1"))


def test_what_is_half_removed_or_no_checkpoint_is_passed_over(tmp_path, caplog):
    small(tmp_path)
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path).name == "checkpoint-1" and "has no weights" in caplog.text
    remove_checkpoint(tmp_path / "checkpoint-9")
    assert names_in(tmp_path) == ["checkpoint-1"]


def test_links_are_followed_and_the_current_folder_is_refused(tmp_path, monkeypatch):
    folder = small(tmp_path)
    (tmp_path / "last").symlink_to(folder)
    small(tmp_path, "last", content="new")
    assert (tmp_path / "last").is_symlink() and (folder / "inside" / "file").read_text() == "new"
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"cannot take the place of .*, in which this program runs; give a folder inside it"):
        small(folder, ".")


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda path: path.write_text("xy"), "inside/file has 2 of 1 bytes"),
        (lambda path: path.write_text("y"), "inside/file has another checksum than when it was written"),
        (lambda path: path.unlink(), "inside/file is missing"),
    ],
)
def test_damage_is_named_and_passed_over(tmp_path, caplog, damage, line):
    small(tmp_path)
    damage(small(tmp_path, "checkpoint-20") / "inside" / "file")
    assert last_checkpoint(tmp_path).name == "checkpoint-1"
    assert f"checkpoint-20 is damaged and passed over: {line}." in caplog.text
    with pytest.raises(CheckpointError, match=f"checkpoint-20 is damaged: {line}; take one before it"):
        check_checkpoint(tmp_path / "checkpoint-20")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda said: said.update(format=9), "has format 9, this version of hf_osdp reads 1"),
        (lambda said: said.pop("files"), "cannot be read"),
        (
            lambda said: said["files"].update({"../../outside": {"size": 1, "crc32": 0}}),
            "names a file '../../outside' outside",
        ),
        (lambda said: said["files"].update({"/etc/passwd": {"size": 1, "crc32": 0}}), "outside of its folder"),
        (lambda said: said["files"].update({"inside/file": {"size": "many", "crc32": 0}}), "cannot be read"),
    ],
)
def test_a_manifest_that_is_none_is_damage(tmp_path, change, line):
    folder = small(tmp_path)
    said = json.loads((folder / MANIFEST_NAME).read_text())
    change(said)
    (folder / MANIFEST_NAME).write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=line):
        check_checkpoint(folder)
    assert last_checkpoint(tmp_path) is None


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_special_file_in_a_checkpoint_is_damage_and_does_not_block(tmp_path, monkeypatch, kind):
    small(tmp_path, "checkpoint-1")
    folder = small(tmp_path, "checkpoint-2")
    if kind == "pipe":
        os.mkfifo(folder / "pytorch_model_fsdp.bin")
    else:
        with socket.socket(socket.AF_UNIX) as listening:
            monkeypatch.chdir(folder)  # the system allows 107 letters in a socket's path
            listening.bind("pytorch_model_fsdp.bin")
    assert last_checkpoint(tmp_path).name == "checkpoint-1"
    with pytest.raises(CheckpointError, match=r"damaged: pytorch_model_fsdp.bin is a pipe, a socket or a device; take one before it"):
        check_checkpoint(folder)


def test_the_last_has_the_highest_number_and_its_marker(tmp_path, caplog):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint_2", "other-99"):
        small(tmp_path, name)
    (tmp_path / "checkpoint-77").write_text("no folder")
    assert last_checkpoint(tmp_path).name == "checkpoint-10"
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path, marker="trainer_state.json").name == "checkpoint-9"
    assert "checkpoint-10 is damaged and passed over: trainer_state.json is missing" in caplog.text
    assert last_checkpoint(tmp_path / "nowhere") is None


def test_where_nothing_can_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written .*; give a folder that is writable"):
        prepare_staging(tmp_path / "file" / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*; give the path of one"):
        check_checkpoint(tmp_path / "nowhere")


def test_shards_are_written_while_training_goes_on(tmp_path):
    model, optimizer = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    writer = CheckpointWriter(in_background=True)
    save_loop(writer, tmp_path / "checkpoint-1", model, optimizer, others={}, progress={"step": 2}, sharded=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    writer.wait()
    assert load_loop(tmp_path / "checkpoint-1", model, optimizer, others={}) == {"step": 2}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_failed_in_the_background_is_raised_later(tmp_path, monkeypatch):
    writer = CheckpointWriter(in_background=True)
    small(tmp_path)
    monkeypatch.setattr("hf_osdp.checkpoint.writer.complete", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "No space left")))
    with writer.new(tmp_path / "checkpoint-2"):
        pass
    with pytest.raises(CheckpointError, match=r"could not be written on rank 0 \(OSError: .* No space left\); the one before"):
        writer.wait()
    writer.wait()  # told once
    assert last_checkpoint(tmp_path).name == "checkpoint-1"


def test_random_states_go_on_and_ranks_that_were_not_there_get_their_own(tmp_path):
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    save_random_states(tmp_path, 0)
    draw = lambda: (torch.rand(2).tolist(), random.random(), np.random.rand())  # noqa: E731
    want = draw()
    load_random_states(tmp_path, 0)
    assert draw() == want
    others = []
    for rank in (1, 2, 1):
        load_random_states(tmp_path, rank)
        others.append(draw())
    assert others[0] == others[2] and len({str(each) for each in (want, *others)}) == 3
    load_random_states(tmp_path / "nowhere", 0)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path):
    from tests.helpers.models import tiny_model

    for sharded in (True, False):
        folder = saved(tmp_path / f"checkpoint-{int(sharded)}", sharded=sharded)
        for other in (tiny_model("llama", layers=1), tiny_model("gpt2", layers=2)):
            with pytest.raises(CheckpointError, match="is not of this model"):
                load_loop(folder, other, torch.optim.AdamW(other.parameters()), others={})
        model, optimizer = trained()
        with pytest.raises(CheckpointError, match=r"lacks scaler.pt, which this run needs"):
            load_loop(folder, model, optimizer, others={"scaler.pt": torch.amp.GradScaler("cpu")})
