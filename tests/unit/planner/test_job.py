"""What a job refuses, and the micro-batch sizes that it allows."""

from __future__ import annotations

import pytest

from hf_osdp.planner.description import DType, ParameterSpec
from hf_osdp.planner.job import OptimizerSpec, Precision, TrainingJob
from hf_osdp.planner.strategies import Strategy, batches, divisors, search_spaces
from tests.helpers.descriptions import transformer

WEIGHT = ParameterSpec(name="w", shape=(2,), dtype=DType.FLOAT32)


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


def test_batches_are_every_size_with_both_ways_to_accumulate():
    found = [(b.micro_batch_size, b.accumulation_steps, b.reduce_every_micro_step) for b in batches(TrainingJob(global_batch_size=8), 2)]
    assert found == [(4, 1, True), (2, 2, True), (2, 2, False), (1, 4, True), (1, 4, False)]
    fixed = TrainingJob(global_batch_size=8, micro_batch_size=1, reduce_every_micro_step=False)
    assert [b.reduce_every_micro_step for b in batches(fixed, 2)] == [False]
    assert all(b.micro_batch_size * b.accumulation_steps * 2 == 8 for b in batches(TrainingJob(global_batch_size=8), 2))


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.OSDP])
def test_single_strategies_are_parts_of_the_osdp_space(strategy):
    description = transformer(layers=2)
    (everything,) = search_spaces(Strategy.OSDP, description, 8, 4)
    for space in search_spaces(strategy, description, 8, 4):
        assert all(set(choices) <= set(allowed) for choices, allowed in zip(space, everything, strict=True))


def test_hsdp_needs_a_size_between_one_and_all():
    assert len(search_spaces(Strategy.HSDP, transformer(), 8)) == 2
    for world_size in (1, 2, 3):
        with pytest.raises(ValueError, match=f"strategy=hsdp needs a group size between 1 and {world_size}"):
            search_spaces(Strategy.HSDP, transformer(), world_size)


def test_two_stages_need_several_nodes_of_several_devices():
    (space,) = search_spaces(Strategy.TWO_STAGE, transformer(), 8, 4)
    assert {(choice.shard_size, choice.stage_size) for choices in space for choice in choices} == {(8, 4)}
    for per_node in (1, 8, None):
        with pytest.raises(ValueError, match=r"strategy=two_stage needs several nodes of several devices, not [18] of [18]; use fsdp"):
            search_spaces(Strategy.TWO_STAGE, transformer(), 8, per_node)
    (everything,) = search_spaces(Strategy.OSDP, transformer(), 16, 4)
    staged = {(c.shard_size, c.stage_size) for choices in everything for c in choices if c.stage_size > 1}
    assert staged == {(8, 4), (16, 4)}, "whole nodes, several of them"


def test_unknown_strategy_lists_those_known():
    with pytest.raises(ValueError, match="strategy='zero9' is not known; use one of osdp, fsdp, ddp, zero2, hsdp"):
        Strategy.parse("zero9")
    assert Strategy.parse("zero2") is Strategy.parse(Strategy.ZERO2) is Strategy.ZERO2


def test_divisors():
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)
