"""Orders that the cost model must keep, whatever the model and the layout; bytes survive their text."""

import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_osdp.planner.cost.collectives import collective_seconds, replicate_ring, shard_ring
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.hardware import Backend, Collective, Hardware
from hf_osdp.planner.presets import preset_names
from hf_osdp.planner.search.candidates import Candidate
from hf_osdp.planner.search.remedies import _rounded_up
from hf_osdp.planner.search.timeline import BatchCosts
from hf_osdp.planner.space import batches, divisors, search_spaces
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.quantities import format_bytes, parse_bytes
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
PLAIN = OptimizerSpec(states=0, step=OptimizerStep.FOREACH)
CAST = TrainingJob(global_batch_size=48, precision=Precision.named("bf16"), optimizer=PLAIN)


def arbitrary(seed, description, hardware, job, batch) -> list[UnitLayout]:
    """Any layout for each unit."""
    *_, space = search_spaces(problem(description, hardware, job), batch)
    dice = random.Random(seed)
    return [dice.choice(choices) for choices in space]


def hardware_of(world: tuple[int, int], backend: Backend = Backend.NCCL) -> Hardware:
    return replace(bare_preset("v100-16", nodes=world[0], devices_per_node=world[1]), backend=backend)


@quick
@given(seeds, worlds, jobs, st.sampled_from([1, 3]))
def test_memory_rises_with_the_micro_batch(seed, world, job, steps):
    description, hardware = at_random(seed, kinds=2, blocks=4, recomputable=True), hardware_of(world)
    layouts = arbitrary(seed, description, hardware, job, Batch(micro_batch_size=1, accumulation_steps=steps))
    sizes = sorted(batch.micro_batch_size for batch in batches(job, hardware.world_size))
    of_size = (Batch(micro_batch_size=size, accumulation_steps=steps) for size in sizes)
    peaks = [estimate_memory(description, layouts, hardware.world_size, job, batch).peak_bytes for batch in of_size]
    assert peaks == sorted(peaks)


@settings(quick, max_examples=12)
@given(seeds, worlds, jobs, st.sampled_from(Backend))
@example(26174, (1, 2), CAST, Backend.GLOO)  # what is kept after forward is not cast again in backward
def test_no_plan_peaks_below_the_floor(seed, world, job, backend):
    description, hardware = at_random(seed, kinds=2, blocks=4, recomputable=True), hardware_of(world, backend)
    asked = problem(description, hardware, job)
    for batch in batches(job, hardware.world_size):
        *_, space = search_spaces(asked, batch)
        candidate = Candidate(problem=asked, batch=batch, costs=BatchCosts(asked, batch), space=space)
        frugal = candidate.frugal()
        others = (arbitrary(seed + k, description, hardware, job, batch) for k in range(5))
        plans = [[frugal[i] for i in range(len(frugal))], *others]
        peaks = [estimate_memory(description, plan, hardware.world_size, job, batch).peak_bytes for plan in plans]
        assert min(peaks) >= candidate.floor_bytes


@quick
@given(st.sampled_from(preset_names()), worlds, st.integers(0, 2**40), st.integers(0, 2**40))
def test_collectives_take_longer_for_more_and_all_reduce_for_both(name, world, one, other):
    hardware = bare_preset(name, nodes=world[0], devices_per_node=world[1])
    fewer, more = sorted((one, other))
    for size in divisors(hardware.world_size):
        for ring in (shard_ring(hardware, size), replicate_ring(hardware, size)):
            less_s, more_s = (
                {c: collective_seconds(hardware, c, ring, nbytes) for c in Collective} for nbytes in (fewer, more)
            )
            assert all(0 <= less_s[c] <= more_s[c] for c in Collective)
            both = more_s[Collective.ALL_GATHER] + more_s[Collective.REDUCE_SCATTER]
            assert abs(more_s[Collective.ALL_REDUCE] - both) <= 1e-9 * both


@quick
@given(st.integers(1, 2**48))
@example(2**40 + 2**25)
@example(2**30 - 1)
def test_limit_that_a_remedy_prints_suffices(nbytes):
    printed = parse_bytes(format_bytes(_rounded_up(nbytes)))
    assert nbytes <= printed
    assert printed <= nbytes + 2**20 / 5 or printed <= nbytes * 1.2
