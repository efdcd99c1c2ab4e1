"""Wrong files: plans, profiles and checkpoints, each by what is done to a sound one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_osdp.checkpoint.folders import MANIFEST_NAME, FileRecord, Manifest
from hf_osdp.checkpoint.layouts import find_model, find_optimizer, read_weights
from hf_osdp.checkpoint.resume import check_checkpoint
from hf_osdp.checkpoint.safe import load_file
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile, SegmentTimes, SegmentWork, TimePoint, with_block_times
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.plan_run import check_given_plan
from hf_osdp.reading import MOST_BYTES
from tests.helpers.descriptions import transformer
from tests.helpers.problems import problem

Give = Callable[[], object]
"""Gives a wrong input; raises what the user is told."""
Change = Callable[[Any], object] | str | bytes | int | None
"""Of sound JSON, or what a file holds in its place: text, bytes, so many zero bytes; None is no file."""


@cache
def description() -> ModelDescription:
    return transformer()


FOUR = preset("cpu", devices_per_node=4)


@cache
def plan() -> Plan:
    """Of four processes."""
    return search(problem(description(), FOUR, TrainingJob(global_batch_size=8), 2**33)).plan


def unsigned_plan() -> dict[str, Any]:
    """Its JSON without the fingerprint."""
    return {name: value for name, value in json.loads(plan().to_json()).items() if name != "fingerprint"}


@cache
def profile() -> Profile:
    """With times of one segment, of another model."""
    other = transformer(hidden=32)
    times = SegmentTimes(
        class_name=other.units[1].class_name, parameter_shapes=tuple(p.shape for p in other.units[1].parameters),
        sequence_length=other.sequence_length, compute_dtype=DType.FLOAT32, work=SegmentWork.of(other.segments[0]),
        points=(TimePoint(samples=1, forward_s=1.0, backward_s=2.0),),
    )  # fmt: skip
    return Profile(hardware=FOUR, segments=(times,))


def write(path: Path, content: Any, change: Change) -> None:
    """Write sound content after a change, or what stands in its place."""
    match change:
        case None:
            return
        case int():
            with path.open("wb") as file:
                file.truncate(change)
        case str() | bytes():
            path.write_bytes(change if isinstance(change, bytes) else change.encode())
        case _:
            change(content)
            path.write_text(json.dumps(content))


def set_to(name: str, value: object) -> Change:
    return lambda content: content.update({name: value})


ANY_FILES: dict[str, Change] = {
    "no such file": None, "another version": set_to("version", 99), "an unknown key": set_to("colour", "red"),
}  # fmt: skip
PLAN_FILES: dict[str, Change] = {
    **ANY_FILES, "an empty file": "", "a file that was cut short": '{"world_size": 4, "units": [', "a list": "[]",
    "bytes that are no text": b"\x89PNG\xff", f"a file of {MOST_BYTES + 1} bytes": MOST_BYTES + 1,
    "brackets without end": "[" * 5000, "a key that stands twice": '{"world_size": 4, "world_size": 8}',
    "a missing key": lambda content: content.pop("units"), "a text in place of a number": set_to("world_size", "4"),
    "NaN": set_to("step_s", float("nan")), "world_size 0": set_to("world_size", 0),
    "a negative peak": set_to("peak_bytes", -1),
    "a group of 3 of 4 ranks": lambda content: content["units"][2].update(shard_size=3),
    "a unit that stands twice": lambda content: content["units"].append(content["units"][2]),
    "an edited plan with its old fingerprint": set_to("fingerprint", "0123456789abcdef"),
}  # fmt: skip


def beside_plan(**options: object) -> None:
    check_given_plan(plan(), OSDPConfig(**options), plan().peak_bytes)


OTHER_RUNS: dict[str, Give] = {
    "4 processes' plan on 2": lambda: plan().check(description(), 2),
    "a plan of a model with other units": lambda: plan().check(transformer(layers=5), 4),
    "a plan of a model with other shapes": lambda: plan().check(transformer(hidden=32), 4),
    "global_batch_size=16 beside a plan of 8": lambda: beside_plan(global_batch_size=16),
    "samples of 64 tokens beside a plan of 32": lambda: beside_plan(sequence_length=64),
    "memory_limit=1MiB beside a plan of more": lambda: beside_plan(memory_limit=2**20),
}
PROFILES: dict[str, Change] = {
    **ANY_FILES,
    "a file that was cut short": '{"hardware": ',
    "a bandwidth of 0": lambda content: content["hardware"]["device"].update(memory_bytes_per_s=0.0),
    "nodes of no devices": lambda content: content["hardware"].update(devices_per_node=0),
}


def plan_file(given: str, folder: Path) -> Give:
    write(folder / "plan.json", unsigned_plan(), PLAN_FILES[given])
    return lambda: Plan.load(folder / "plan.json")


def profile_file(given: str, folder: Path) -> Give:
    if given == "a profile of another model":
        return lambda: with_block_times(description(), profile())
    write(folder / "profile.json", json.loads(profile().to_json()), PROFILES[given])
    return lambda: Profile.load(folder / "profile.json")


class Opens:
    """Unpickled, it would run something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/nowhere/at/all",))


OUTSIDE = {"../../secret": {"size": 1, "crc32": 1}}
FILES_OF_CHECKPOINTS: dict[str, tuple[str, Change]] = {
    "a file that was cut short": ("model.bin", b"wei"),
    "a file with a changed byte": ("model.bin", b"Weights"),
    "a manifest that was cut short": (MANIFEST_NAME, '{"format": 1'),
    "a manifest of a later version": (MANIFEST_NAME, set_to("format", 99)),
    "a manifest that names a file outside": (MANIFEST_NAME, lambda manifest: manifest["files"].update(OUTSIDE)),
    "model.safetensors of other content": ("model.safetensors", b"no tensors"),
}
READERS: dict[str, Callable[[Path], object]] = {
    "resume_from_checkpoint, which is not there": lambda inside: check_checkpoint(inside / "no"),
    "a folder without weights": find_model,
    "a folder without optimizer states": find_optimizer,
    "a pickle that would run something": lambda inside: load_file(inside / "optimizer.bin"),
    "model.safetensors of other content": lambda inside: read_weights(find_model(inside)),
}


def checkpoint(given: str, folder: Path) -> Give:
    """A checkpoint of one file, after a damage."""
    inside = folder / "checkpoint-30"
    inside.mkdir()
    (inside / "model.bin").write_bytes(b"weights")
    manifest = json.loads(Manifest(files={"model.bin": FileRecord.of(inside / "model.bin")}, world_size=2).to_json())
    (inside / MANIFEST_NAME).write_text(json.dumps(manifest))
    if given == "a file that is missing":
        (inside / "model.bin").unlink()
    if given == "a pickle that would run something":
        torch.save({"state": Opens()}, inside / "optimizer.bin")
    if given in FILES_OF_CHECKPOINTS:
        name, change = FILES_OF_CHECKPOINTS[given]
        write(inside / name, manifest, change)
    return lambda: READERS.get(given, check_checkpoint)(inside)


SECTIONS = {
    "Plan files": plan_file, "Plans of another run": lambda given, folder: OTHER_RUNS[given],
    "Profiles": profile_file, "Checkpoints": checkpoint,
}  # fmt: skip
