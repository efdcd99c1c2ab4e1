"""Which formats a plan sends: the fastest of those that the user allows, where one is faster than none."""

from dataclasses import replace
from itertools import product

import pytest

from hf_osdp.errors import PlanError
from hf_osdp.planner.cost.units import unit_seconds
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import DType, GatherSpan
from hf_osdp.planner.hardware import Collective, CollectiveTiming
from hf_osdp.planner.offered_wires import fastest_wires
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import EXACT, FORMATS, Precision, TrainingJob, formats_up_to
from hf_osdp.planner.wire import WireFormat
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.plan_run import check_given_plan
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import toy_hardware

BF16, INT8, INT4 = WireFormat
SLOW = toy_hardware(2, 2, inter=(1e-4, 1e6))
JOB = TrainingJob(global_batch_size=8, communication=INT4)
LAYOUTS = [
    UnitLayout(shard_size=size, stage_size=stage, reshard_after_forward=True)
    for size, stage in ((1, 1), (2, 1), (4, 1), (4, 2))
]


def with_wires(unit, layout, hardware, job) -> UnitLayout:
    return replace(layout, **fastest_wires(unit, layout, hardware, job))


def seconds(unit, layout, hardware, job) -> float:
    terms = unit_seconds(unit, layout, hardware, job)
    return terms.gather_forward + terms.reduce_scatter + terms.all_reduce


@pytest.mark.parametrize("allowed", [EXACT, *WireFormat])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("rate", [1e5, 2e7, 1e8, 1e10])
def test_formats_are_the_fastest_of_all_combinations(allowed, precision, rate):
    hardware = toy_hardware(2, 2, inter=(1e-4, rate))
    job = replace(JOB, communication=allowed, precision=Precision.named(precision))
    assert FORMATS == (EXACT, *WireFormat)
    unit = next(unit for unit in transformer().units if unit.span is GatherSpan.USE)
    formats = (None, *map(WireFormat, formats_up_to(allowed)[1:]))
    names = ("gather_wire", "reduce_wire", "replica_wire")
    for layout in LAYOUTS:
        replicas = formats if layout.shard_size == 2 else (None,)
        sharded = formats if layout.two_stage or layout.shard_size == 2 else (None,)
        gathered = [f for f in sharded if f is None or f.for_parameters]
        ways = [dict(zip(names, way, strict=True)) for way in product(gathered, sharded, replicas)]
        fastest = min(seconds(unit, replace(layout, **way), hardware, job) for way in ways)
        chosen = with_wires(unit, layout, hardware, job)
        assert seconds(unit, chosen, hardware, job) == pytest.approx(fastest)
        assert replace(chosen, **dict.fromkeys(names)) == layout
        assert set(chosen.formats.values()) <= set(formats)


def test_format_takes_time_to_encode_at_memory_speed():
    hardware = toy_hardware(2, 2, inter=(1e-4, 2e7))
    rate = hardware.device.memory_bytes_per_s
    slow = replace(hardware, device=replace(hardware.device, memory_bytes_per_s=rate / 2))
    unit = next(unit for unit in transformer().units if unit.span is GatherSpan.USE)
    elements = sum(p.sharded_numel(2) for p in unit.trainable)
    layout = replace(LAYOUTS[1], replica_wire=INT4)
    fast_s, slow_s = (unit_seconds(unit, layout, machine, JOB).all_reduce for machine in (hardware, slow))
    traffic = elements * (INT4.encode_traffic + 3 / 2 * INT4.decode_traffic)  # sums are encoded again, decoded whole
    assert slow_s - fast_s == pytest.approx(traffic / rate)


def test_parameters_never_go_in_int4_nor_bf16_in_bf16():
    unit = transformer().units[0]
    layout = with_wires(unit, LAYOUTS[3], SLOW, JOB)
    assert layout.gather_wire is INT8 and layout.reduce_wire is INT4
    only_bf16 = replace(JOB, communication=BF16, precision=Precision.named("bf16"))
    assert with_wires(unit, LAYOUTS[3], SLOW, only_bf16).formats == {"reduce": BF16}
    with pytest.raises(ValueError, match="gather_wire=int4 is only for gradients"):
        UnitLayout(shard_size=2, reshard_after_forward=True, gather_wire=INT4)
    with pytest.raises(ValueError, match="need a sharded unit"):
        UnitLayout(shard_size=1, reshard_after_forward=True, reduce_wire=INT8)


@pytest.mark.parametrize("beside", [False, True])
def test_packed_weights_of_4_bits_are_sent_to_the_byte(beside):
    unit = transformer().units[1]
    packed = replace(unit.parameters[0], dtype=DType.UINT8, requires_grad=False)
    unit = replace(unit, parameters=(packed, *(unit.parameters if beside else ())))
    for layout, allowed in product(LAYOUTS, WireFormat):
        assert with_wires(unit, layout, SLOW, replace(JOB, communication=allowed)).gather_wire is None


def test_two_measured_stages_are_shorter_by_what_formats_save():
    unit, layout = transformer().units[0], LAYOUTS[3]
    timings = tuple(
        CollectiveTiming(collective=kind, group_size=4, latency_s=0.1, seconds_per_byte=2e-6, crosses_nodes=True)
        for kind in (Collective.TWO_STAGE_ALL_GATHER, Collective.TWO_STAGE_REDUCE_SCATTER)
    )
    measured = replace(SLOW, timings=timings)
    exact, coded = (unit_seconds(unit, one, measured, JOB) for one in (layout, replace(layout, gather_wire=INT8)))
    whole = sum(p.numel for p in unit.parameters)
    saved = (4 * whole // 2 - INT8.gathered_bytes(whole // 2, 2)) / 2 / (1e6 / 2)
    assert exact.gather_forward - coded.gather_forward == pytest.approx(saved, rel=0.05)


def test_given_plan_of_coarser_formats_than_allowed_is_refused():
    layout = UnitLayout(shard_size=2, reshard_after_forward=True, replica_wire=INT8)
    description = transformer()
    once = Batch(micro_batch_size=1, accumulation_steps=1)
    plan = Plan.of(description, [layout] * len(description.units), once, world_size=4)
    for allowed in ("exact", "bf16"):
        with pytest.raises(PlanError, match=f"in int8, but communication='{allowed}'."):
            check_given_plan(plan, OSDPConfig(plan=plan, communication=allowed), 0)
    check_given_plan(plan, OSDPConfig(plan=plan, communication="int4"), 0)
    with pytest.raises(ValueError, match="communication='fp8' is not known; use one of exact, bf16, int8, int4"):
        OSDPConfig(communication="fp8")
    with pytest.raises(PlanError, match="has a format for its replicas, but is sharded over all ranks"):
        replace(plan, units=tuple(replace(unit, shard_size=4) for unit in plan.units))
