"""Plans and profiles survive their JSON form; whatever is done to a file of either is read or is its error."""

import contextlib
import copy
import json
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from hf_osdp.errors import OSDPError, PlanError, ProfileError
from hf_osdp.planner.decision import UnitDecision
from hf_osdp.planner.description import DType
from hf_osdp.planner.hardware import (
    Backend,
    Collective,
    CollectiveTiming,
    DeviceSpec,
    FsdpOverhead,
    Hardware,
    HostSpec,
    Link,
    WorkTime,
)
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.profile import Profile, SegmentTimes, SegmentWork, TimePoint, with_block_times
from hf_osdp.planner.search.search import search
from hf_osdp.planner.split import ModelSplit, OperatorSplit
from hf_osdp.planner.training_job import OptimizerStep, TrainingJob, divisors
from hf_osdp.report.explain import explain
from hf_osdp.report.explain_tables import peak_table, unit_bytes_table
from hf_osdp.report.plan_file import PlanInputs, plan_file_content, read_plan_file
from hf_osdp.report.tables import plan_caption
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import host_of, toy_hardware
from tests.helpers.problems import problem
from tests.helpers.properties import holds

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
rates = st.floats(1e-6, 1e18)
seconds = st.floats(0, 1e6)
counts = st.integers(1, 2**20)
work_times = st.builds(WorkTime, call_s=seconds, tensor_s=seconds, seconds_per_byte=seconds)
links = st.builds(Link, latency_s=seconds, bytes_per_s=rates, source=texts, assumed=st.booleans())
devices = st.builds(
    DeviceSpec, name=texts, memory_bytes=st.integers(1, 2**50),
    flops_per_s=st.dictionaries(st.sampled_from(DType), rates, max_size=3),
    memory_bytes_per_s=rates, source=texts, operator_s=seconds, reserved_bytes=counts, communicator_bytes=counts,
)  # fmt: skip
hosts = st.builds(
    HostSpec, memory_bytes=st.integers(1, 2**50), to_device_bytes_per_s=rates, to_host_bytes_per_s=rates,
    update_bytes_per_s=rates, source=texts,
)  # fmt: skip
timings = st.builds(
    CollectiveTiming, collective=st.sampled_from(Collective), group_size=st.integers(2, 64), latency_s=seconds,
    seconds_per_byte=seconds, crosses_nodes=st.booleans(),
)  # fmt: skip
handlings = st.builds(
    FsdpOverhead, gather=work_times, reduce=work_times,
    updates=st.fixed_dictionaries({step: work_times for step in OptimizerStep}),
)  # fmt: skip
hardwares = st.builds(
    Hardware, device=devices, nodes=st.integers(1, 256), devices_per_node=st.integers(1, 256), intra_node=links,
    inter_node=links, backend=st.sampled_from(Backend), timings=st.lists(timings, max_size=2).map(tuple),
    host=st.none() | hosts, fsdp_overhead=st.none() | handlings,
)  # fmt: skip
segments = st.builds(
    SegmentTimes, class_name=texts, sequence_length=counts, compute_dtype=st.sampled_from(DType),
    parameter_shapes=st.lists(st.lists(counts, max_size=3).map(tuple), max_size=3).map(tuple),
    work=st.builds(SegmentWork, forward_flops=rates, forward_bytes=rates, backward_flops=rates, backward_bytes=rates),
    points=st.lists(st.builds(TimePoint, samples=counts, forward_s=seconds, backward_s=seconds), min_size=1,
                    max_size=3).map(tuple),
)  # fmt: skip
profiles = st.builds(
    Profile, hardware=hardwares, segments=st.lists(segments, max_size=2).map(tuple),
    device_names=st.lists(texts, max_size=2).map(tuple), model=texts,
    versions=st.dictionaries(texts, texts, max_size=2), date=texts,
)  # fmt: skip


operators = st.from_regex(r"[a-z]{1,5}(\.[a-z0-9]{1,3}){0,2}", fullmatch=True)
sliced = st.lists(
    st.builds(OperatorSplit, fqn=operators, slices=st.integers(2, 64)), max_size=3, unique_by=lambda split: split.fqn
)
switches = st.booleans()


def plans_of(world_size: int) -> st.SearchStrategy[Plan]:
    units = st.builds(
        UnitDecision, fqn=texts, shard_size=st.sampled_from(divisors(world_size)), reshard_after_forward=switches,
        reduce_every_micro_step=switches, activations=st.sampled_from(Activations.BASIC), on_host=switches,
    )  # fmt: skip
    return st.builds(
        Plan, world_size=st.just(world_size), strategy=st.sampled_from(["osdp", "ddp"]), micro_batch_size=counts,
        units=st.lists(units, min_size=1, max_size=8, unique_by=lambda unit: unit.fqn).map(tuple),
        accumulation_steps=counts, split=st.builds(ModelSplit, operators=switches, sliced=sliced.map(tuple)),
        model_fingerprint=texts, model_name=texts, sequence_length=counts, memory_limit_bytes=st.none() | counts,
        peak_bytes=st.none() | counts, step_s=st.none() | seconds, proven_optimal=switches, hardware=texts,
    )  # fmt: skip


plans = st.integers(1, 1024).flatmap(plans_of)


@holds(plans | profiles, few=40, many=3000)
def test_plans_and_profiles_survive_their_json_form(value):
    again = type(value).from_json(value.to_json())
    assert again == value and again.to_json() == value.to_json()
    if isinstance(value, Plan):
        assert again.fingerprint == value.fingerprint


MODEL = transformer(layers=2)
JOB = TrainingJob(global_batch_size=8)
TIMING = CollectiveTiming(collective=Collective.ALL_GATHER, group_size=4, latency_s=1e-5, seconds_per_byte=1e-10)
HANDLING = FsdpOverhead(gather=WorkTime(), reduce=WorkTime(), updates={step: WorkTime() for step in OptimizerStep})
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
        peak_table(found), unit_bytes_table(found), plan_caption(plan, found.estimate)


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


@holds(files, st.randoms(use_true_random=False), few=150, many=8_000)
def test_fields_changed_in_any_way_are_read_or_refused(kind, dice):
    is_read_or_refused(kind, damaged(kind, dice))


@holds(files, st.floats(0, 1), st.floats(0, 1), st.binary(max_size=8), few=60, many=5000)
def test_bytes_lost_or_put_in_are_read_or_refused(kind, begin, end, put):
    text = json.dumps(FILES[kind][2]).encode()
    low, high = sorted((int(begin * len(text)), int(end * len(text))))
    changed = text[:low] + put + text[low + (high - low) % 40 :]
    if is_read_or_refused(kind, changed) and kind == "plan" and b'"fingerprint"' in changed:
        assert Plan.from_json(changed).fingerprint == PLAN.fingerprint, "what was changed would be told by it"
    assert low == len(text) or not is_read_or_refused(kind, text[:low])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts | st.sampled_from(["plan", "version", "units"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@holds(files, json_values.map(json.dumps) | st.binary(max_size=60) | st.text(max_size=60), few=60, many=5000)
def test_noise_is_refused(kind, noise):
    assert not is_read_or_refused(kind, noise)


@pytest.mark.parametrize(("kind", "read"), [("plan", Plan.from_json), ("profile", Profile.from_json)])
def test_no_field_makes_a_reader_take_long_or_much(kind, read):
    """Each number and text in turn, as large as they come: a count is no length of anything before it was checked."""
    content = copy.deepcopy(FILES[kind][2])
    content.pop("fingerprint", None)
    tracemalloc.start()
    start = time.monotonic()
    try:
        for holder, key in list(places(content)):
            if isinstance(was := holder[key], (int, float, str)):
                for value in (10**18, 2**40, 1e30, "x" * 4096):
                    holder[key] = value
                    with contextlib.suppress(OSDPError):
                        read(json.dumps(content))
                holder[key] = was
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 30
