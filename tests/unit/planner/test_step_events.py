"""Events of an estimated plan: what is gathered and reduced when, on which stream, and what is left at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hf_osdp.planner.affine import Affine, Envelope
from hf_osdp.planner.allocator.replay import COMPUTE, COPY_IN, REDUCE, REDUCE_REPLICAS, Event, Replay
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.cost.step_events import replay_of
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import Activations, AllocationTrace, DType, Handed, ModelDescription, ParameterSpec, PhaseCost, Segment
from hf_osdp.planner.job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from tests.helpers.descriptions import transformer, ways

MiB = 2**20
WORLD, BLOCKS = 4, 3
JOB = TrainingJob(global_batch_size=8)
ONE = Batch(micro_batch_size=2, accumulation_steps=1)
FULL, REPLICA = UnitLayout(shard_size=WORLD, reshard_after_forward=True), UnitLayout(shard_size=1, reshard_after_forward=True)
TRACE = AllocationTrace(  # workspace, saved, output; then the input's gradient, the weight's, and the gradient that came in goes
    sizes=((0, MiB), (512, MiB), (0, 2 * MiB), (0, 2 * MiB), (4 * MiB, 0)),
    forward=(0, 1, ~0, 2),
    backward=(3, 4, ~1, ~5, ~6),
    gradients=(4,),
    others=(Handed(segment=1, absolute=False, backward=True, place=1), Handed(segment=-1, absolute=False, backward=False, place=1)),
)


def model(*, traced: bool = True) -> ModelDescription:
    """Blocks of one parameter of 1024 x 1024, 4 MiB each."""
    plain = transformer(layers=BLOCKS)
    weight = ParameterSpec(name="w", shape=(1024, 1024), dtype=DType.FLOAT32)
    units = tuple(replace(unit, parameters=(replace(weight, name=f"{unit.fqn}.w"),)) for unit in plain.units[2:])
    segment = Segment(
        unit=0,
        saved_bytes=Affine(constant=512, per_sample=3 * MiB),
        gradient_bytes=Affine(per_sample=2 * MiB),
        forward=PhaseCost(peak_bytes=Envelope.linear(constant=512, per_sample=3 * MiB)),
        backward=PhaseCost(peak_bytes=Envelope.linear(constant=4 * MiB, per_sample=2 * MiB)),
        allocations=0 if traced else None,
    )
    segments = tuple(replace(segment, unit=index) for index in range(BLOCKS))
    return replace(plain, units=units, segments=segments, allocations=(TRACE,) if traced else (), input_bytes=Affine())


def sizes(events, stream: int) -> Counter[int]:
    return Counter(event.nbytes for event in events if event.nbytes > 0 and event.stream == stream)


BF16, HALF = Precision.named("bf16"), Precision(compute=DType.BFLOAT16, reduce=DType.BFLOAT16)
STREAMS = {
    "sharded: gathered twice by way of a buffer": (FULL, Precision(), {COPY_IN: {4 * MiB: 2 * BLOCKS}, REDUCE: {MiB: BLOCKS}}),
    "replica: copied without a buffer": (REPLICA, Precision(), {COPY_IN: {}}),
    "kept: gathered once": (replace(FULL, reshard_after_forward=False), Precision(), {COPY_IN: {4 * MiB: BLOCKS}}),
    "shards are cast before they are gathered": (FULL, BF16, {COPY_IN: {MiB // 2: 2 * BLOCKS, 2 * MiB: 2 * BLOCKS}}),
    "gradients are cast after they are reduced": (
        replace(FULL, shard_size=2), HALF, {REDUCE: {MiB: BLOCKS}, REDUCE_REPLICAS: {2 * MiB: BLOCKS}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("choice", "precision", "wanted"), STREAMS.values(), ids=STREAMS)
def test_tensors_lie_on_the_streams_of_fsdp2(choice, precision, wanted):
    events = replay_of(model(), [choice] * BLOCKS, WORLD, replace(JOB, precision=precision), ONE)
    assert {stream: sizes(events.before_optimizer, stream) for stream in wanted} == wanted
    assert sizes(events.held, COMPUTE) == {4 * MiB // choice.shard_size: BLOCKS}


@pytest.mark.parametrize(
    "choice", [FULL, REPLICA, replace(FULL, shard_size=2), replace(FULL, reshard_after_forward=False), replace(FULL, on_host=True)]
)
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("traced", [True, False])
def test_a_step_frees_all_that_it_makes(choice, hold, steps, traced):
    batch = Batch(micro_batch_size=2, accumulation_steps=steps)
    job = replace(JOB, global_batch_size=8 * steps, precision=Precision.named("bf16"))
    events = replay_of(model(traced=traced), [replace(choice, reduce_every_micro_step=not hold)] * BLOCKS, WORLD, job, batch)
    live: set = set()
    for event in (*events.before_optimizer, *events.optimizer):
        if event.nbytes < 0:
            live.remove(event.key)  # raises where it was freed before
        else:
            live.add(event.key)
    assert not live


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("choice", [FULL, REPLICA, replace(FULL, reshard_after_forward=False)])
def test_allocated_peak_is_the_estimates(choice, traced):
    description, choices = model(traced=traced), [choice] * BLOCKS
    reserved = replay_of(description, tuple(choices), WORLD, JOB, ONE).unlimited
    estimate = estimate_memory(description, choices, WORLD, JOB, ONE).peak_bytes
    assert reserved.peak_allocated_bytes == pytest.approx(estimate, rel=0.01)
    assert reserved.traced is traced


def test_recomputed_segment_takes_its_own_trace():
    description = model()
    less = AllocationTrace(sizes=((0, 7 * MiB),), forward=(), backward=(0, ~0), gradients=())
    segments = tuple(replace(s, recomputed=ways(replace(s, allocations=1))) for s in description.segments)
    description = replace(description, segments=segments, allocations=(TRACE, less))
    events = replay_of(description, [replace(FULL, activations=Activations.RECOMPUTE)] * BLOCKS, WORLD, JOB, ONE)
    assert sizes(events.before_optimizer, COMPUTE)[14 * MiB] == BLOCKS


@pytest.mark.parametrize(
    ("step", "scratch"), [(OptimizerStep.FUSED, 0), (OptimizerStep.FOREACH, BLOCKS), (OptimizerStep.FOR_LOOP, 2 * BLOCKS)]
)
def test_optimizer_has_its_states_in_the_first_step_and_scratch_in_each(step, scratch):
    job = replace(JOB, optimizer=OptimizerSpec(step=step))
    events = replay_of(model(), [FULL] * BLOCKS, WORLD, job, ONE)
    assert sizes(events.optimizer, COMPUTE).total() == scratch
    assert sizes(events.states, COMPUTE)[MiB] == 2 * BLOCKS


def test_second_step_begins_with_what_the_first_has_cached_and_the_states():
    """The states come into memory that activations had, so that the second step's activations need more."""
    activation = [Event("a", 40 * MiB, 0), Event("a", -1, 0)]
    replays = (Replay(held=(), before_optimizer=activation, states=[Event("s", 40 * MiB, 0)], optimizer=(), steps=n) for n in (1, 2, 3))
    assert [replay.unlimited.peak_reserved_bytes for replay in replays] == [40 * MiB, 80 * MiB, 80 * MiB]


def test_capacity_counts_retries_and_says_whether_it_is_enough():
    two = [Event("a", 40 * MiB, 1), Event("a", -1, 0), Event("b", 40 * MiB, 2), Event("b", -1, 0)]
    replay = Replay(held=(), before_optimizer=two, states=(), optimizer=())
    enough = replay.within(60 * MiB)
    assert (enough.peak_reserved_bytes, enough.alloc_retries, enough.fits) == (80 * MiB, 3, True)
    assert not replay.within(20 * MiB).fits
