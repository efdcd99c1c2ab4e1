"""Peaks in closed form, and what the moments of a step add up to."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest

from hf_osdp.planner.affine import Affine, Envelope
from hf_osdp.planner.cost.memory import MemoryBreakdown, combined_scratch, estimate_memory, gathered_ahead, merging_segments
from hf_osdp.planner.cost.units import unit_bytes
from hf_osdp.planner.decision import Batch, UnitLayout, layouts_for
from hf_osdp.planner.description import DType, GatherSpan, ModelDescription, ParameterSpec, PhaseCost, Segment, UnitDescription
from hf_osdp.planner.job import OptimizerSpec, OptimizerStep, TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.candidates import Candidate
from hf_osdp.planner.search.strategies import batches, search_spaces
from hf_osdp.planner.search.timeline import build_timeline
from tests.helpers.descriptions import at_random, transformer
from tests.helpers.problems import problem

ONCE = Batch(micro_batch_size=1, accumulation_steps=1)
JOB = TrainingJob(global_batch_size=8)
LAYERS = 4
P = 4 * 100
"""Bytes of a block's parameters: 100 rows of one float32."""


def blocks(*, saved: int = 0, workspace: int = 0, head_saved: int = 0, head_workspace: int = 0) -> ModelDescription:
    """An empty root, LAYERS blocks of P bytes, then a head that belongs to the root."""
    root = UnitDescription(fqn="", module_names=("",), class_name="Root", span=GatherSpan.STEP, parameters=())
    units = [
        UnitDescription(
            fqn=f"b{i}", module_names=(f"b{i}",), class_name="Block", span=GatherSpan.USE,
            parameters=(ParameterSpec(name=f"b{i}.w", shape=(100,), dtype=DType.FLOAT32),),
        )
        for i in range(LAYERS)
    ]  # fmt: skip
    phase = PhaseCost(peak_bytes=Envelope.linear(per_sample=workspace))
    segments = [Segment(unit=1 + i, saved_bytes=Affine(per_sample=saved), forward=phase, backward=phase) for i in range(LAYERS)]
    head_phase = PhaseCost(peak_bytes=Envelope.linear(per_sample=head_workspace))
    head = Segment(unit=0, saved_bytes=Affine(per_sample=head_saved), forward=head_phase, backward=head_phase)
    return ModelDescription(
        model_name="blocks", model_class="Blocks", block_classes=("Block",), sequence_length=1, compute_dtype=DType.FLOAT32,
        units=(root, *units), segments=(*segments, head),
    )  # fmt: skip


def everywhere(description: ModelDescription, g: int, *, keep: bool = False, **more) -> list[UnitLayout]:
    return [replace(layouts_for(unit.span, (g,), reshard_after_forward=not keep)[0], **more) for unit in description.units]


def estimate(description: ModelDescription, g: int, *, world_size: int = 4, job: TrainingJob = JOB, batch: Batch = ONCE, **chosen):
    return estimate_memory(description, everywhere(description, g, **chosen), world_size, job, batch)


def test_activations_that_dominate_peak_at_the_head():
    saved, head = 10**6, 10**5
    peak = estimate(blocks(saved=saved, head_workspace=head, head_saved=head), g=4).peak
    assert (peak.phase, peak.unit) == ("backward", "(root)")
    states = LAYERS * 3 * P // 4  # parameter and two states, cut in 4
    # b3 is gathered ahead, into a buffer of P bytes
    assert peak.total_bytes == states + LAYERS * saved + head + head + P


def test_gradients_that_dominate_peak_in_the_block_that_runs_last_in_backward():
    peak = estimate(blocks(), g=1, job=TrainingJob(global_batch_size=4, optimizer=OptimizerSpec(states=0))).peak
    assert peak.unit == "b0"
    assert peak.phase.startswith("backward")
    # all parameters, the gradients of b1..b3, b0 gathered, and the buffer in which b1 is reduced
    assert peak.total_bytes == LAYERS * P + (LAYERS - 1) * P + P + P


def test_whole_gradients_that_are_held_are_all_there_when_the_last_block_is_reduced():
    job = TrainingJob(global_batch_size=8, optimizer=OptimizerSpec(states=0))
    holding = Batch(micro_batch_size=1, accumulation_steps=2)
    # parameters and gradients, one block gathered, and the buffer in which the one after it is reduced
    assert estimate(blocks(), g=1, job=job, batch=holding, reduce_every_micro_step=False).peak_bytes == LAYERS * P + LAYERS * P + P + P


def test_full_sharding_of_one_block_at_a_time():
    job = TrainingJob(global_batch_size=4, optimizer=OptimizerSpec(states=0))
    peak = estimate(blocks(), g=4, job=job).peak
    shards = LAYERS * P // 4
    # b1: its only gradient and the buffer in which it is reduced, and the buffer of b0, gathered ahead; then as much again
    # where b0 is copied out: gathered, its buffer, and the reduce buffer of b1 in flight
    assert peak.total_bytes == shards + (LAYERS - 1) * P // 4 + P + P + P
    assert (peak.phase, peak.unit) == ("backward: reduce", "b1")


def test_kept_parameters_stay_until_backward():
    freed, kept = (estimate(blocks(saved=10**5), g=4, keep=keep) for keep in (False, True))
    head = [next(m for m in e.moments if m.phase == "forward" and m.unit == "(root)") for e in (freed, kept)]
    assert head[1].breakdown.gathered - head[0].breakdown.gathered == LAYERS * P
    assert kept.moments[-1].total_bytes == freed.moments[-1].total_bytes


def test_peak_is_the_first_of_the_highest_moments():
    memory = estimate(blocks(), g=1)
    totals = [moment.total_bytes for moment in memory.moments]
    assert memory.peak_bytes == max(totals)
    assert memory.peak is memory.moments[totals.index(max(totals))]


@pytest.mark.parametrize("seed", range(10))
def test_breakdown_sums_to_the_total_and_is_never_negative(seed):
    description = at_random(seed, kinds=2, blocks=3)
    for batch, g in itertools.product(batches(TrainingJob(global_batch_size=8), 4), (1, 2, 4)):
        for moment in estimate(description, g, keep=bool(seed % 2), batch=batch).moments:
            values = [getattr(moment.breakdown, f.name) for f in fields(MemoryBreakdown)]
            assert sum(values) == moment.total_bytes
            assert min(values) >= 0, (moment.phase, moment.unit)


def test_moments_are_forward_then_backward_reversed_then_reduce_then_optimizer():
    moments = estimate(blocks(), g=4).moments
    phases = [phase for phase, _ in itertools.groupby(m.phase.partition(":")[0] for m in moments)]
    assert phases == ["forward", "backward", "reduce", "optimizer step"]
    assert [m.unit for m in moments if m.phase == "forward"] == ["b0", "b1", "b2", "b3", "(root)"]
    assert [m.unit for m in moments if m.phase == "backward"] == ["(root)", "b3", "b2", "b1", "b0"]


def test_every_unit_has_one_choice():
    for choices in (everywhere(blocks(), 1)[:-1], everywhere(blocks(), 1) * 2):
        with pytest.raises(ValueError, match="zip"):
            estimate_memory(blocks(), choices, 1, JOB, ONCE)


def test_states_are_there_at_every_moment():
    description = transformer()
    for g in (1, 2, 4):
        held = [unit_bytes(u, c, 4, JOB, ONCE) for u, c in zip(description.units, everywhere(description, g), strict=True)]
        for moment in estimate(description, g).moments:
            assert moment.breakdown.parameters == sum(u.parameters for u in held)
            assert moment.breakdown.optimizer == sum(u.optimizer for u in held)


def test_last_moment_holds_parameters_gradients_and_states_only():
    description = transformer()
    last = estimate(description, g=1).moments[-1]
    assert last.total_bytes == 4 * 4 * description.numel + description.input_bytes.bytes(1)


@pytest.mark.parametrize("hold", [True, False])
def test_accumulation_ends_with_shards_however_gradients_were_held(hold):
    description = transformer()
    batch = Batch(micro_batch_size=1, accumulation_steps=2)
    assert (
        estimate(description, g=4, batch=batch, reduce_every_micro_step=not hold).moments[-1].breakdown
        == estimate(description, g=4).moments[-1].breakdown
    )


def test_one_process_gathers_and_reduces_nothing():
    description = transformer()
    memory = estimate(description, g=1, world_size=1)
    assert {(m.breakdown.gathered, m.breakdown.buffers) for m in memory.moments} == {(0, 0)}


def test_buffers_and_batch_are_there_at_every_moment():
    plain = transformer()
    assert {m.breakdown.model_buffers for m in estimate(plain, g=4).moments} == {plain.input_bytes.bytes(1)}


@pytest.mark.parametrize(("step", "expected"), [(OptimizerStep.FOREACH, 60), (OptimizerStep.FOR_LOOP, 30), (OptimizerStep.FUSED, 60)])
def test_scratch_of_a_loop_is_its_largest(step, expected):
    job = TrainingJob(global_batch_size=1, optimizer=OptimizerSpec(step=step))
    assert combined_scratch(job, [10, 20, 30]) == expected
    assert combined_scratch(job, []) == 0


def test_gradients_of_shared_weights_meet_in_their_first_segment():
    description = transformer()
    root, tied, *rest = description.units
    shared = replace(description, units=(root, replace(tied, shared=(("embedding.weight", "head.weight"),)), *rest))
    assert merging_segments(description, JOB) == {}
    assert merging_segments(shared, JOB) == {0: 4 * tied.numel}
    plain, merging = ([m for m in estimate(d, g=4).moments if m.phase == "backward"] for d in (description, shared))
    assert [b.total_bytes - a.total_bytes for a, b in zip(plain, merging, strict=True)] == [0] * 5 + [4 * tied.numel]


@pytest.mark.parametrize("seed", range(5))
def test_frugal_floor_is_below_every_layout(seed):
    description, hardware = at_random(seed, kinds=2, blocks=3), preset("cpu", devices_per_node=2)
    for batch in batches(TrainingJob(global_batch_size=4), 2):
        (space,) = search_spaces(problem(description, hardware, JOB), batch)
        asked = problem(description, hardware, JOB)
        floor = Candidate(problem=asked, batch=batch, timeline=build_timeline(asked, batch, space)).floor_bytes
        assert all(estimate_memory(description, c, 2, JOB, batch).peak_bytes >= floor for c in itertools.product(*space))


def segments_of(*units: int) -> tuple[Segment, ...]:
    return tuple(Segment(unit=unit) for unit in units)


@pytest.mark.parametrize(
    ("order", "ahead"),
    [
        pytest.param((1, 0, 2, 3, 0, 1, 0), (None, None, None, 2, 3, 3, None), id="head shared: nothing is gathered during the loss"),
        pytest.param((0, 2, 3, 0), (None, None, 2, 3), id="root's head: the last block is gathered during the loss"),
        pytest.param((0, 2, 0, 3), (None, None, 2, 2), id="root between blocks"),
        pytest.param((1, 2, 1, 3, 1), (None, None, 2, None, 3), id="nor is it while shared weights run more often than they have modules"),
        pytest.param((1, 2, 3, 0), (None, None, 2, 3), id="a shared module that never runs has no place in the order"),
    ],
)
def test_what_is_gathered_while_a_segment_runs_backward(order, ahead):
    description = transformer(layers=2)
    root, tied, *blocks = description.units
    units = (root, replace(tied, module_names=("embedding", "head")), *blocks)
    assert gathered_ahead(replace(description, units=units, segments=segments_of(*order))) == ahead
