"""Checkpoints whose files say what no training wrote: each is refused in one line, and at once."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.optim import lr_scheduler as schedulers

from hf_osdp.checkpoint.folders import MANIFEST_NAME, Manifest
from hf_osdp.checkpoint.resume import check_checkpoint, last_checkpoint
from hf_osdp.checkpoint.safe import SafeReader, load_file
from hf_osdp.checkpoint.states import load_loop
from hf_osdp.errors import CheckpointError
from hf_osdp.integrations.checkpoints import rescale_schedules
from tests.unit.checkpoint.checkpoints import saved, trained
from tests.unit.integrations.test_schedules import KINDS, made, own

from .bad_files import Opens

pytestmark = pytest.mark.filterwarnings("ignore")


def halves(size: torch.Size, second: int) -> list[ChunkStorageMetadata]:
    """Two chunks along the first dim, the second beginning at this row."""
    rest, rows = size[1:], size[0] // 2
    chunks = ((0, rows), (second, size[0] - rows))
    made = (((at, *(0 for _ in rest)), (length, *rest)) for at, length in chunks)
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in made]


CHUNKS = {
    "one of two is missing": lambda size: halves(size, size[0] // 2)[:1],
    "one twice": lambda size: [halves(size, size[0] // 2)[0]] * 2,
    "the second begins too early": lambda size: halves(size, size[0] // 2 - 1),
    "the second ends outside": lambda size: halves(size, size[0] // 2 + 1),
    "none": lambda size: [],
}


@pytest.mark.parametrize("case", CHUNKS)
def test_index_whose_chunks_do_not_tile_a_tensor_is_refused(tmp_path, case):
    folder = saved(tmp_path / "checkpoint-1")
    (folder / MANIFEST_NAME).unlink()  # as of plain Accelerate
    index = SafeReader(folder / "pytorch_model_fsdp_0").read_metadata()
    for stored in index.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata) and stored.size[0] % 2 == 0:
            stored.chunks = CHUNKS[case](stored.size)
    (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(index))
    line = r"\.metadata cannot be read \(ValueError: chunks do not hold each element exactly once of model\..*; use"
    with pytest.raises(CheckpointError, match=line):
        load_loop(folder, *trained(seed=9), others={})


ABSURD = [("global_batch_size", 2**62), ("global_batch_size", -4), ("world_size", 0), ("world_size", 2**40)]


@pytest.mark.parametrize(("field", "value"), ABSURD)
def test_manifest_with_absurd_number_is_damage(tmp_path, field, value):
    folder = saved(tmp_path / "checkpoint-1")
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=rf"is damaged: .*{field}: {value} is not between 1 and"):
        check_checkpoint(folder)
    assert last_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError):
        replace(Manifest(files={}, world_size=1), **{field: value})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [*KINDS, "two on one optimizer"])
def test_huge_position_of_a_schedule_is_never_stepped_to(kind):
    kinds = [KINDS["step"], KINDS["exponential"]] if kind not in KINDS else [KINDS[kind]]
    optimizer, several = made(kinds, 1)
    before = [own(scheduler) for scheduler in several]
    for scheduler in several:
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 2**62})
    left = rescale_schedules(before, Fraction(1, 2))
    assert (left == []) == (kind == "one cycle"), left  # which ends at its last step
    assert all(0 <= group["lr"] <= 0.4 for group in optimizer.param_groups)


@pytest.mark.parametrize("content", ["call", "class", "garbage", "cut"])
def test_refused_pickle_does_not_advise_to_load_it_unsafely(tmp_path, content):
    path = tmp_path / "optimizer.bin"
    torch.save({"state": Opens() if content != "class" else schedulers.StepLR}, path)
    if content == "garbage":
        path.write_bytes(b"\x80\x02garbage")
    if content == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values") as raised:
        load_file(path)
    said = str(raised.value)
    assert not any(word in said for word in ("weights_only", "trust", "arbitrary code", "\n")), said
