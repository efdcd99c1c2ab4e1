"""Orders that the cost model must keep, whatever the model and the layout."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_osdp.planner.cost.collectives import collective_seconds, replicate_ring, shard_ring
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.cost.timing import estimate_time
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Backend, Collective, Hardware
from hf_osdp.planner.job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.planner.presets import preset_names
from hf_osdp.planner.search.candidates import Candidate
from hf_osdp.planner.search.strategies import batches, divisors, search_spaces
from hf_osdp.planner.search.timeline import build_timeline
from tests.helpers.descriptions import at_random
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

quick = settings(max_examples=50, deadline=None)
worlds = st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 4), (3, 2)])
seeds = st.integers(0, 10**6)
jobs = st.builds(
    TrainingJob,
    global_batch_size=st.just(48),
    precision=st.sampled_from([Precision.named("no"), Precision.named("bf16")]),
    optimizer=st.builds(OptimizerSpec, states=st.sampled_from([0, 1, 2]), step=st.sampled_from(OptimizerStep)),
)

CAST = TrainingJob(global_batch_size=48, precision=Precision.named("bf16"), optimizer=OptimizerSpec(states=0, step=OptimizerStep.FOREACH))


def layout(seed: int, description: ModelDescription, hardware: Hardware, job: TrainingJob, batch: Batch) -> list[UnitLayout]:
    """An arbitrary choice for each unit."""
    (space,) = search_spaces(problem(description, hardware, job), batch)
    dice = random.Random(seed)
    return [dice.choice(choices) for choices in space]


def hardware_of(world: tuple[int, int], backend: Backend = Backend.NCCL) -> Hardware:
    return replace(bare_preset("v100-16", nodes=world[0], devices_per_node=world[1]), backend=backend)


@quick
@given(seeds, worlds, jobs)
def test_memory_rises_with_the_micro_batch(seed, world, job):
    description, hardware = at_random(seed, kinds=2, blocks=4, recomputable=True), hardware_of(world)
    world_size = hardware.world_size
    for steps in (1, 3):
        choices = layout(seed, description, hardware, job, Batch(micro_batch_size=1, accumulation_steps=steps))
        of_size = [
            estimate_memory(description, choices, world_size, job, replace(batch, accumulation_steps=steps))
            for batch in sorted(batches(job, world_size), key=lambda b: b.micro_batch_size)
        ]
        peaks = [memory.peak_bytes for memory in of_size]
        assert peaks == sorted(peaks)


@quick
@given(seeds, worlds, jobs, st.booleans())
@example(26174, (1, 2), CAST, False)  # what is kept after forward is not cast again in backward
def test_no_plan_peaks_below_the_floor(seed, world, job, overlaps):
    description = at_random(seed, kinds=2, blocks=4, recomputable=True)
    hardware = hardware_of(world, Backend.NCCL if overlaps else Backend.GLOO)
    for batch in batches(job, hardware.world_size):
        (space,) = search_spaces(problem(description, hardware, job), batch)
        timeline = build_timeline(problem(description, hardware, job), batch, space)
        candidate = Candidate(problem=problem(description, hardware, job), batch=batch, timeline=timeline)
        floor, frugal = candidate.floor_bytes, candidate.frugal()
        plans = [[frugal[i] for i in range(len(frugal))], *(layout(seed + k, description, hardware, job, batch) for k in range(5))]
        assert all(estimate_memory(description, c, hardware.world_size, job, batch).peak_bytes >= floor for c in plans)


@quick
@given(st.sampled_from(preset_names()), worlds, st.sampled_from(Collective), st.integers(0, 2**40), st.integers(0, 2**40))
def test_collectives_take_longer_for_more_bytes(name, world, collective, one, other):
    hardware = bare_preset(name, nodes=world[0], devices_per_node=world[1])
    fewer, more = sorted((one, other))
    for size in divisors(hardware.world_size):
        for ring in (shard_ring(hardware, size), replicate_ring(hardware, size)):
            assert 0 <= collective_seconds(hardware, collective, ring, fewer) <= collective_seconds(hardware, collective, ring, more)


@quick
@given(worlds, st.integers(1, 2**40))
def test_all_reduce_takes_as_long_as_reduce_scatter_and_all_gather(world, nbytes):
    hardware = hardware_of(world)
    for size in divisors(hardware.world_size):
        ring = shard_ring(hardware, size)
        both = sum(collective_seconds(hardware, c, ring, nbytes) for c in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER))
        assert abs(collective_seconds(hardware, Collective.ALL_REDUCE, ring, nbytes) - both) <= 1e-9 * both


@quick
@given(seeds, worlds, jobs)
def test_exposed_communication_is_never_more_than_all(seed, world, job):
    description, hardware = at_random(seed, kinds=2, blocks=4), hardware_of(world)
    for batch in batches(job, hardware.world_size):
        choices = layout(seed, description, hardware, job, batch)
        for unit in estimate_time(description, choices, hardware, job, batch).units:
            assert 0 <= unit.exposed_s <= unit.communication_s * (1 + 1e-9)
