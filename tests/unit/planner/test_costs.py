"""Every memory and time term of one unit against numbers worked out by hand.

The unit has w (8, 3) and b (8,) in float32, both trainable: 32 elements, 128 bytes.
"""

import math
from dataclasses import replace
from typing import Any

import pytest

from hf_osdp.planner.cost.collectives import collective_seconds, replicate_ring, shard_ring
from hf_osdp.planner.cost.units import UnitBytes, UnitSeconds, merged_gradients, unit_bytes, unit_seconds
from hf_osdp.planner.decision import Batch, UnitLayout, layouts_for
from hf_osdp.planner.description import DType, GatherSpan, ParameterSpec, UnitDescription, shard_dim
from hf_osdp.planner.hardware import Backend, Collective, FsdpOverhead, Hardware, WorkTime
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from tests.helpers.hardware import host_of, toy_hardware

ONCE, TWICE, THRICE = (Batch(micro_batch_size=1, accumulation_steps=steps) for steps in (1, 2, 3))
HOST = host_of(10**9, to_device=1e4, to_host=2e4, update=5e3)


def parameter(name: str, *shape: int, dtype: DType = DType.FLOAT32, requires_grad: bool = True) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype=dtype, requires_grad=requires_grad)


def unit_of(*parameters: ParameterSpec, span: GatherSpan = GatherSpan.USE, shared=()) -> UnitDescription:
    names = {"fqn": "u", "module_names": ("u",), "class_name": "Block"}
    return UnitDescription(**names, span=span, parameters=parameters, shared=shared)


def layout(g: int, *, keep: bool = False, hold: bool = False, **more: Any) -> UnitLayout:
    return UnitLayout(shard_size=g, reshard_after_forward=not keep, reduce_every_micro_step=not hold, **more)


UNIT = unit_of(parameter("w", 8, 3), parameter("b", 8))
TEN_ROWS = unit_of(parameter("w", 10, 3))
STACK = unit_of(parameter("w", 2, 8, 3), parameter("b", 8))
IN_BF16 = unit_of(parameter("w", 8, 4, dtype=DType.BFLOAT16))
FROZEN = unit_of(parameter("w", 8, 3, requires_grad=False), parameter("b", 8))
ROOT = unit_of(parameter("w", 8, 3), span=GatherSpan.STEP)
WIDE_REDUCTION = Precision(reduce=DType.FLOAT32)


def job_of(precision="no", *, states=2, step=OptimizerStep.FUSED, clips=False) -> TrainingJob:
    options = {"precision": Precision.named(precision), "optimizer": OptimizerSpec(states=states, step=step)}
    return TrainingJob(global_batch_size=12, clips_gradients=clips, **options)


def terms(g, unit=UNIT, *, world_size=4, job=None, batch=ONCE, earlier=False, **more) -> UnitBytes:
    last = unit_bytes(unit, layout(g, **more), world_size, job or job_of(), batch)
    return last.earlier if earlier else last


REPLICATED = UnitBytes(
    parameters=128, optimizer=256, gradients_held=0, gradients_after=128,
    unsharded_gradients=128, reduce_copy=128,  # autograd's gradients, and the flat ones
    reduce_stage=0, leaves_tail=True, managed=False,
)  # fmt: skip
SHARDED = UnitBytes(
    parameters=32, optimizer=64, gradients_held=0, gradients_after=32, gathered=128,
    gather_buffer=128, unsharded_gradients=128, reduce_input=128, reduce_stage=0,
    last_gradient=32,  # of b: a loop variable of FSDP2's holds it
    reduce_tail=128,
)  # fmt: skip
IN_STAGES = replace(SHARDED, reduce_stage=64, gather_stage=64)
"""Half of what is reduced or gathered inside a node of two."""


@pytest.mark.parametrize(
    ("chosen", "wanted"), [(layout(1), REPLICATED), (layout(4), SHARDED), (layout(4, stage_size=2), IN_STAGES)]
)
def test_unit_bytes_of_replicated_sharded_and_staged_units(chosen, wanted):
    assert unit_bytes(UNIT, chosen, 4, job_of(), ONCE) == wanted
    assert unit_bytes(UNIT, replace(chosen, activations=Activations.RECOMPUTE), 4, job_of(), ONCE) == wanted


HOLDING, ACCUMULATING, AWAY = dict(hold=True, batch=THRICE), dict(batch=THRICE), dict(on_host=True)
BETWEEN, FIRST = {**HOLDING, "earlier": True}, {"hold": True, "batch": TWICE, "earlier": True}
SOME_TERMS = {
    "kept: nothing is prefetched": (dict(g=4, keep=True), dict(kept=128, prefetched=0, held=32 + 64)),
    # reduced in float32, in which it is stored
    "replicated in bf16: a copy, and gradients of it": (dict(g=1, job=job_of("bf16")),
        dict(copies=64, held=128 + 256 + 64, unsharded_gradients=64, reduce_copy=128, gradients_after=128)),
    "replicated in bf16: later gradients are added": (dict(g=1, job=job_of("bf16"), **ACCUMULATING),
        dict(copies=64, gradients_held=128, gradients_after=0, unsharded_gradients=64, reduce_copy=64)),
    "replicated: autograd adds later gradients": (dict(g=1, **ACCUMULATING),
        dict(gradients_held=128, gradients_after=0, unsharded_gradients=0, reduce_copy=0)),
    "replicated: frozen parameters are copied": (dict(g=1, unit=FROZEN, job=job_of("bf16")),
        dict(copies=64, unsharded_gradients=16, reduce_copy=32)),
    "replicated root: reduced at the end": (dict(g=1, unit=ROOT), dict(at_end=True, managed=False)),
    "replicated embedding: reduced in its backward": (dict(g=1, unit=replace(UNIT, ends_late=True)),
        dict(at_end=False)),
    # 3 rows of 3 on rank 0; 12 rows gathered; autograd sees 10
    "rows that do not divide are padded": (
        dict(g=4, unit=TEN_ROWS),
        dict(parameters=36, optimizer=72, gradients_after=36, gathered=144, gather_buffer=144, reduce_input=144,
            unsharded_gradients=120),
    ),
    "reduce buffer padded to 2": (dict(g=2, unit=TEN_ROWS), dict(reduce_tail=120, reduce_input=120)),
    "fewer rows than ranks: one on rank 0": (dict(g=4, unit=unit_of(parameter("w", 2, 5))), dict(parameters=20)),
    "two experts on four ranks: their other dimension": (
        dict(g=4, unit=STACK),
        dict(parameters=48 + 8, optimizer=112, gradients_after=56, gathered=224, gather_buffer=224, reduce_input=224,
            copy_out=192, reduce_copy=192, last_gradient=32 + 192),
    ),
    "experts alone: the last gradient is the one that is copied": (dict(g=4, unit=unit_of(parameter("w", 2, 8, 3))),
        dict(last_gradient=192, reduce_copy=192)),
    # the cast shard is less than what is gathered from it; the float32 output becomes the float32 gradient
    "bf16": (
        dict(g=4, job=job_of("bf16")),
        dict(parameters=32, optimizer=64, gradients_after=32, gathered=64, gather_buffer=64, unsharded_gradients=64,
            cast_buffer=0, reduce_input=128, reduce_tail=128, reduce_output=0),
    ),
    # reduced in float32, made in bfloat16
    "bf16 in stages": (dict(g=4, stage_size=2, world_size=8, job=job_of("bf16")),
        dict(reduce_stage=64, last_gradient=16, reduce_work=80)),
    "wider reduction over all": (dict(g=4, unit=IN_BF16, job=replace(job_of(), precision=WIDE_REDUCTION)),
        dict(gradients_after=16, reduce_output=32, reduced_after=0)),
    # until the all-reduce is over
    "wider reduction in a group": (dict(g=2, unit=IN_BF16, job=replace(job_of(), precision=WIDE_REDUCTION)),
        dict(gradients_after=32, reduce_output=64, reduced_after=64)),
    "frozen parameters are only gathered": (
        dict(g=4, unit=FROZEN, **HOLDING),
        dict(parameters=32, gathered=128, optimizer=16, gradients_held=32, gradients_after=8 - 32, reduce_input=32,
            reduce_tail=32),
    ),
    "frozen after the last gradient": (dict(g=2, unit=unit_of(parameter("w", 8, 3), *FROZEN.parameters[:1])),
        dict(last_gradient=96)),
    # autograd adds to what is held
    "whole gradients held": (
        dict(g=4, **HOLDING),
        dict(gradients_held=128, gradients_after=32 - 128, unsharded_gradients=0,
            held=32 + 64 + 128),
    ),
    "whole gradients held of the root": (dict(g=2, unit=ROOT, **HOLDING), dict(last_gradient=96)),
    "held between: nothing is reduced": (dict(g=4, **BETWEEN),
        dict(gradients_held=128, gradients_after=0, reduce_input=0, reduce_tail=0, leaves_tail=True, adds=True)),
    "first held: autograd's own": (dict(g=4, **FIRST),
        dict(gradients_held=0, gradients_after=128, unsharded_gradients=128, reduce_copy=0, adds=False)),
    # w of 24 elements, then b of 8, in 2 and 4 bytes
    "first held in bf16: cast one by one": (dict(g=4, job=job_of("bf16"), **FIRST),
        dict(gradients_after=128, unsharded_gradients=64, reduce_copy=96, adds=False)),
    "held in bf16: added at the end of a unit's backward": (dict(g=4, unit=ROOT, job=job_of("bf16"), **BETWEEN),
        dict(gradients_after=0, unsharded_gradients=48, joined=48, adds=False)),
    "held of the root: only shared gradients wait": (
        dict(g=4, unit=replace(ROOT, shared=(("w", "head.w"),)), **HOLDING),
        dict(unsharded_gradients=96, joined=96, adds=True)),
    "held of a root that shares nothing": (dict(g=4, unit=ROOT, **HOLDING),
        dict(unsharded_gradients=0, joined=0, adds=True)),
    "first of a replica: a flat buffer begins": (dict(g=1, **FIRST),
        dict(gradients_held=0, gradients_after=128, unsharded_gradients=128, reduce_copy=128)),
    "reduced in every micro-step": (dict(g=4, **ACCUMULATING),
        dict(gradients_held=32, gradients_after=0, unsharded_gradients=128, reduce_output=32)),
    "states of momentum": (dict(g=2, job=job_of(states=1)), dict(optimizer=64)),
    # shards of 24 and 8 bytes; the loop takes two of the larger
    "scratch of foreach": (dict(g=4, job=job_of(step=OptimizerStep.FOREACH)), dict(step_scratch=32)),
    "scratch of a loop": (dict(g=4, job=job_of(step=OptimizerStep.FOR_LOOP)), dict(step_scratch=0, step_passing=48)),
    "one process does not copy gradients": (dict(g=1, world_size=1), dict(unsharded_gradients=128, reduce_copy=0)),
    "one process adds to gradients in place": (dict(g=1, world_size=1, **HOLDING),
        dict(gradients_held=128, gradients_after=0, unsharded_gradients=0, reduce_copy=0)),
    # parameters and gradients in powers of two; what is reduced cannot become the gradient where it lies
    "host: the device has nothing between steps": (dict(g=4, **AWAY, job=job_of(step=OptimizerStep.FOREACH)),
        dict(held=0, gradients_after=0, host=2 * (32 + 8) + 64, gathered=128, gather_buffer=128, reduce_input=128,
            reduce_output=32, step_scratch=0)),
    "host: one process holds whole gradients": (dict(g=1, world_size=1, **AWAY, **HOLDING),
        dict(gradients_held=128, gradients_after=-128, reduce_tail=128)),
    "host: replicas that accumulate": (dict(g=1, **AWAY, **ACCUMULATING), dict(reduced_after=128)),
    "host: a gradient comes before it is added": (dict(g=4, **AWAY, **ACCUMULATING), dict(host_moment=24)),
    "host: the sum of replicas comes once": (dict(g=2, **AWAY, **ACCUMULATING), dict(host_moment=0)),
    # 96 twice, or 96 and 32 twice, against 128
    "host: replicas come one by one": (dict(g=1, **AWAY), dict(cast_buffer=64)),
    "host: and are there in their own dtype": (dict(g=1, job=job_of("bf16"), **AWAY), dict(cast_buffer=96 + 48 - 64)),
    # the weight in a power of two; parameter, gradient and two states of the other
    "host: frozen parameters have no states": (dict(g=4, unit=FROZEN, **AWAY), dict(host=32 + 2 * 8 + 2 * 8)),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "wanted"), SOME_TERMS.values(), ids=SOME_TERMS)
def test_unit_bytes_equal_terms_by_hand(asked, wanted):
    found = terms(**asked)
    assert {name: getattr(found, name) for name in wanted} == wanted


@pytest.mark.parametrize(("shape", "ranks", "dim"), [
    ((8, 6, 4), 8, 0), ((8, 6, 4), 16, 0), ((8, 32, 4), 16, 1), ((8, 6, 32), 16, 2), ((8, 32, 4), 1, 0),
    ((60, 64, 4), 64, 0), ((10, 8, 4), 8, 1), ((2, 32), 16, 0), ((1, 1, 32), 16, 2),
])  # fmt: skip
def test_stacks_are_sharded_along_the_dimension_with_little_padding(shape, ranks, dim):
    assert shard_dim(shape, ranks) == dim
    padded = -(-shape[dim] // ranks) * ranks
    assert parameter("w", *shape).sharded_numel(ranks) * ranks == math.prod(shape) // shape[dim] * padded


def test_scalars_stay_whole_and_shared_gradients_are_merged():
    assert parameter("scale").sharded_numel(4) == 1
    shared = replace(UNIT, shared=(("w", "head.w"),))
    asked = ((shared, "no"), (shared, "bf16"), (UNIT, "no"))
    assert [merged_gradients(unit, job_of(precision)) for unit, precision in asked] == [96, 48, 0]


@pytest.mark.parametrize(("span", "fixed", "wanted"), [
    (GatherSpan.STEP, None, [(1, False), (4, False)]), (GatherSpan.STEP, True, [(1, False), (4, False)]),
    (GatherSpan.USE, None, [(1, False), (4, True), (4, False)]),
    (GatherSpan.USE, False, [(1, False), (4, False)]),
])  # fmt: skip
def test_layouts_keep_what_stays_gathered(span, fixed, wanted):
    found = layouts_for(span, (1, 4), reshard_after_forward=fixed)
    assert [(c.shard_size, c.reshard_after_forward) for c in found] == wanted


def machine(devices_per_node: int = 4, **more: Any) -> Hardware:
    return toy_hardware(1, devices_per_node, memory_bytes_per_s=1e6, intra=(1e-6, 1e6), inter=(1e-5, 1e5), **more)


def seconds(g, unit=UNIT, *, keep=False, job=None, hardware=None, **more) -> UnitSeconds:
    return unit_seconds(unit, layout(g, keep=keep, **more), hardware or machine(), job or job_of())


COPY = 2 * 128 / 1e6
OVERHEAD = FsdpOverhead(
    copy=WorkTime(call_s=3.0, tensor_s=0.3, seconds_per_byte=0.004),
    flatten=WorkTime(call_s=4.0, tensor_s=0.4, seconds_per_byte=0.005),
    gather=WorkTime(call_s=1.0, tensor_s=0.1, seconds_per_byte=0.001),
    reduce=WorkTime(call_s=2.0, tensor_s=0.2, seconds_per_byte=0.002),
    updates={OptimizerStep.FUSED: WorkTime(tensor_s=0.3, seconds_per_byte=0.003),
        OptimizerStep.FOREACH: WorkTime(tensor_s=0.4), OptimizerStep.FOR_LOOP: WorkTime(tensor_s=0.5)},
)  # fmt: skip
MEASURED = machine(fsdp_overhead=OVERHEAD, backend=Backend.GLOO)
GATHER_S, REDUCE_S = 1 + 0.2 + 0.160, 2 + 0.4 + 0.256
"""2 tensors; 128 bytes out of the buffer, 32 into it; 128 of gradients."""
TIMES = {
    # parameter and two states both ways, the gradient read
    "sharded": (dict(g=4), dict(all_reduce=0, copy_forward=COPY, copy_backward=2 * COPY, optimizer=7 * 32 / 1e6)),
    # gradients are copied once
    "replicated": (dict(g=1), dict(gather_forward=0, gather_backward=0, reduce_scatter=0, copy_forward=0,
        copy_backward=COPY, optimizer=7 * 128 / 1e6)),
    "replicated in bf16: copies are written, gradients cast": (dict(g=1, job=job_of("bf16")),
        dict(copy_forward=(128 + 64) / 1e6, copy_backward=(64 + 128) / 1e6)),
    "a stack along another dimension is copied once more": (dict(g=4, unit=STACK),
        dict(copy_forward=2 * (224 + 192) / 1e6, copy_backward=4 * (224 + 192) / 1e6)),
    "kept: no second gather, nor its copy": (dict(g=4, keep=True),
        dict(gather_backward=0, copy_forward=COPY, copy_backward=COPY)),
    "one process: the update alone": (dict(g=1, hardware=machine(1)),
        dict.fromkeys(UnitSeconds.__slots__, 0) | {"optimizer": 7 * 128 / 1e6}),
    "measured": (dict(g=4, hardware=MEASURED),
        dict(copy_forward=GATHER_S, copy_backward=GATHER_S + REDUCE_S, optimizer=0.6 + 0.003 * 32)),
    "measured, kept": (dict(g=4, keep=True, hardware=MEASURED), dict(copy_backward=REDUCE_S)),
    "measured, replicated": (dict(g=1, hardware=MEASURED),
        dict(copy_forward=0, copy_backward=4 + 2 * 0.4 + 256 * 0.005)),
    "measured, replicated in bf16": (dict(g=1, hardware=MEASURED, job=job_of("bf16")),
        dict(copy_forward=3 + 2 * 0.3 + 192 * 0.004, copy_backward=4 + 2 * 0.4 + 192 * 0.005)),
    "measured, a loop": (dict(g=4, hardware=MEASURED, job=job_of(step=OptimizerStep.FOR_LOOP)), dict(optimizer=1.0)),
    "measured, SGD": (dict(g=4, hardware=MEASURED, job=job_of(states=0, step=OptimizerStep.FOREACH)),
        dict(optimizer=0.8 * 3 / 7)),
    "measured, one process": (dict(g=1, hardware=machine(1, fsdp_overhead=OVERHEAD, backend=Backend.GLOO)),
        dict(copy_forward=0, copy_backward=0, optimizer=0.6 + 0.003 * 128)),
    "measured, frozen: gathered and not reduced": (dict(g=4, unit=unit_of(*FROZEN.parameters[:1]), hardware=MEASURED),
        dict(copy_forward=1 + 0.1 + 0.120, copy_backward=1 + 0.1 + 0.120, optimizer=0)),
    "the host steps and clips": (dict(g=4, on_host=True, hardware=machine(host=HOST), job=job_of(clips=True)),
        dict(optimizer=10 * 32 / 5e3)),
    "kept from the host: brought once": (dict(g=4, keep=True, on_host=True, hardware=machine(host=HOST)),
        dict(gather_backward=0)),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "wanted"), TIMES.values(), ids=TIMES)
def test_unit_seconds_equal_terms_by_hand(asked, wanted):
    found = seconds(**asked)
    assert {name: getattr(found, name) for name in wanted} == pytest.approx(wanted)
    assert seconds(**asked, activations=Activations.RECOMPUTE) == found


@pytest.mark.parametrize(
    ("g", "precision", "gathered"), [(1, "no", 128), (2, "no", 128), (4, "no", 128), (4, "bf16", 64)]
)
def test_unit_seconds_of_collectives_are_those_of_their_rings(g, precision, gathered):
    """Gathered in the compute dtype, reduced in float32; replicas reduce only their part of it."""

    def ring_s(collective: Collective, ring, nbytes: int) -> float:
        return collective_seconds(machine(), collective, ring, nbytes)

    found = seconds(g, job=job_of(precision))
    gather_s = ring_s(Collective.ALL_GATHER, shard_ring(machine(), g), gathered)
    assert found.gather_forward == found.gather_backward == gather_s
    assert found.reduce_scatter == ring_s(Collective.REDUCE_SCATTER, shard_ring(machine(), g), 128)
    assert found.all_reduce == ring_s(Collective.ALL_REDUCE, replicate_ring(machine(), g), 128 // g)


@pytest.mark.parametrize(("backend", "dispatched"), [(Backend.GLOO, 2 * 2 * 1e-3), (Backend.NCCL, 0.0)])
def test_clipping_reads_gradients_twice_and_writes_them_once(backend, dispatched):
    """A GPU runs behind the CPU that dispatches."""
    hardware = replace(machine(backend=backend), device=replace(machine().device, operator_s=1e-3))
    clipping, plain = (seconds(4, keep=True, hardware=hardware, job=job_of(clips=clips)) for clips in (True, False))
    assert clipping.optimizer - plain.optimizer == pytest.approx(3 * 32 / 1e6 + dispatched)


@pytest.mark.parametrize(("g", "brought"), [(4, "gather_forward"), (1, "copy_forward")])
def test_unit_seconds_bring_shards_from_host_and_take_gradients_there(g, brought):
    """Whole parameters come on the stream of compute, where they are copied, as are their gradients twice."""
    here, there = (seconds(g, hardware=machine(host=HOST), on_host=way) for way in (False, True))
    if g == 1:
        here = replace(here, copy_forward=COPY, copy_backward=3 * COPY)
    added = {name: getattr(there, name) - getattr(here, name) for name in UnitSeconds.__slots__}
    transfer = dict.fromkeys((brought, brought.replace("forward", "backward")), 128 // g / 1e4)
    moved = {"reduce_scatter": 128 // g / 2e4, "optimizer": 7 * 128 // g / 5e3 - here.optimizer}
    assert added == pytest.approx(dict.fromkeys(added, 0.0) | transfer | moved)
