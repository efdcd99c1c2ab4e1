"""Plans and profiles survive their JSON form; whatever is done to a file of either is read or is its error."""

import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from hf_osdp.errors import OSDPError, PlanError, ProfileError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.hardware import (
    Collective,
    CollectiveTiming,
    FsdpOverhead,
    WorkTime,
)
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.profile import Profile, SegmentTimes, SegmentWork, TimePoint, with_block_times
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import OptimizerStep, TrainingJob
from hf_osdp.report.explain import explain
from hf_osdp.report.explanations import explanation_parts
from hf_osdp.report.plan_file import PlanInputs, plan_file_content, read_plan_file
from hf_osdp.report.tables import plan_lines, plan_table
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import host_of, toy_hardware
from tests.helpers.problems import problem
from tests.helpers.properties import holds

MODEL = transformer(layers=2)
JOB = TrainingJob(global_batch_size=8)
TIMING = CollectiveTiming(collective=Collective.ALL_GATHER, group_size=4, latency_s=1e-5, seconds_per_byte=1e-10)
HANDLING = FsdpOverhead(
    **dict.fromkeys(("copy", "flatten", "gather", "reduce"), WorkTime()),
    updates={step: WorkTime() for step in OptimizerStep},
)
HOST = host_of(2**36, to_device=1e10, to_host=1e10, update=1e10)
FULL = toy_hardware(devices_per_node=4, timings=(TIMING,), host=HOST, fsdp_overhead=HANDLING)
PLAN = search(problem(MODEL, FULL, JOB, 2**30)).plan
PROFILE = Profile(
    hardware=FULL,
    segments=tuple(
        SegmentTimes(
            class_name=MODEL.units[s.unit].class_name,
            parameter_shapes=tuple(p.shape for p in MODEL.units[s.unit].parameters),
            sequence_length=MODEL.sequence_length, compute_dtype=MODEL.compute_dtype, work=SegmentWork.of(s),
            points=(TimePoint(samples=1, forward_s=1e-3, backward_s=2e-3),),
        )
        for s in MODEL.segments
    ),
    device_names=("toy",) * 4, versions={"torch": "2.13.0"},
)  # fmt: skip


def read_inputs(text: str | bytes) -> None:
    """A file of a plan and its inputs; what can be read can be explained, or is refused as any model may be."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        plan, inputs = read_plan_file(path)
    if inputs is None:
        return
    try:
        found = explain(plan, inputs)
    except (OSDPError, ValueError) as refused:
        assert str(refused)
    else:
        assert plan_table(found) and plan_lines(found) and explanation_parts(found)


def read_plan(text: str | bytes) -> None:
    plan = Plan.from_json(text)
    try:
        plan.check(MODEL, 4)
    except PlanError:
        return
    plan.to_json()


def read_profile(text: str | bytes) -> None:
    """What can be read can be planned with, or is refused as any hardware may be."""
    profile = Profile.from_json(text)
    try:
        search(problem(with_block_times(MODEL, profile), profile.hardware, JOB, 2**40))
    except (OSDPError, ValueError) as refused:
        assert str(refused)


FILES: dict[str, tuple[Callable[..., None], type[Exception], Any]] = {
    "plan": (read_plan, PlanError, json.loads(PLAN.to_json())),
    "profile": (read_profile, ProfileError, json.loads(PROFILE.to_json())),
    "plan with inputs": (read_inputs, PlanError,
        plan_file_content(PLAN, PlanInputs(description=MODEL, job=JOB, hardware=FULL))),
}  # fmt: skip
files = st.sampled_from(list(FILES))


def is_read_or_refused(kind: str, text: str | bytes) -> bool:
    """Whether it is read. Anything but the file's own error, in one line, goes through."""
    read, error, _ = FILES[kind]
    try:
        read(text)
    except error as refused:
        assert str(refused) and "\n" not in str(refused) and len(str(refused)) < 12_000
        return False
    return True


@pytest.mark.parametrize("kind", FILES)
def test_what_is_whole_is_read(kind):
    assert is_read_or_refused(kind, json.dumps(FILES[kind][2]))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with every key or index of it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


EXTREMES = [
    None, True, -1, 0, 1, 10**6, 10**18, 2**63 - 1, -(2**63), 1e-300, 1e30, float("nan"), float("inf"), "", "x" * 5000,
    "\x1b[2J", "../../etc/passwd", [], [[]], {}, [1] * 1000, {"plan": {}},
]  # fmt: skip


def damaged(kind: str, dice: random.Random) -> str:
    """The content with some fields changed, dropped, doubled, swapped or renamed, and no fingerprint to tell."""
    content = copy.deepcopy(FILES[kind][2])
    for plan in (content, content.get("plan", {})):
        plan.pop("fingerprint", None)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        if not (there := list(places(content))):
            break
        (holder, key), (other, place) = dice.choice(there), dice.choice(there)
        match dice.choice(["change", "change", "change", "drop", "double", "swap", "rename"]):
            case "drop":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "swap":
                holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])
            case "rename" if isinstance(holder, dict):
                holder[dice.choice(["other", key.upper(), "version", ""])] = holder.pop(key)
            case _:
                holder[key] = copy.deepcopy(dice.choice(EXTREMES))
    return json.dumps(content)


@holds(files, st.randoms(use_true_random=False), few=80, many=8_000)
def test_fields_changed_in_any_way_are_read_or_refused(kind, dice):
    is_read_or_refused(kind, damaged(kind, dice))


@holds(files, st.floats(0, 1), st.floats(0, 1), st.binary(max_size=8), few=40, many=5000)
def test_bytes_lost_or_put_in_are_read_or_refused(kind, begin, end, put):
    text = json.dumps(FILES[kind][2]).encode()
    low, high = sorted((int(begin * len(text)), int(end * len(text))))
    changed = text[:low] + put + text[low + (high - low) % 40 :]
    if is_read_or_refused(kind, changed) and kind == "plan" and b'"fingerprint"' in changed:
        assert Plan.from_json(changed).fingerprint == PLAN.fingerprint, "what was changed would be told by it"
    assert low == len(text) or not is_read_or_refused(kind, text[:low])


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", ["kept_bytes", "saved_bytes", "gradient_bytes"])
def test_no_plan_without_a_limit_is_proven_by_leaving_out_options_that_no_device_holds(name, number):
    """`checked` in conftest.py verifies each plan that the search calls proven."""
    segments = [
        replace(one, **{name: Affine(constant=1e18)}) if index == number else one
        for index, one in enumerate(MODEL.segments)
    ]
    inputs = PlanInputs(description=replace(MODEL, segments=tuple(segments)), job=JOB, hardware=FULL)
    assert explain(PLAN, inputs)["bottleneck"]["kind"] != "memory"
