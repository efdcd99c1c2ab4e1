"""Bad files: plans, profiles, checkpoints, and files of arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile, SegmentTimes, SegmentWork, TimePoint, with_block_times
from hf_osdp.planner.search.search import search
from hf_osdp.planning.plan_run import check_given_plan
from hf_osdp.reading import MOST_BYTES
from tests.helpers.descriptions import transformer
from tests.helpers.problems import problem

from .bad_inputs import BadInput, raised

CASES: list[BadInput] = []
Change = Callable[[Any], object]


@cache
def description() -> ModelDescription:
    return transformer()


@cache
def plan() -> Plan:
    """Of four processes."""
    return search(problem(description(), preset("cpu", devices_per_node=4), TrainingJob(global_batch_size=8), 2**33)).plan


@cache
def profile() -> Profile:
    """With times of one segment, of another model."""
    other = transformer(hidden=32)
    times = SegmentTimes(
        class_name=other.units[1].class_name,
        parameter_shapes=tuple(p.shape for p in other.units[1].parameters),
        sequence_length=other.sequence_length,
        compute_dtype=DType.FLOAT32,
        work=SegmentWork.of(other.segments[0]),
        points=(TimePoint(samples=1, forward_s=1.0, backward_s=2.0),),
    )
    return Profile(hardware=preset("cpu", devices_per_node=4), segments=(times,))


def file_of(whole: Callable[[], str], name: str, change: Change | str | bytes | int | None) -> Callable[[Path], None]:
    """Writes a file: sound JSON after a change, other content, so many zero bytes, or none."""

    def prepare(folder: Path) -> None:
        path = folder / name
        match change:
            case None:
                return
            case int():
                with path.open("wb") as file:
                    file.truncate(change)
            case str() | bytes():
                path.write_bytes(change if isinstance(change, bytes) else change.encode())
            case _:
                content = json.loads(whole())
                change(content)
                path.write_text(json.dumps(content))

    return prepare


def plan_file(given: str, names: str, line: str, change: Change | str | bytes | int | None) -> None:
    """A plan file; where it is changed as JSON, without its fingerprint."""

    def unsigned() -> str:
        content = json.loads(plan().to_json())
        return json.dumps({name: value for name, value in content.items() if name != "fingerprint"})

    prepare = file_of(unsigned, "plan.json", change)
    said = raised(lambda folder: Plan.load(folder / "plan.json"))
    CASES.append(BadInput(place="Plan files", given=given, names=names, line=line, said=said, prepare=prepare))


def set_to(name: str, value: object) -> Change:
    return lambda content: content.update({name: value})


plan_file(
    "no such file",
    "FOLDER/plan.json",
    "Cannot read the plan FOLDER/plan.json: No such file or directory; give a file that can be read.",
    None,
)
plan_file(
    "an empty file",
    "FOLDER/plan.json",
    "FOLDER/plan.json is not JSON (line 1, column 1: Expecting value). Write it again with Plan.save.",
    "",
)
plan_file(
    "a file that was cut short",
    "FOLDER/plan.json",
    "FOLDER/plan.json is not JSON (line 1, column 29: Expecting value). Write it again with Plan.save.",
    '{"world_size": 4, "units": [',
)
plan_file(
    "bytes that are no text",
    "FOLDER/plan.json",
    "FOLDER/plan.json is not JSON (byte 0 is not UTF-8: invalid start byte). Write it again with Plan.save.",
    b"\x89PNG\xff",
)
plan_file("a list", "list", "FOLDER/plan.json holds a list, not a plan. Write it again with Plan.save.", "[]")
plan_file(
    f"a file of {MOST_BYTES + 1} bytes",
    str(MOST_BYTES + 1),
    "FOLDER/plan.json has 33554433 bytes, more than the 33554432 that a plan may have; it is not a plan.",
    MOST_BYTES + 1,
)
plan_file(
    "brackets without end",
    "FOLDER/plan.json",
    "FOLDER/plan.json is JSON that is nested more than 64 deep. Write it again with Plan.save.",
    "[" * 5000,
)
plan_file(
    "a key that stands twice",
    "'world_size'",
    "FOLDER/plan.json has the key 'world_size' twice in one object. Write it again with Plan.save.",
    '{"world_size": 4, "world_size": 8}',
)
plan_file("another version", "version 99", "The plan has version 99; this hf_osdp reads version 4. Plan again.", set_to("version", 99))
plan_file("an unknown key", "colour", "FOLDER/plan.json is not a valid plan: colour: ‹reason›.", set_to("colour", "red"))
plan_file("a missing key", "units", "FOLDER/plan.json is not a valid plan: units: ‹reason›.", lambda content: content.pop("units"))
plan_file(
    "a text in place of a number",
    "world_size",
    "FOLDER/plan.json is not a valid plan: world_size: ‹reason›.",
    set_to("world_size", "4"),
)
plan_file("NaN", "NaN", "FOLDER/plan.json has NaN, which is no number. Write it again with Plan.save.", set_to("step_s", float("nan")))
plan_file(
    "world_size 0",
    "world_size=0",
    "FOLDER/plan.json is not a valid plan: The plan has world_size=0; it must be at least 1 and at most 131072.",
    set_to("world_size", 0),
)
plan_file(
    "a negative peak",
    "peak_bytes=-1",
    "FOLDER/plan.json is not a valid plan: The plan has peak_bytes=-1; it must be finite and not negative.",
    set_to("peak_bytes", -1),
)
plan_file(
    "a group of 3 of 4 ranks",
    "3 ranks",
    "FOLDER/plan.json is not a valid plan: Unit 'layers.0' is sharded over 3 ranks, which does not divide the world"
    " size 4; plan again for 4 processes.",
    lambda content: content["units"][2].update(shard_size=3),
)
plan_file(
    "a unit that stands twice",
    "'layers.0'",
    "FOLDER/plan.json is not a valid plan: Unit 'layers.0' is listed twice in the plan.",
    lambda content: content["units"].append(content["units"][2]),
)
plan_file(
    "an edited plan with its old fingerprint",
    plan_fingerprint := "FOLDER/plan.json",
    "FOLDER/plan.json was changed or damaged: it states fingerprint '0123456789abcdef', its content has ‹hash›. "
    "Plan again, or leave the fingerprint out where the change was meant.",
    set_to("fingerprint", "0123456789abcdef"),
)


def given_plan(given: str, names: str, line: str, do: Callable[[], object]) -> None:
    """A sound plan in a run that it is not for."""
    said = raised(lambda folder: do())
    CASES.append(BadInput(place="Plans of another run", given=given, names=names, line=line, said=said))


given_plan(
    "4 processes' plan on 2",
    "2 are running",
    "The plan is for 4 processes, but 2 are running. Start 4 processes, or plan again.",
    lambda: plan().check(description(), 2),
)
given_plan(
    "a plan of a model with other units",
    "layers.4",
    "The plan says nothing about layers.4. Plan again for this model.",
    lambda: plan().check(transformer(layers=5), 4),
)
given_plan(
    "a plan of a model with other shapes",
    "fingerprint",
    "The plan is for a model with fingerprint ‹hash›, but this one has ‹hash›: parameter names, shapes or dtypes differ. Plan again.",
    lambda: plan().check(transformer(hidden=32), 4),
)
given_plan(
    "global_batch_size=16 beside a plan of 8",
    "16",
    "The plan takes 8 samples a step, but 16 are asked for. Plan again, or change the arguments.",
    lambda: check_given_plan(plan(), global_batch_size=16),
)
given_plan(
    "samples of 64 tokens beside a plan of 32",
    "64",
    "The plan is for 32 tokens a sample, but samples have 64. Plan again, or change the arguments.",
    lambda: check_given_plan(plan(), sequence_length=64),
)
given_plan(
    "memory_limit=1MiB beside a plan of more",
    "1.0 MiB",
    "The plan needs 3.8 MiB, more than memory_limit=1.0 MiB. Plan again, or change the arguments.",
    lambda: check_given_plan(plan(), memory_limit_bytes=2**20),
)
given_plan(
    "a limit beside a plan without a peak",
    "1.0 MiB",
    "The plan states no peak to hold against memory_limit=1.0 MiB. Plan again, or leave memory_limit out.",
    lambda: check_given_plan(replace(plan(), peak_bytes=None), memory_limit_bytes=2**20),
)


def profile_file(given: str, names: str, line: str, change: Change | str | bytes | int | None) -> None:
    """A profile's file."""
    prepare = file_of(lambda: profile().to_json(), "profile.json", change)
    said = raised(lambda folder: Profile.load(folder / "profile.json"))
    CASES.append(BadInput(place="Profiles", given=given, names=names, line=line, said=said, prepare=prepare))


profile_file(
    "no such file",
    "FOLDER/profile.json",
    "Cannot read the profile FOLDER/profile.json: No such file or directory; give a file that can be read.",
    None,
)
profile_file(
    "a file that was cut short",
    "FOLDER/profile.json",
    "FOLDER/profile.json is not JSON (line 1, column 14: Expecting value). Profile again, or name another file.",
    '{"hardware": ',
)
profile_file(
    "another version",
    "version 99",
    "FOLDER/profile.json is not a valid profile: The profile has version 99; this hf_osdp reads version 3. Profile again.",
    set_to("version", 99),
)
profile_file("an unknown key", "colour", "FOLDER/profile.json is not a valid profile: colour: ‹reason›.", set_to("colour", "red"))
profile_file(
    "a bandwidth of 0",
    "CPU",
    "FOLDER/profile.json is not a valid profile: hardware.device: Device 'CPU': memory, memory bandwidth and FLOP/s"
    " must be positive and finite.",
    lambda content: content["hardware"]["device"].update(memory_bytes_per_s=0.0),
)
profile_file(
    "nodes of no devices",
    "devices_per_node=0",
    "FOLDER/profile.json is not a valid profile: hardware: nodes=1 and devices_per_node=0 must be at least 1.",
    lambda content: content["hardware"].update(devices_per_node=0),
)
CASES.append(
    BadInput(
        place="Profiles",
        given="a profile of another model",
        names="32 tokens",
        line="The profile has no times for Root 'embedding+head' at 32 tokens in float32; its segments of that class have "
        "other parameter shapes, attention, dropout or checkpointing. Profile this model, or plan with the profile's "
        "hardware alone.",
        said=raised(lambda folder: with_block_times(description(), profile())),
    )
)
