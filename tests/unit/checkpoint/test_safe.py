"""Nothing that stands in a checkpoint is run, no name in it leaves its folder, and no part of a tensor is missing."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hf_osdp.checkpoint.files import SafeReader, check_inside, find_model, read_weights
from hf_osdp.checkpoint.folders import MANIFEST_NAME
from hf_osdp.checkpoint.states import _read_shards, load_loop, load_model
from hf_osdp.errors import CheckpointError

from .checkpoints import saved, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def in_shards(folder: Path) -> Path:
    """Weights of a checkpoint without manifest, as plain Accelerate writes it."""
    path = saved(folder / "checkpoint-1") / "pytorch_model_fsdp_0"
    (path.parent / MANIFEST_NAME).unlink()
    return path


class Pickled:
    """Pickled as a call of `kind`."""

    def __init__(self, kind, *arguments):
        self.kind, self.arguments = kind, arguments

    def __reduce__(self):
        return self.kind, self.arguments


def runs(mark: Path) -> Pickled:
    return Pickled(os.mkdir, str(mark))


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
        with pytest.raises(CheckpointError, match=r"index|cannot be read"):
            reader()
    assert not (tmp_path / "ran").exists()


def nested(levels: int) -> tuple:
    """A tuple that holds another twice, and so on: small as a pickle, twice as long to hash with every level."""
    return (inner := nested(levels - 1), inner) if levels else ()


DEEP = nested(64)


def weight_of(index: dcp.Metadata) -> dcp.TensorStorageMetadata:
    stored = index.state_dict_metadata.values()
    return next(one for one in stored if isinstance(one, dcp.TensorStorageMetadata) and one.size[0] % 2 == 0)


def rows(size: torch.Size, *starts: int) -> list[dcp.ChunkStorageMetadata]:
    """Chunks of half of a tensor's rows each, from these rows on."""
    rest = size[1:]
    return [
        dcp.ChunkStorageMetadata(torch.Size((start, *[0] * len(rest))), torch.Size((size[0] // 2, *rest)))
        for start in starts
    ]


HOSTILE = {
    "layout": lambda index: vars(index).update(planner_data=Pickled(torch.serialization._get_layout, DEEP)),
    "relative path": lambda index: vars(next(iter(index.storage_data.values()))).update(relative_path=DEEP),
    "planner data": lambda index: vars(index).update(planner_data=dict.fromkeys(index.planner_data, ("model", DEEP))),
    "offsets": lambda index: vars(weight_of(index).chunks[0]).update(offsets=DEEP),
    "huge size": lambda index: vars(weight_of(index)).update(size=torch.Size([1 << 50, 1 << 10])),
}
CHUNKS = {
    "none": lambda half: (), "one of two is missing": lambda half: (0,), "one twice": lambda half: (0, 0),
    "the second begins too early": lambda half: (0, half - 1), "the second ends outside": lambda half: (0, half + 1),
}  # fmt: skip


@pytest.mark.parametrize("place", [*HOSTILE, *CHUNKS])
def test_hostile_index_is_refused_at_once(tmp_path, place):
    folder, line = in_shards(tmp_path), r"do not use it|cannot be read"
    index = SafeReader(folder).read_metadata()
    if place in HOSTILE:
        HOSTILE[place](index)
    else:
        weight = weight_of(index)
        weight.chunks = rows(weight.size, *CHUNKS[place](weight.size[0] // 2))
        line = (
            r"\.metadata cannot be read \(ValueError: chunks do not hold each element exactly once of model\..*; use"
        )
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=line):
        load_loop(folder.parent, *trained(seed=9), others={})
    assert time.monotonic() - begun < 5


def test_names_of_files_must_stay_in_the_folder(tmp_path):
    assert check_inside("a/b.distcp") == "a/b.distcp"
    for name in ("../x", "/etc/passwd", "a/../../x", "C:/x", "a\\..\\x", "", None, 3, "x\0y"):
        with pytest.raises(CheckpointError, match="outside of its folder"):
            check_inside(name)
    for content, line in (
        ('{"weight_map": {"w": "../secret.safetensors"}}', "outside of its folder"),
        ("[1]", "cannot be read"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=line):
            read_weights(find_model(tmp_path))
