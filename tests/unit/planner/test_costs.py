"""Every memory and time term of one unit against numbers worked out by hand.

The unit has w (8, 3) and b (8,) in float32, both trainable: 32 elements, 128 bytes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.cost.collectives import collective_seconds, replicate_ring, shard_ring
from hf_osdp.planner.cost.units import UnitBytes, merged_gradients, unit_bytes, unit_seconds
from hf_osdp.planner.decision import Batch, UnitLayout, layouts_for
from hf_osdp.planner.description import Activations, DType, GatherSpan, ParameterSpec, UnitDescription
from hf_osdp.planner.hardware import Backend, Collective, DeviceSpec, FsdpOverhead, Hardware, HostSpec, Link, WorkTime
from hf_osdp.planner.job import OptimizerSpec, OptimizerStep, Precision, TrainingJob

ONCE = Batch(micro_batch_size=1, accumulation_steps=1)
THRICE = Batch(micro_batch_size=1, accumulation_steps=3)
HOST = HostSpec(memory_bytes=10**9, to_device_bytes_per_s=1e4, to_host_bytes_per_s=2e4, update_bytes_per_s=5e3, source="made up")


def parameter(name: str, *shape: int, dtype: DType = DType.FLOAT32, requires_grad: bool = True) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype=dtype, requires_grad=requires_grad)


def unit_of(*parameters: ParameterSpec, span: GatherSpan = GatherSpan.USE, shared=()) -> UnitDescription:
    return UnitDescription(fqn="u", module_names=("u",), class_name="Block", span=span, parameters=parameters, shared=shared)


UNIT = unit_of(parameter("w", 8, 3), parameter("b", 8))


def job_of(precision: str = "no", *, states: int = 2, step: OptimizerStep = OptimizerStep.FUSED) -> TrainingJob:
    return TrainingJob(global_batch_size=12, precision=Precision.named(precision), optimizer=OptimizerSpec(states=states, step=step))


def terms(
    unit: UnitDescription = UNIT, *, g: int, keep: bool = False, hold: bool = False, on_host: bool = False, world_size: int = 4, job=None,
    batch: Batch = ONCE,
) -> UnitBytes:  # fmt: skip
    choice = UnitLayout(shard_size=g, reshard_after_forward=not keep, reduce_every_micro_step=not hold, on_host=on_host)
    return unit_bytes(unit, choice, world_size, job or job_of(), batch)


def test_replicated_unit():
    assert terms(g=1) == UnitBytes(
        parameters=128,
        optimizer=256,
        gradients_held=0,
        gradients_after=128,
        gradients_settled=0,
        reduced_after=0,
        gathered=128,  # FSDP2 copies a replicated unit too
        gather_buffer=0,
        cast_buffer=0,
        unsharded_gradients=128,
        reduce_input=128,
        reduce_stage=0,
        last_gradient=0,
        reduce_tail=128,
        reduce_output=0,
        kept=0,
        step_scratch=0,
        host=0,
    )


def test_unit_sharded_over_all():
    assert terms(g=4) == UnitBytes(
        parameters=32,
        optimizer=64,
        gradients_held=0,
        gradients_after=32,
        gradients_settled=0,
        reduced_after=0,
        gathered=128,
        gather_buffer=128,
        cast_buffer=0,
        unsharded_gradients=128,
        reduce_input=128,
        reduce_stage=0,
        last_gradient=32,  # of b: a loop variable of FSDP2's holds it
        reduce_tail=128,
        reduce_output=0,
        kept=0,
        step_scratch=0,
        host=0,
    )


def test_two_stages_take_memory_between_them_and_nothing_else():
    flat, staged = terms(g=4), unit_bytes(UNIT, UnitLayout(shard_size=4, reshard_after_forward=True, stage_size=2), 4, job_of(), ONCE)
    assert staged == replace(flat, reduce_stage=64, cast_buffer=64), "half of what is reduced or gathered inside a node of two"
    half = unit_bytes(UNIT, UnitLayout(shard_size=4, reshard_after_forward=True, stage_size=2), 8, job_of("bf16"), ONCE)
    assert (half.reduce_stage, half.last_gradient) == (64, 16), "reduced in float32, made in bfloat16"
    assert half.reduce_work == 64 + 16 + max(0, half.reduce_output - half.reduced_after)


def test_the_last_gradient_is_held_while_shards_are_reduced():
    assert terms(g=2, hold=True, batch=THRICE).last_gradient == 0, "whole gradients that are held count already"
    whole_step = unit_of(parameter("w", 8, 3), span=GatherSpan.STEP)
    assert terms(whole_step, g=2, hold=True, batch=THRICE).last_gradient == 96
    assert terms(unit_of(parameter("w", 8, 3), parameter("frozen", 8, requires_grad=False)), g=2).last_gradient == 96


def test_unit_sharded_over_a_group():
    group = terms(g=2)
    assert (group.parameters, group.optimizer, group.gradients_after) == (64, 128, 64)
    assert (group.gathered, group.gather_buffer, group.reduce_input) == (128, 128, 128)


@pytest.mark.parametrize("g", [1, 2, 4])
def test_keeping_leaves_the_gathered_parameters_and_prefetches_nothing(g):
    freed, kept = terms(g=g), terms(g=g, keep=True)
    assert (freed.kept, kept.kept) == (0, 128)
    assert freed.prefetched == (128 if g > 1 else 0)
    assert kept.prefetched == 0
    assert kept.held == freed.held


def test_rows_are_padded_where_dimension_0_does_not_divide():
    padded = terms(unit_of(parameter("w", 10, 3)), g=4)  # 3 rows of 3 on rank 0; 12 rows gathered; autograd sees 10
    assert (padded.parameters, padded.optimizer, padded.gradients_after) == (36, 72, 36)
    assert (padded.gathered, padded.gather_buffer, padded.reduce_input) == (144, 144, 144)
    assert padded.unsharded_gradients == 120


@pytest.mark.parametrize(("g", "rows"), [(1, 10), (2, 10), (4, 12)])
def test_reduce_buffer_in_flight_is_padded_to_the_shard_group(g, rows):
    found = terms(unit_of(parameter("w", 10, 3)), g=g)
    assert found.reduce_tail == found.reduce_input == rows * 3 * 4


def test_scalar_is_never_cut():
    assert unit_of(parameter("scale")).parameters[0].sharded_numel(4) == 1


def test_fewer_rows_than_ranks_leave_one_row_on_rank_0():
    assert terms(unit_of(parameter("w", 2, 5)), g=4).parameters == 20


def test_bf16_halves_what_is_gathered_and_reduces_in_float32():
    half = terms(g=4, job=job_of("bf16"))
    assert (half.parameters, half.optimizer, half.gradients_after) == (32, 64, 32)
    assert (half.gathered, half.gather_buffer, half.unsharded_gradients) == (64, 64, 64)
    assert half.cast_buffer == 0, "the cast shard is less than what is gathered from it"
    assert (half.reduce_input, half.reduce_tail) == (128, 128)
    assert half.reduce_output == 0  # the float32 output becomes the float32 gradient


def test_replicas_are_cast_one_parameter_at_a_time():
    assert terms(g=1, job=job_of("bf16")).cast_buffer == 48 + 48 - 64, "w and what it is cast from, before b is there"


def test_reduction_in_another_dtype_than_the_parameter_needs_an_output_buffer():
    unit = unit_of(parameter("w", 8, 4, dtype=DType.BFLOAT16))
    job = TrainingJob(global_batch_size=4, precision=Precision(reduce=DType.FLOAT32))
    over_all, in_group = (terms(unit, g=g, job=job) for g in (4, 2))
    assert (over_all.gradients_after, over_all.reduce_output, over_all.reduced_after) == (16, 32, 0)
    assert (in_group.gradients_after, in_group.reduce_output, in_group.reduced_after) == (32, 64, 64)  # until the all-reduce is over


def test_frozen_parameters_are_gathered_and_nothing_more():
    frozen = terms(unit_of(parameter("w", 8, 3, requires_grad=False), parameter("b", 8)), g=4, hold=True, batch=THRICE)
    assert (frozen.parameters, frozen.gathered) == (32, 128)
    assert (frozen.optimizer, frozen.gradients_held, frozen.gradients_settled) == (16, 32, 8 - 32)
    assert (frozen.reduce_input, frozen.reduce_tail) == (32, 32)


def test_accumulation_that_holds_whole_gradients():
    holding = terms(g=4, hold=True, batch=THRICE)
    assert (holding.gradients_held, holding.gradients_after) == (128, 0)
    assert holding.gradients_settled == 32 - 128
    assert holding.unsharded_gradients == 0  # autograd adds to what is held
    assert holding.held == 32 + 64 + 128


def test_accumulation_that_reduces_every_time_holds_shards():
    reducing = terms(g=4, batch=THRICE)
    assert (reducing.gradients_held, reducing.gradients_after, reducing.gradients_settled) == (32, 0, 0)
    assert (reducing.unsharded_gradients, reducing.reduce_output) == (128, 32)


@pytest.mark.parametrize("hold", [False, True])
def test_one_process_accumulates_in_place(hold):
    alone = terms(g=1, world_size=1, hold=hold, batch=THRICE)
    assert (alone.gradients_held, alone.gradients_after, alone.gradients_settled) == (128, 0, 0)
    assert (alone.gathered, alone.gather_buffer, alone.reduce_input, alone.reduce_tail, alone.reduce_output) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize(("step", "scratch"), [(OptimizerStep.FUSED, 0), (OptimizerStep.FOREACH, 32), (OptimizerStep.FOR_LOOP, 48)])
def test_scratch_of_the_optimizer_step(step, scratch):
    assert terms(g=4, job=job_of(step=step)).step_scratch == scratch  # shards of 24 and 8 bytes; the loop takes two of the larger


@pytest.mark.parametrize("states", [0, 1, 2])
def test_optimizer_states_are_as_many_copies_of_the_shard(states):
    assert terms(g=2, job=job_of(states=states)).optimizer == states * 64


def test_merged_gradients_are_the_shared_parameters_only():
    unit = unit_of(parameter("w", 8, 3), parameter("b", 8), shared=(("w", "head.w"),))
    assert merged_gradients(unit, job_of()) == 96
    assert merged_gradients(unit, job_of("bf16")) == 48
    assert merged_gradients(UNIT, job_of()) == 0


def test_choices_of_a_unit_that_stays_gathered_all_keep():
    root = unit_of(parameter("w", 8), span=GatherSpan.STEP)
    assert layouts_for(root.span, (1, 4)) == (
        UnitLayout(shard_size=1, reshard_after_forward=False),
        UnitLayout(shard_size=4, reshard_after_forward=False),
    )
    assert layouts_for(root.span, (4,), reshard_after_forward=True) == (UnitLayout(shard_size=4, reshard_after_forward=False),)
    assert [(c.shard_size, c.reshard_after_forward) for c in layouts_for(UNIT.span, (1, 4))] == [
        (1, True),
        (1, False),
        (4, True),
        (4, False),
    ]


def machine(devices_per_node: int = 4) -> Hardware:
    return Hardware(
        device=DeviceSpec(name="toy", memory_bytes=10**9, flops_per_s={DType.FLOAT32: 1e9}, memory_bytes_per_s=1e6, source="made up"),
        devices_per_node=devices_per_node,
        intra_node=Link(latency_s=1e-6, bytes_per_s=1e6, source="made up"),
        inter_node=Link(latency_s=1e-5, bytes_per_s=1e5, source="made up"),
        backend=Backend.NCCL,
    )


def seconds(*, g: int, keep: bool = False, precision: str = "no", hardware: Hardware | None = None):
    return unit_seconds(UNIT, UnitLayout(shard_size=g, reshard_after_forward=not keep), hardware or machine(), job_of(precision))


def test_seconds_of_a_sharded_unit():
    lap = collective_seconds(machine(), Collective.ALL_GATHER, shard_ring(machine(), 4), 128)
    sharded = seconds(g=4)
    assert (sharded.gather_forward, sharded.gather_backward, sharded.reduce_scatter, sharded.all_reduce) == (lap, lap, lap, 0)
    assert sharded.copy_forward == pytest.approx(2 * 128 / 1e6)
    assert sharded.copy_backward == pytest.approx(4 * 128 / 1e6)
    assert sharded.optimizer == pytest.approx(7 * 32 / 1e6)  # parameter and two states both ways, the gradient read


def test_seconds_of_a_replicated_unit():
    replicated = seconds(g=1)
    assert (replicated.gather_forward, replicated.gather_backward, replicated.reduce_scatter) == (0, 0, 0)
    assert replicated.all_reduce == collective_seconds(machine(), Collective.ALL_REDUCE, replicate_ring(machine(), 1), 128)
    assert replicated.copy_backward == pytest.approx((4 * 128 + 2 * 128) / 1e6)
    assert replicated.optimizer == pytest.approx(7 * 128 / 1e6)


def test_group_shard_all_reduces_only_its_part():
    group = seconds(g=2)
    assert group.all_reduce == collective_seconds(machine(), Collective.ALL_REDUCE, replicate_ring(machine(), 2), 64)
    assert group.reduce_scatter == collective_seconds(machine(), Collective.REDUCE_SCATTER, shard_ring(machine(), 2), 128)


def test_keeping_saves_the_second_gather_and_its_copy():
    freed, kept = seconds(g=4), seconds(g=4, keep=True)
    assert kept.gather_backward == 0
    assert freed.copy_backward - kept.copy_backward == pytest.approx(2 * 128 / 1e6)
    assert kept.gather_forward == freed.gather_forward


def test_bf16_gathers_half_and_reduces_in_full():
    half = seconds(g=4, precision="bf16")
    ring = shard_ring(machine(), 4)
    assert half.gather_forward == collective_seconds(machine(), Collective.ALL_GATHER, ring, 64)
    assert half.reduce_scatter == collective_seconds(machine(), Collective.REDUCE_SCATTER, ring, 128)


def test_one_process_spends_time_on_the_update_only():
    alone = seconds(g=1, hardware=machine(devices_per_node=1))
    assert (alone.gather_forward, alone.gather_backward, alone.reduce_scatter, alone.all_reduce) == (0, 0, 0, 0)
    assert (alone.copy_forward, alone.copy_backward) == (0, 0)
    assert alone.optimizer == pytest.approx(7 * 128 / 1e6)


HANDLING = FsdpOverhead(
    gather=WorkTime(call_s=1.0, tensor_s=0.1, seconds_per_byte=0.001),
    reduce=WorkTime(call_s=2.0, tensor_s=0.2, seconds_per_byte=0.002),
    updates={
        OptimizerStep.FUSED: WorkTime(tensor_s=0.3, seconds_per_byte=0.003),
        OptimizerStep.FOREACH: WorkTime(tensor_s=0.4),
        OptimizerStep.FOR_LOOP: WorkTime(tensor_s=0.5),
    },
)


def handled(unit: UnitDescription = UNIT, *, g: int, keep: bool = False, job: TrainingJob | None = None, world_size: int = 4):
    hardware = replace(machine(devices_per_node=world_size), fsdp_overhead=HANDLING)
    return unit_seconds(unit, UnitLayout(shard_size=g, reshard_after_forward=not keep), hardware, job or job_of())


def test_measured_handling_counts_calls_tensors_and_copied_bytes():
    sharded = handled(g=4)  # 2 tensors; 128 bytes out of the buffer, 32 into it; 128 of gradients
    assert sharded.copy_forward == pytest.approx(1 + 0.2 + 0.160)
    assert sharded.copy_backward == pytest.approx(sharded.copy_forward + 2 + 0.4 + 0.256)
    assert handled(g=4, keep=True).copy_backward == pytest.approx(2 + 0.4 + 0.256)
    assert sharded.gather_forward == seconds(g=4).gather_forward


def test_measured_handling_of_a_replicated_unit_copies_gradients_twice_and_gathers_once():
    replicated = handled(g=1)
    assert replicated.copy_forward == pytest.approx(1 + 0.2 + 0.128)
    assert replicated.copy_backward == pytest.approx(replicated.copy_forward + 2 + 0.4 + 2 * 0.256)


def test_frozen_parameters_are_gathered_and_not_reduced():
    frozen = handled(unit_of(parameter("w", 8, 3, requires_grad=False)), g=4)
    assert frozen.copy_forward > 0
    assert frozen.copy_backward == frozen.copy_forward
    assert frozen.optimizer == 0


def test_measured_update_goes_by_the_kind_of_step_and_the_states():
    assert handled(g=4).optimizer == pytest.approx(0.6 + 0.003 * 32)
    assert handled(g=4, job=job_of(step=OptimizerStep.FOR_LOOP)).optimizer == pytest.approx(1.0)
    assert handled(g=4, job=job_of(states=0, step=OptimizerStep.FOREACH)).optimizer == pytest.approx(0.8 * 3 / 7)


def test_one_process_has_nothing_to_handle_but_the_update():
    alone = handled(g=1, world_size=1)
    assert (alone.copy_forward, alone.copy_backward) == (0, 0)
    assert alone.optimizer == pytest.approx(0.6 + 0.003 * 128)


@pytest.mark.parametrize(("backend", "dispatched"), [(Backend.GLOO, 2 * 2 * 1e-3), (Backend.NCCL, 0.0)])
def test_clipping_reads_gradients_twice_and_writes_them_once(backend, dispatched):
    """A GPU runs behind the CPU that dispatches."""
    hardware = replace(machine(), backend=backend, device=replace(machine().device, operator_s=1e-3))
    clipping = replace(job_of(), clips_gradients=True)
    with_it, without = (
        unit_seconds(UNIT, UnitLayout(shard_size=4, reshard_after_forward=False), hardware, job) for job in (clipping, job_of())
    )
    assert with_it.optimizer - without.optimizer == pytest.approx(3 * 32 / 1e6 + dispatched)


def test_batch_says_what_it_holds_and_how_often_it_reduces():
    reducing, holding = (
        UnitLayout(shard_size=4, reshard_after_forward=True),
        UnitLayout(shard_size=4, reshard_after_forward=True, reduce_every_micro_step=False),
    )
    asked = [(ONCE, reducing), (ONCE, holding), (THRICE, reducing), (THRICE, holding)]
    assert [batch.holds_gradients(choice) for batch, choice in asked] == [False, False, False, True]
    assert [batch.reduce_scatters(choice) for batch, choice in asked] == [1, 1, 3, 1]


def test_recompute_changes_no_term_of_the_parameters():
    choice = UnitLayout(shard_size=4, reshard_after_forward=True)
    again = replace(choice, activations=Activations.RECOMPUTE)
    assert unit_bytes(UNIT, again, 4, job_of(), ONCE) == unit_bytes(UNIT, choice, 4, job_of(), ONCE)
    assert unit_seconds(UNIT, again, machine(), job_of()) == unit_seconds(UNIT, choice, machine(), job_of())


# states on the host


@pytest.mark.parametrize(("g", "pinned"), [(1, 128 + 32), (2, 64 + 16), (4, 32 + 8)])
def test_states_on_the_host_leave_the_device_whole(g, pinned):
    here, there = terms(g=g), terms(g=g, on_host=True)
    assert (there.parameters, there.optimizer, there.gradients_held, there.gradients_after, there.held) == (0, 0, 0, 0, 0)
    assert there.host == 2 * pinned + here.optimizer, "parameters and gradients in powers of two"
    assert here.host == 0
    assert (there.gathered, there.gather_buffer, there.reduce_input) == (here.gathered, here.gather_buffer, here.reduce_input)
    assert there.reduce_output == 128 // g, "what is reduced cannot become the gradient where it lies"
    assert terms(g=g, on_host=True, job=job_of(step=OptimizerStep.FOREACH)).step_scratch == 0, "the host takes the step"


def test_one_process_that_holds_gradients_holds_those_of_units_on_the_host_whole():
    held = terms(g=1, world_size=1, on_host=True, hold=True, batch=Batch(micro_batch_size=1, accumulation_steps=3))
    assert (held.gradients_held, held.gradients_after, held.gradients_settled, held.reduce_tail) == (128, 0, -128, 128)
    assert terms(g=1, world_size=1).reduce_tail == 0


def test_replicas_on_the_host_keep_no_more_than_the_gradients_that_they_held():
    batch = Batch(micro_batch_size=1, accumulation_steps=3)
    held = terms(g=1, on_host=True, hold=True, batch=batch)
    assert (held.gradients_held, held.reduced_after, held.gradients_settled) == (128, 0, 0)
    assert terms(g=1, on_host=True, batch=batch).reduced_after == 128


def test_a_gradient_comes_to_the_host_before_it_is_added():
    batch = Batch(micro_batch_size=1, accumulation_steps=3)
    assert terms(g=4, on_host=True, batch=batch).host_moment == 24
    assert terms(g=4, on_host=True, hold=True, batch=batch).host_moment == terms(g=4, on_host=True).host_moment == 0
    assert terms(g=2, on_host=True, batch=batch).host_moment == 0, "the sum of replicas comes over once"


def test_what_comes_from_the_host_is_there_before_it_is_gathered():
    assert terms(g=4, on_host=True).cast_buffer == 0, "shards are less than what is gathered from them"
    assert terms(g=1, on_host=True).cast_buffer == 64, "replicas come one by one: 96 twice, or 96 and 32 twice, against 128"
    assert terms(g=1, on_host=True, job=job_of("bf16")).cast_buffer == 96 + 48 - 64, "it is there in its own dtype, too"
    assert terms(g=1, world_size=1).cast_buffer == 0


def test_frozen_parameters_on_the_host_have_no_states():
    frozen = terms(unit_of(parameter("w", 8, 3, requires_grad=False), parameter("b", 8)), g=4, on_host=True)
    assert frozen.host == 32 + 2 * 8 + 2 * 8, "its weight in a power of two; parameter, gradient and two states of the other"


def test_one_process_gathers_what_lies_on_the_host():
    alone = terms(g=1, world_size=1, on_host=True)
    assert (alone.gathered, alone.gather_buffer, alone.reduce_input, alone.host) == (128, 0, 128, 576)


def test_host_link_brings_shards_takes_gradients_and_the_host_steps():
    hardware = replace(machine(), host=HOST)
    here, there = (
        unit_seconds(UNIT, UnitLayout(shard_size=4, reshard_after_forward=True, on_host=way), hardware, job_of()) for way in (False, True)
    )
    assert there.gather_forward - here.gather_forward == pytest.approx(32 / 1e4)
    assert there.gather_backward - here.gather_backward == pytest.approx(32 / 1e4)
    assert there.reduce_scatter - here.reduce_scatter == pytest.approx(32 / 2e4)
    assert there.optimizer == pytest.approx(7 * 32 / 5e3)
    assert there.all_reduce == here.all_reduce
    kept = unit_seconds(UNIT, UnitLayout(shard_size=4, reshard_after_forward=False, on_host=True), hardware, job_of())
    assert (kept.gather_forward, kept.gather_backward) == (there.gather_forward, 0)
    clipping = unit_seconds(
        UNIT, UnitLayout(shard_size=4, reshard_after_forward=True, on_host=True), hardware, replace(job_of(), clips_gradients=True)
    )
    assert clipping.optimizer == pytest.approx((7 + 3) * 32 / 5e3)


def test_replicas_come_from_the_host_on_the_stream_of_compute():
    hardware = replace(machine(), host=HOST)
    here, there = (
        unit_seconds(UNIT, UnitLayout(shard_size=1, reshard_after_forward=True, on_host=way), hardware, job_of()) for way in (False, True)
    )
    assert (there.gather_forward, there.gather_backward) == (0, 0)
    assert there.copy_forward - here.copy_forward == pytest.approx(128 / 1e4)


def test_a_host_that_is_not_known_is_an_error():
    with pytest.raises(HardwareError, match="the host of toy is not known; measure it"):
        unit_seconds(UNIT, UnitLayout(shard_size=4, reshard_after_forward=True, on_host=True), machine(), job_of())
