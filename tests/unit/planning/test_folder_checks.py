"""The output folder: written to, and measured against what checkpoints take."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from hf_osdp.modeling.units import find_units
from hf_osdp.planner.job import OptimizerSpec
from hf_osdp.planning.preflight.findings import Severity
from hf_osdp.planning.preflight.folder import RunFolder, checkpoint_bytes, not_writable, too_small
from tests.helpers.models import tiny_model

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def units():
    return find_units(tiny_model("gpt2", dtype=torch.float32))


def test_a_checkpoint_is_as_large_as_what_torch_saves(units, tmp_path):
    model = tiny_model("gpt2", dtype=torch.float32)
    model.transformer.wte.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
    weights = {id(p): p for p in model.state_dict(keep_vars=True).values()}
    expected = sum(t.nbytes for t in (*weights.values(), *states))
    assert checkpoint_bytes(find_units(model), OptimizerSpec(states=2)) == expected
    assert checkpoint_bytes(units, None) == sum(p.nbytes for p in model.parameters())
    assert checkpoint_bytes(find_units(model), None, adapters=True) == sum(p.nbytes for p in model.parameters() if p.requires_grad)


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path):
    assert not_writable(RunFolder(path=tmp_path)) is None
    assert not_writable(RunFolder(path=tmp_path / "new" / "run")) is None
    assert not list(tmp_path.iterdir())


def test_a_file_and_a_place_that_takes_no_files_are_refused(tmp_path):
    (tmp_path / "taken").write_text("mine")
    found = not_writable(RunFolder(path=tmp_path / "taken"))
    assert found.severity is Severity.ERROR and f"{tmp_path}/taken is a file; give a folder" in found.message
    below = not_writable(RunFolder(path=tmp_path / "taken" / "run")).message
    assert f"{tmp_path}/taken/run: {tmp_path}/taken is a file" in below
    assert "cannot be written" in not_writable(RunFolder(path="/proc/run")).message
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("room", "folder", "severity", "part"),
    [
        (0.9, {}, Severity.ERROR, "A checkpoint takes"),
        (1.9, {}, Severity.WARNING, "room for 1 of the 2"),
        (2.0, {}, None, ""),
        (3.9, {"limit": 3}, Severity.WARNING, "room for 3 of the 4"),
        (0.9, {"states": False}, Severity.WARNING, "room for 2 of the 3"),
        (0.3, {"saves": False}, Severity.WARNING, "The model takes"),
        (0.4, {"saves": False}, None, ""),
    ],
)
def test_room_for_checkpoints(units, tmp_path, monkeypatch, room, folder, severity, part):
    size = checkpoint_bytes(units, OptimizerSpec())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10 * size, 0, int(room * size)))
    limit = {"limit": 2} if folder == {"states": False} else {}
    found = too_small(RunFolder(path=tmp_path / "out", **folder, **limit), units, OptimizerSpec())
    assert (found and found.severity) == severity
    assert found is None or part in found.message


def test_checkpoints_that_lie_there_make_room(units, tmp_path, monkeypatch):
    size = checkpoint_bytes(units, OptimizerSpec())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10 * size, 0, size))
    folder = RunFolder(path=tmp_path, limit=2)
    assert "room for 1 of the 3" in too_small(folder, units, OptimizerSpec()).message
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-20").mkdir()
    assert too_small(folder, units, OptimizerSpec()) is None
    assert too_small(replace(folder, limit=1), units, OptimizerSpec()) is None
