"""What a job refuses, and the micro-batch sizes that it allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.description import Activations, DType, ParameterSpec
from hf_osdp.planner.hardware import Hardware, HostSpec
from hf_osdp.planner.job import OptimizerSpec, Precision, TrainingJob
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.strategies import batches, divisors, search_spaces
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

WEIGHT = ParameterSpec(name="w", shape=(2,), dtype=DType.FLOAT32)
ONCE, TWICE = (Batch(micro_batch_size=1, accumulation_steps=steps) for steps in (1, 2))
JOB = TrainingJob(global_batch_size=32)
HOST = HostSpec(memory_bytes=10**9, to_device_bytes_per_s=1e4, to_host_bytes_per_s=2e4, update_bytes_per_s=5e3, source="made up")
PLAIN = transformer(layers=2)
SENT = [replace(s, own_saved_bytes=s.saved_bytes, sent_bytes=s.saved_bytes) for s in PLAIN.segments]
DESCRIPTION = replace(PLAIN, segments=tuple(replace(s, recomputed=s) if s.unit > 1 else replace(s, sent_bytes=Affine()) for s in SENT))
"""Two blocks that can be run again in backward, or offloaded, after a root and an embedding that cannot."""


def devices(per_node: int, *, nodes: int = 1) -> Hardware:
    return bare_preset("a100-40", nodes=nodes, devices_per_node=per_node)


def offered(batch: Batch, job: TrainingJob = JOB, *, host: HostSpec | None = None, strategy: Strategy = Strategy.OSDP, world_size: int = 4):
    """For each space, what each unit may hold, recompute, and leave on the host."""
    spaces = search_spaces(problem(DESCRIPTION, replace(devices(world_size), host=host), job, strategy=strategy), batch)
    return [[{(not c.reduce_every_micro_step, c.activations, c.on_host) for c in choices} for choices in space] for space in spaces]


def test_micro_batch_sizes_fill_the_global_batch_largest_first():
    assert TrainingJob(global_batch_size=24).micro_batch_sizes(2) == (12, 6, 4, 3, 2, 1)
    assert TrainingJob(global_batch_size=24, micro_batch_size=3).micro_batch_sizes(2) == (3,)


def test_global_batch_that_does_not_divide_names_the_nearest_that_do():
    with pytest.raises(ValueError, match="global_batch_size=10 does not divide by 4 processes; use 8 or 12"):
        TrainingJob(global_batch_size=10).micro_batch_sizes(4)


def test_global_batch_below_the_world_size_is_given_one_remedy():
    with pytest.raises(ValueError) as caught:
        TrainingJob(global_batch_size=3).micro_batch_sizes(4)
    assert str(caught.value).endswith("use 4.")


def test_micro_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="micro_batch_size=5 does not divide the 12 samples of each rank"):
        TrainingJob(global_batch_size=24, micro_batch_size=5).micro_batch_sizes(2)


@pytest.mark.parametrize("values", [{"global_batch_size": 0}, {"global_batch_size": 4, "micro_batch_size": 0}])
def test_batches_below_one_are_refused(values):
    with pytest.raises(ValueError, match="must be at least 1"):
        TrainingJob(**values)


def test_negative_optimizer_states_are_refused():
    with pytest.raises(ValueError, match="states=-1"):
        OptimizerSpec(states=-1)


def test_precision_names():
    assert Precision.named("no") == Precision.named("fp32") == Precision()
    assert Precision.named("no").gathered_dtype(WEIGHT) is DType.FLOAT32
    for name, compute in (("bf16", DType.BFLOAT16), ("fp16", DType.FLOAT16)):
        precision = Precision.named(name)
        assert (precision.gathered_dtype(WEIGHT), precision.reduced_dtype(WEIGHT)) == (compute, DType.FLOAT32)
    assert Precision(compute=DType.BFLOAT16).reduced_dtype(WEIGHT) is DType.BFLOAT16
    with pytest.raises(ValueError, match="mixed_precision='fp8' is not known; use no, bf16 or fp16"):
        Precision.named("fp8")


def test_optimizer_traffic_counts_reads_and_writes():
    assert [OptimizerSpec(states=n).traffic_per_element for n in (0, 1, 2)] == [3, 5, 7]


def test_batches_are_every_size_with_its_accumulation():
    found = [(b.micro_batch_size, b.accumulation_steps) for b in batches(TrainingJob(global_batch_size=8), 2)]
    assert found == [(4, 1), (2, 2), (1, 4)]
    assert [b.accumulation_steps for b in batches(TrainingJob(global_batch_size=8, micro_batch_size=1), 2)] == [4]
    assert all(b.micro_batch_size * b.accumulation_steps * 2 == 8 for b in batches(TrainingJob(global_batch_size=8), 2))


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.OSDP])
def test_single_strategies_are_parts_of_the_osdp_space(strategy):
    for batch in (ONCE, TWICE):
        _is_part(strategy, batch)


def _is_part(strategy: Strategy, batch: Batch) -> None:
    hardware = replace(devices(4, nodes=2), host=HOST)
    (everything,) = search_spaces(problem(DESCRIPTION, hardware, JOB), batch)
    for space in search_spaces(problem(DESCRIPTION, hardware, JOB, strategy=strategy), batch):
        ways = {(not c.reduce_every_micro_step, c.on_host) for unit, choices in zip(DESCRIPTION.units, space, strict=True) for c in choices}
        assert len(ways) == 1, "a single strategy does the same with every unit"
        assert all(set(choices) <= set(allowed) for choices, allowed in zip(space, everything, strict=True))


def test_hsdp_needs_a_size_between_one_and_all():
    plain = replace(JOB, recompute=False)
    assert len(search_spaces(problem(DESCRIPTION, devices(8), plain, strategy=Strategy.HSDP), ONCE)) == 2
    for world_size in (1, 2, 3):
        with pytest.raises(ValueError, match=f"strategy=hsdp needs a group size between 1 and {world_size}"):
            search_spaces(problem(DESCRIPTION, devices(world_size), plain, strategy=Strategy.HSDP), ONCE)


def test_two_stages_need_several_nodes_of_several_devices():
    plain = replace(JOB, recompute=False)
    (space,) = search_spaces(problem(DESCRIPTION, devices(4, nodes=2), plain, strategy=Strategy.TWO_STAGE), ONCE)
    assert {(choice.shard_size, choice.stage_size) for choices in space for choice in choices} == {(8, 4)}
    for hardware in (devices(1, nodes=8), devices(8), devices(1)):
        with pytest.raises(ValueError, match=r"strategy=two_stage needs several nodes of several devices, not [18] of [18]; use fsdp"):
            search_spaces(problem(DESCRIPTION, hardware, plain, strategy=Strategy.TWO_STAGE), ONCE)
    (everything,) = search_spaces(problem(DESCRIPTION, devices(4, nodes=4), plain), ONCE)
    staged = {(c.shard_size, c.stage_size) for choices in everything for c in choices if c.stage_size > 1}
    assert staged == {(8, 4), (16, 4)}, "whole nodes, several of them"


def test_unknown_strategy_lists_those_known():
    with pytest.raises(ValueError, match="strategy='zero9' is not known; use one of osdp, fsdp, ddp, zero2, hsdp"):
        Strategy.parse("zero9")
    assert Strategy.parse("zero2") is Strategy.parse(Strategy.ZERO2) is Strategy.ZERO2


def test_divisors():
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)


# decisions beside the layout

SAVE, AGAIN = Activations.SAVE, Activations.RECOMPUTE


@pytest.mark.parametrize("world_size", [1, 4])
def test_holding_gradients_is_offered_only_where_there_is_accumulation(world_size):
    job = replace(JOB, recompute=False)
    (once,), (twice,) = (offered(batch, job, world_size=world_size) for batch in (ONCE, TWICE))
    assert all(ways == {(False, SAVE, False)} for ways in once)
    assert all(ways == {(False, SAVE, False), (True, SAVE, False)} for ways in twice)


@pytest.mark.parametrize("every", [True, False])
def test_a_fixed_reduce_every_micro_step_fixes_every_unit(every):
    job = replace(JOB, reduce_every_micro_step=every, recompute=False)
    (once,), (twice,) = (offered(batch, job) for batch in (ONCE, TWICE))
    assert all(ways == {(False, SAVE, False)} for ways in once), "with one micro-step there is nothing to hold"
    assert all(ways == {(not every, SAVE, False)} for ways in twice)


def test_frozen_units_hold_no_gradients():
    frozen = replace(DESCRIPTION.units[3], parameters=tuple(replace(p, requires_grad=False) for p in DESCRIPTION.units[3].parameters))
    description = replace(DESCRIPTION, units=(*DESCRIPTION.units[:3], frozen))
    (space,) = search_spaces(problem(description, devices(4), replace(JOB, reduce_every_micro_step=False)), TWICE)
    assert [{not c.reduce_every_micro_step for c in choices} for choices in space] == [{True}, {True}, {True}, {False}]


@pytest.mark.parametrize(("recompute", "blocks"), [(None, {SAVE, AGAIN}), (True, {AGAIN}), (False, {SAVE})])
def test_only_what_can_be_run_again_is_recomputed(recompute, blocks):
    (ways,) = offered(ONCE, replace(JOB, recompute=recompute))
    assert [{kept for _, kept, _ in unit} for unit in ways] == [{SAVE}, {SAVE}, blocks, blocks]


@pytest.mark.parametrize(("offload", "there"), [(None, {False, True}), (True, {True}), (False, {False})])
def test_the_host_is_offered_where_there_is_one(offload, there):
    job = replace(JOB, host_offload=offload)
    (ways,) = offered(ONCE, job, host=HOST)
    assert [{where for _, _, where in unit} for unit in ways] == [there] * 4
    (bare,) = offered(ONCE, replace(job, host_offload=None))
    assert all(where is False for unit in bare for _, _, where in unit)


def test_single_strategies_recompute_all_blocks_or_none():
    spaces = offered(ONCE, strategy=Strategy.FSDP)
    assert [[{kept for _, kept, _ in unit} for unit in ways] for ways in spaces] == [[{SAVE}] * 4, [{SAVE}, {SAVE}, {AGAIN}, {AGAIN}]]
    assert len(offered(TWICE, strategy=Strategy.FSDP)) == 4, "with all gradients held, and with none"
    assert len(offered(TWICE, strategy=Strategy.FSDP, host=HOST)) == 16, "with all states on the host, all activations, and none"


@pytest.mark.parametrize(
    ("offload", "forms"),
    [(None, set(Activations)), (True, {Activations.OFFLOAD, Activations.RECOMPUTE_OFFLOAD}), (False, {SAVE, AGAIN})],
)
def test_blocks_may_offload_their_activations_where_there_is_a_host(offload, forms):
    (ways,) = offered(ONCE, replace(JOB, offload_activations=offload), host=HOST)
    assert [{kept for _, kept, _ in unit} for unit in ways] == [{SAVE}, {SAVE}, forms, forms]
