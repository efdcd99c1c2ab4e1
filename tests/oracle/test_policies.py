"""What may be given up for memory is given up only where it pays."""

import random
from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.description import Segment
from hf_osdp.planner.hardware import Backend
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from tests.helpers.descriptions import at_random, ways
from tests.helpers.problems import problem
from tests.helpers.sampling import slow_but
from tests.oracle.test_brute_force import small_hardware, small_host

FIXED = [{"recompute": True}, {"reduce_every_micro_step": True}]
FIXED += [{name: False} for name in ("recompute", "host_offload", "reduce_every_micro_step", "offload_activations")]


def instance(seed: int):
    dice = random.Random(seed)
    hardware, backend = small_hardware(dice), dice.choice(list(Backend))
    hardware = replace(hardware, backend=backend, host=replace(small_host(dice), memory_bytes=10**9))
    description = at_random(seed, kinds=1, blocks=dice.choice([4, 12]), recomputable=True)
    return description, hardware, TrainingJob(global_batch_size=4 * hardware.world_size)


@pytest.mark.parametrize("seed", slow_but(range(6), daily=(1,)))
@pytest.mark.parametrize("fixed", FIXED, ids=str)
def test_no_plan_with_a_choice_fixed_is_faster_or_smaller(seed, fixed):
    description, hardware, job = instance(seed)
    less = replace(job, **fixed)
    limit = int(1.3 * least_memory(problem(description, hardware, less)))
    free_s, fixed_s = (search(problem(description, hardware, one, limit)).time.step_s for one in (job, less))
    assert free_s <= fixed_s * (1 + 2e-7)
    assert least_memory(problem(description, hardware, job)) <= least_memory(problem(description, hardware, less))


def slower_again(segment: Segment) -> Segment:
    """The segment with a recomputed form that saves nothing and takes one more forward."""
    backward = replace(segment.backward, matmul_flops=segment.backward.matmul_flops.plus(segment.forward.matmul_flops))
    return replace(segment, recomputed=ways(replace(segment, saved_bytes=Affine(), backward=backward, recomputed=())))


def test_nothing_is_given_up_where_memory_is_ample():
    description, hardware, job = instance(3)
    segments = tuple(slower_again(s) if s.recomputed else s for s in description.segments)
    description = replace(description, segments=segments)
    plan = search(problem(description, hardware, job, 10**12)).plan
    assert {unit.activations for unit in plan.units} == {Activations.SAVE}
    assert not any(unit.on_host for unit in plan.units)


def test_what_is_fixed_is_what_runs():
    description, hardware, job = instance(4)
    plan = search(problem(description, hardware, replace(job, recompute=True, host_offload=True), 10**12)).plan
    assert all(unit.on_host for unit in plan.units)
    again = {unit.fqn for unit in plan.units if unit.activations == Activations.RECOMPUTE}
    assert again == {description.units[i].fqn for i in description.recomputable} != set()


def test_one_device_moves_to_host_only_what_it_must():
    description, hardware, job = instance(5)
    alone = replace(hardware, nodes=1, devices_per_node=1, margin=0.06)
    job = replace(job, global_batch_size=2, recompute=False)
    whole = search(problem(description, alone, replace(job, host_offload=False), 10**12))
    less = search(problem(description, alone, job, int(0.8 * whole.plan.peak_bytes))).plan
    assert 0 < sum(unit.on_host for unit in less.units) < len(less.units)
    everything = search(problem(description, alone, replace(job, host_offload=True), 10**12))
    assert less.step_s < everything.plan.step_s


def test_host_too_small_or_unknown_is_refused_where_asked_for():
    description, hardware, job = instance(0)
    tiny = replace(hardware, host=replace(hardware.host, memory_bytes=10))
    with pytest.raises(HardwareError, match="but it has 10 B"):
        search(problem(description, tiny, replace(job, host_offload=True), 10**12))
    for strategy in (Strategy.OSDP, Strategy.FSDP):
        plan = search(problem(description, tiny, job, 10**12, strategy=strategy)).plan
        assert not any(unit.on_host for unit in plan.units), "what fits the device needs none"
    with pytest.raises(HardwareError, match=r"host_offload=True, but the host of .* is not known"):
        search(problem(description, replace(hardware, host=None), replace(job, host_offload=True), 10**12))
