"""Counts, sizes and rates that nobody has are refused where values are made, before anything is as large."""

import time
from dataclasses import replace
from functools import partial

import pytest

from hf_osdp.errors import OSDPError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.decision import UnitDecision
from hf_osdp.planner.description import DType
from hf_osdp.planner.hardware import MOST_RANKS, Collective, CollectiveTiming, FsdpOverhead, Link, WorkTime
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.split import ModelSplit, OperatorSplit
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, TrainingJob, divisors
from tests.helpers.descriptions import at_random, transformer
from tests.helpers.hardware import bare_preset, host_of, toy_hardware
from tests.helpers.problems import problem

NAN, INF = float("nan"), float("inf")
LINK = Link(latency_s=1e-6, bytes_per_s=1e9, source="made up")
DEVICE = replace(toy_hardware(1, 1).device, memory_bytes=2**50)
HOST = host_of(1, to_device=1.0, to_host=1.0, update=1.0)
TIMING = CollectiveTiming(collective=Collective.ALL_GATHER, group_size=2, latency_s=1.0, seconds_per_byte=0.0)
UNIT = UnitDecision(fqn="x", shard_size=8, reshard_after_forward=True)
PLAN = Plan(
    world_size=8, strategy="osdp", units=(UNIT,), micro_batch_size=1, accumulation_steps=1, model_fingerprint="f"
)
JOB = TrainingJob(global_batch_size=4)
MADE_FROM = [
    (LINK, {r"Link\.\w+=\S+ must be finite": dict(latency_s=(NAN, INF, -1e-6), bytes_per_s=(NAN, INF, 0, -1.0))}),
    (DEVICE, {
        r"Device(Spec\.| 'toy')": dict(
            memory_bytes=(0, 2**51), memory_bytes_per_s=(NAN, INF, 0.0), operator_s=(NAN,), reserved_bytes=(-1,),
            communicator_bytes=(-1,),
            product_traffic=(-1.0,),
            attention_flops_per_s=(0.0, -1.0), flops_per_s=tuple({DType.FLOAT32: rate} for rate in (NAN, INF, 0.0)),
        )
    }),
    (HOST, {r"HostSpec\.\w+=\S+ must be finite and above 0": dict(memory_bytes=(0,),
                                                                  update_bytes_per_s=(NAN, INF, 0.0))}),
    (TIMING, {r"CollectiveTiming\.\w+=\S+ must be": dict(group_size=(1,), latency_s=(-1.0,),
                                                         seconds_per_byte=(NAN,))}),
    (WorkTime(), {"finite and at least 0": dict(call_s=(-1.0,), tensor_s=(INF,))}),
    (preset("cpu"), {
        "must be at least 1": dict(nodes=(0, -1), devices_per_node=(0,)),
        f"nodes={2 * MOST_RANKS} of 1 devices are {2 * MOST_RANKS}; the most are {MOST_RANKS}": dict(nodes=(2 * MOST_RANKS,)),  # noqa: E501
        "must be the share of the limit that stays free, at least 0 and below 1, such as 0.06": dict(
            margin=(-0.01, 1, 1.5, NAN, INF, "4 %", True)
        ),
    }),
    (UNIT, {
        "Unit 'x': stage_size=.* must be 1, or divide shard_size=8 and be less": dict(stage_size=(0, 3, 8)),
        "shard_size=0 must be at least 1": dict(shard_size=(0,)),
    }),
    (PLAN, {
        f"world_size={MOST_RANKS * 2}; it must be at least 1 and at most {MOST_RANKS}": dict(world_size=(MOST_RANKS * 2,)),  # noqa: E501
        "=1000000000000000000; it must be at least 1 and at most": dict.fromkeys(
            ("micro_batch_size", "accumulation_steps", "sequence_length"), (10**18,)
        ),
        "has 16385 units; it must have at most 16384": dict(units=(tuple(replace(UNIT,
                                                                                 fqn=str(i)) for i in range(2**14 + 1)),)),  # noqa: E501
    }),
    (JOB, {
        "global_batch_size=.* must be at least 1 and at most": dict(global_batch_size=(0, 2**41)),
        "micro_batch_size=0 must be at least 1": dict(micro_batch_size=(0,)),
    }),
    (OptimizerSpec(), {"states=-1": dict(states=(-1,))}),
]  # fmt: skip


WORK = WorkTime()
REFUSED = [
    ("strategy='zero9' is not known; use one of osdp, fsdp, ddp, zero2, hsdp", partial(Strategy.parse, "zero9")),
    ("optimizer step 'for_loop' is missing",
     partial(FsdpOverhead, gather=WORK, reduce=WORK, updates={OptimizerStep.FOREACH: WORK})),
    *((part, partial(replace, value, **{name: one})) for value, parts in MADE_FROM for part, fields in parts.items()
      for name, wrong in fields.items() for one in wrong),
]  # fmt: skip


@pytest.mark.parametrize(("part", "make"), REFUSED)
def test_impossible_values_are_refused_in_one_short_line(part, make):
    with pytest.raises((ValueError, OSDPError), match=part) as caught:
        make()
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_large_numbers_take_no_time():
    start = time.monotonic()
    assert len(divisors(2**40)) == 41 and divisors(2**40 - 87)[-1] == 2**40 - 87
    assert TrainingJob(global_batch_size=2**40).micro_batch_sizes(8)[0] == 2**37
    names = [OperatorSplit(fqn=f"m{i}", slices=2) for i in range(20_000)]
    with pytest.raises(ValueError, match="'m7' is split 2 times"):
        ModelSplit(sliced=(*names, names[7]))
    assert time.monotonic() - start < 5


def test_search_never_solves_for_options_that_no_device_holds():
    """The solver's whole numbers have 63 bits."""
    model, hardware = at_random(3, kinds=1, blocks=3, recomputable=True), bare_preset("v100-16")
    huge = tuple(replace(s, saved_bytes=Affine(per_sample=1e30)) if s.recomputed else s for s in model.segments)
    least = least_memory(problem(model, hardware, JOB))
    found = search(problem(replace(model, segments=huge), hardware, JOB, 2 * least))
    blocks = [unit for unit in found.plan.units if unit.fqn.startswith("b")]
    assert blocks and all(unit.activations == Activations.RECOMPUTE for unit in blocks)


@pytest.mark.parametrize("limit", [2**30, 2**59])
def test_search_refuses_a_model_beyond_any_memory(limit):
    model = transformer(layers=2)
    huge = tuple(replace(segment, saved_bytes=Affine(per_sample=1e30)) for segment in model.segments)
    with pytest.raises(OSDPError, match=r"more than 1048576\.00 TiB per device"):
        search(problem(replace(model, segments=huge), bare_preset("v100-16"), JOB, limit))
