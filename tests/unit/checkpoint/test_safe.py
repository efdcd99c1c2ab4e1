"""Nothing that stands in a checkpoint is run, and no name in it leaves its folder."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hf_osdp.checkpoint.folders import MANIFEST_NAME
from hf_osdp.checkpoint.layouts import find_model, read_weights
from hf_osdp.checkpoint.safe import SafeReader, check_inside
from hf_osdp.checkpoint.states import _read_shards, load_loop, load_model
from hf_osdp.errors import CheckpointError

from .checkpoints import saved, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def in_shards(folder: Path) -> Path:
    return saved(folder / "checkpoint-1") / "pytorch_model_fsdp_0"


def test_states_in_shards_run_nothing(tmp_path):
    def states(rate: object) -> dict[str, object]:
        return {"optimizer": {"state": {}, "param_groups": [{"params": [], "lr": rate}]}}

    dcp.save(states(runs(tmp_path / "ran")), checkpoint_id=tmp_path / "optimizer_0")
    with pytest.raises(CheckpointError, match=r"cannot be read .*no plain value: unsupported GLOBAL posix") as raised:
        _read_shards(tmp_path / "optimizer_0", states(0.0))
    assert "weights_only" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["call", "dotted", "list", "short", "none"])
def test_index_runs_nothing(tmp_path, content):
    index = in_shards(tmp_path) / ".metadata"
    bad = {
        "call": pickle.dumps(runs(tmp_path / "ran")),
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",  # protocol 4 looks names with dots up part by part
        "list": pickle.dumps(["a list"]),
        "short": index.read_bytes()[:-20],
    }
    index.unlink()
    if content in bad:
        index.write_bytes(bad[content])
    model, _ = trained(seed=9)
    for reader in (SafeReader(index.parent).read_metadata, lambda: load_model(index.parent.parent, model)):
        with pytest.raises(CheckpointError, match=r"index|cannot be read|is missing"):
            reader()
    assert not (tmp_path / "ran").exists()


def nested(levels: int) -> tuple:
    """A tuple that holds another twice, and so on: small as a pickle, twice as long to hash with every level."""
    value: tuple = ()
    for _ in range(levels):
        value = (value, value)
    return value


class Pickled:
    """Pickled as a call of `kind`."""

    def __init__(self, kind, *arguments):
        self.kind, self.arguments = kind, arguments

    def __reduce__(self):
        return self.kind, self.arguments


def runs(mark: Path) -> Pickled:
    return Pickled(os.mkdir, str(mark))


@pytest.mark.parametrize("place", ["layout", "relative path", "planner data", "size", "huge size"])
def test_hostile_index_is_refused_at_once(tmp_path, place):
    folder = in_shards(tmp_path)
    index, deep = SafeReader(folder).read_metadata(), nested(64)
    match place:
        case "layout":
            index.planner_data = Pickled(torch.serialization._get_layout, deep)
        case "relative path":
            next(iter(index.storage_data.values())).relative_path = deep
        case "planner data":
            index.planner_data = dict.fromkeys(index.planner_data, ("model", deep))
        case "size":
            next(iter(index.state_dict_metadata.values())).chunks[0].offsets = deep
        case "huge size":
            next(iter(index.state_dict_metadata.values())).size = torch.Size([1 << 50, 1 << 10])
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    (folder.parent / MANIFEST_NAME).unlink()  # as of plain Accelerate
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=r"do not use it|cannot be read"):
        load_loop(folder.parent, *trained(seed=9), others={})
    assert time.monotonic() - begun < 5


def test_names_of_files_must_stay_in_the_folder(tmp_path):
    assert check_inside("a/b.distcp") == "a/b.distcp"
    for name in ("../x", "/etc/passwd", "a/../../x", "C:/x", "a\\..\\x", "", None, 3, "x\0y"):
        with pytest.raises(CheckpointError, match="outside of its folder"):
            check_inside(name)
    reader = SafeReader(in_shards(tmp_path))
    index = reader.read_metadata()
    for info in index.storage_data.values():
        info.relative_path = "../../elsewhere.distcp"
    (Path(reader.path) / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        reader.read_metadata()
    for content, line in (
        ('{"weight_map": {"w": "../secret.safetensors"}}', "outside of its folder"),
        ("[1]", "cannot be read"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=line):
            read_weights(find_model(tmp_path))
