"""Counts and sizes that nobody has are refused where values are made, before anything is as long or as large as they say."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hf_osdp.errors import OSDPError, PlanError
from hf_osdp.planner.affine import Affine, Envelope
from hf_osdp.planner.decision import UnitDecision
from hf_osdp.planner.description import Activations, DType, ParameterSpec
from hf_osdp.planner.hardware import MOST_RANKS, DeviceSpec, Link
from hf_osdp.planner.job import TrainingJob, divisors
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.split import ModelSplit, OperatorSplit
from tests.helpers.descriptions import at_random, transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

LINK = Link(latency_s=1e-6, bytes_per_s=1e9, source="made up")
DEVICE = bare_preset("v100-16").device
UNIT = UnitDecision(fqn="x", shard_size=1, reshard_after_forward=True)
PLAN = Plan(world_size=1, strategy="osdp", units=(UNIT,), micro_batch_size=1, accumulation_steps=1, model_fingerprint="f")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("world_size", MOST_RANKS * 2, f"world_size={MOST_RANKS * 2}; it must be at least 1 and at most {MOST_RANKS}"),
        ("micro_batch_size", 10**18, "micro_batch_size=1000000000000000000; it must be at least 1 and at most"),
        ("accumulation_steps", 10**18, "accumulation_steps=1000000000000000000"),
        ("sequence_length", 10**18, "sequence_length=1000000000000000000"),
        ("model_name", "x\x1b[2J", "a model_name that has control characters"),
        ("hardware", "x" * 5000, "a hardware that is of 5000 letters, more than 4096"),
        ("units", tuple(replace(UNIT, fqn=str(i)) for i in range(2**14 + 1)), "has 16385 units; it must have at most 16384"),
    ],
)
def test_plans(field, value, part):
    with pytest.raises(PlanError, match=part.replace("(", r"\(")) as caught:
        replace(PLAN, **{field: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("fqn", ["x" * 4097, "a\nb", "\x1b[31m", "\x9b", "\ud800"])
def test_names_of_units(fqn):
    with pytest.raises(ValueError, match="is no module's name") as caught:
        replace(UNIT, fqn=fqn)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "change", [dict(latency_s=NAN), dict(latency_s=INF), dict(bytes_per_s=NAN), dict(bytes_per_s=INF), dict(bytes_per_s=0)]
)
def test_links(change):
    with pytest.raises(ValueError, match="A link needs finite"):
        replace(LINK, **change)


@pytest.mark.parametrize(
    "change",
    [
        dict(memory_bytes=0), dict(memory_bytes=2**51), dict(memory_bytes_per_s=NAN), dict(memory_bytes_per_s=INF), dict(operator_s=NAN),
        dict(flops_per_s={DType.FLOAT32: NAN}), dict(flops_per_s={DType.FLOAT32: INF}), dict(reserved_bytes=-1),
        dict(communicator_bytes=-1), dict(unit_s=-1.0),
    ],
)  # fmt: skip
def test_devices(change):
    with pytest.raises(ValueError, match=f"Device {DEVICE.name!r}"):
        replace(DEVICE, **change)
    plain = dict(reserved_bytes=0, communicator_bytes=0, operator_s=0.0, unit_s=0.0, capability=None)
    assert replace(DEVICE, memory_bytes=2**50, **plain) == replace(
        DeviceSpec(name=DEVICE.name, memory_bytes=2**50, flops_per_s=DEVICE.flops_per_s, memory_bytes_per_s=DEVICE.memory_bytes_per_s,
                   source=DEVICE.source)
    )  # fmt: skip


def test_worlds_parameters_jobs_and_peaks():
    with pytest.raises(ValueError, match=f"nodes={MOST_RANKS} of 2 devices are {2 * MOST_RANKS}; the most are {MOST_RANKS}"):
        bare_preset("v100-16", nodes=MOST_RANKS, devices_per_node=2)
    with pytest.raises(ValueError, match=r"Parameter w has .* elements; the most are"):
        ParameterSpec(name="w", shape=(2**40, 2**40), dtype=DType.FLOAT32)
    with pytest.raises(ValueError, match=r"global_batch_size=.* must be at least 1 and at most"):
        TrainingJob(global_batch_size=2**41)
    with pytest.raises(ValueError, match="A peak has no moment"):
        Envelope(pieces=())


@pytest.mark.parametrize("change", [dict(module_names=()), dict(shared=((),))])
def test_units(change):
    with pytest.raises(ValueError, match="needs a module, and a name for each parameter that is shared"):
        replace(transformer(layers=1).units[1], **change)


def test_large_numbers_take_no_time():
    start = time.monotonic()
    assert len(divisors(2**40)) == 41 and divisors(2**40 - 87)[-1] == 2**40 - 87
    assert TrainingJob(global_batch_size=2**40).micro_batch_sizes(8)[0] == 2**37
    names = [OperatorSplit(fqn=f"m{i}", slices=2) for i in range(20_000)]
    with pytest.raises(ValueError, match="'m7' is split 2 times"):
        ModelSplit(sliced=(*names, names[7]))
    assert time.monotonic() - start < 5


def test_options_that_no_device_holds_are_never_solved_for():
    """The solver's whole numbers have 63 bits."""
    model, hardware, job = at_random(3, kinds=1, blocks=3, recomputable=True), bare_preset("v100-16"), TrainingJob(global_batch_size=4)
    huge = tuple(replace(s, saved_bytes=Affine(per_sample=1e30)) if s.recomputed else s for s in model.segments)
    least = least_memory(problem(model, hardware, job))
    found = search(problem(replace(model, segments=huge), hardware, job, 2 * least))
    blocks = [unit for unit in found.plan.units if unit.fqn.startswith("b")]
    assert blocks and all(unit.activations is Activations.RECOMPUTE for unit in blocks)


def test_a_model_that_needs_more_than_there_is_anywhere_is_refused():
    model = transformer(layers=2)
    huge = tuple(replace(segment, saved_bytes=Affine(per_sample=1e30)) for segment in model.segments)
    for limit in (2**30, 2**59):
        with pytest.raises(OSDPError, match=r"more than 1048576\.00 TiB; no model does"):
            search(problem(replace(model, segments=huge), bare_preset("v100-16"), TrainingJob(global_batch_size=4), limit))
