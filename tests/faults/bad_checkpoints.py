"""Bad checkpoints: damaged, of a later version, of other content, or made to run something."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_osdp.checkpoint.layouts import find_model, find_optimizer, read_weights
from hf_osdp.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest
from hf_osdp.checkpoint.resume import check_checkpoint
from hf_osdp.checkpoint.safe import load_file

from .bad_files import Change, set_to
from .bad_inputs import BadInput, raised

CASES: list[BadInput] = []


def checkpoint(given: str, names: str, line: str, do: Callable[[Path], object], damage: Callable[[Path], object]) -> None:
    """A checkpoint of one file, after a damage."""

    def prepare(folder: Path) -> None:
        inside = folder / "checkpoint-30"
        inside.mkdir()
        (inside / "model.bin").write_bytes(b"weights")
        manifest = Manifest(files={"model.bin": FileRecord.of(inside / "model.bin")}, world_size=2)
        (inside / MANIFEST_NAME).write_text(manifest.to_json())
        damage(inside)

    said = raised(lambda folder: do(folder / "checkpoint-30"))
    CASES.append(BadInput(place="Checkpoints", given=given, names=names, line=line, said=said, prepare=prepare))


def manifest_with(change: Change) -> Callable[[Path], object]:
    def damage(inside: Path) -> None:
        content = json.loads((inside / MANIFEST_NAME).read_text())
        change(content)
        (inside / MANIFEST_NAME).write_text(json.dumps(content))

    return damage


class Opens:
    """Unpickled, it would run something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/nowhere/at/all",))


def nothing(inside: Path) -> None:
    """No damage."""


checkpoint(
    "resume_from_checkpoint, which is not there",
    "FOLDER/checkpoint-30/no",
    "There is no checkpoint FOLDER/checkpoint-30/no; give the path of one.",
    lambda inside: check_checkpoint(inside / "no"),
    nothing,
)
checkpoint(
    "a file that is missing",
    "model.bin is missing",
    "Checkpoint FOLDER/checkpoint-30 is damaged: model.bin is missing; take one before it.",
    check_checkpoint,
    lambda inside: (inside / "model.bin").unlink(),
)
checkpoint(
    "a file that was cut short",
    "3 of 7 bytes",
    "Checkpoint FOLDER/checkpoint-30 is damaged: model.bin has 3 of 7 bytes; take one before it.",
    check_checkpoint,
    lambda inside: (inside / "model.bin").write_bytes(b"wei"),
)
checkpoint(
    "a file with a changed byte",
    "model.bin",
    "Checkpoint FOLDER/checkpoint-30 is damaged: model.bin has another checksum than when it was written; take one before it.",
    check_checkpoint,
    lambda inside: (inside / "model.bin").write_bytes(b"Weights"),
)
checkpoint(
    "a manifest that was cut short",
    MANIFEST_NAME,
    "Checkpoint FOLDER/checkpoint-30 is damaged: FOLDER/checkpoint-30/osdp_checkpoint.json is not JSON "
    "(line 1, column 13: ‹reason›); it is not a manifest that can be read; take one before it.",
    check_checkpoint,
    lambda inside: (inside / MANIFEST_NAME).write_text('{"format": 1'),
)
checkpoint(
    "a manifest of a later version",
    "format 99",
    "Checkpoint FOLDER/checkpoint-30 is damaged: FOLDER/checkpoint-30/osdp_checkpoint.json has format 99, this "
    "version of hf_osdp reads 1; update hf_osdp, or take another one; take one before it.",
    check_checkpoint,
    manifest_with(set_to("format", 99)),
)
checkpoint(
    "a manifest that names a file outside",
    "'../../secret'",
    "Checkpoint FOLDER/checkpoint-30 is damaged: The checkpoint names a file '../../secret' outside of its folder; "
    "it was not written by training, do not use it; take one before it.",
    check_checkpoint,
    manifest_with(lambda content: content["files"].update({"../../secret": {"size": 1, "crc32": 1}})),
)
checkpoint(
    "a folder without weights",
    "FOLDER/checkpoint-30",
    "FOLDER/checkpoint-30 has no weights (pytorch_model_fsdp_0/, pytorch_model_fsdp.bin, model.safetensors, "
    "pytorch_model.bin, model.safetensors.index.json, adapter_model.safetensors); give another.",
    find_model,
    nothing,
)
checkpoint(
    "a folder without optimizer states",
    "FOLDER/checkpoint-30",
    "FOLDER/checkpoint-30 has no optimizer state (optimizer_0/, optimizer.bin, optimizer.pt); give another.",
    find_optimizer,
    nothing,
)
checkpoint(
    "a pickle that would run something",
    "FOLDER/checkpoint-30/optimizer.bin",
    "FOLDER/checkpoint-30/optimizer.bin cannot be read as tensors and plain values (Unsupported global: GLOBAL "
    "‹name›); take another checkpoint.",
    lambda inside: load_file(inside / "optimizer.bin"),
    lambda inside: torch.save({"state": Opens()}, inside / "optimizer.bin"),
)
checkpoint(
    "model.safetensors of other content",
    "FOLDER/checkpoint-30/model.safetensors",
    "FOLDER/checkpoint-30/model.safetensors cannot be read (‹reason›); take another checkpoint.",
    lambda inside: read_weights(find_model(inside)),
    lambda inside: (inside / "model.safetensors").write_bytes(b"no tensors"),
)
