"""The count of a plan's communicators is that of the groups that `Meshes.prepare` forms."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from hf_osdp.distributed.mesh import Meshes, find_topology
from hf_osdp.planner.decision import UnitDecision
from hf_osdp.planner.hardware import Backend
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import COMMUNICATOR_BYTES, preset
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.planner.search.search import least_memory
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.preparation.simulate import fake_process_group
from tests.helpers.descriptions import transformer
from tests.helpers.distributed import run_ranks
from tests.helpers.problems import problem

MODEL, JOB = transformer(layers=2), TrainingJob(global_batch_size=16)


def plan_of(world_size: int, layouts: tuple[tuple[int, int], ...]) -> Plan:
    plain = UnitDecision(fqn="", shard_size=1, reshard_after_forward=True)
    numbered = enumerate(layouts)
    units = [replace(plain, fqn=f"unit{i}", shard_size=shard, stage_size=stage) for i, (shard, stage) in numbered]
    once = {"micro_batch_size": 1, "accumulation_steps": 1}
    return Plan(world_size=world_size, strategy="osdp", units=tuple(units), model_fingerprint="x", **once)


def groups_formed(plan: Plan) -> int:
    """Groups of several ranks that this process is in once the plan's meshes are there."""
    Meshes("cpu").prepare(plan)
    return sum(group.size() > 1 for group in dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(("world_size", "layouts", "count"), [
    (2, ((1, 1), (2, 1)), 1), (8, ((8, 1),), 1), (8, ((1, 1), (8, 1)), 1), (8, ((1, 1), (2, 1), (8, 1)), 3),
    (8, ((2, 1), (4, 1)), 5), (8, ((8, 4),), 3), (8, ((8, 4), (4, 1)), 3), (8, ((4, 2),), 8),
    (16, ((16, 8), (16, 1), (8, 1), (2, 1)), 5), (16, ((8, 4), (8, 2), (1, 1)), 13),
])  # fmt: skip
def test_communicators_are_the_groups_that_meshes_form(world_size, layouts, count):
    plan = plan_of(world_size, layouts)
    with fake_process_group(world_size):
        formed = groups_formed(plan)
    assert plan.communicators == formed == count


def count_on_ranks() -> int:
    find_topology()  # forms a group of the host's, which no device knows
    host_groups = len(dist.distributed_c10d._world.pg_map) - 1
    return -host_groups + groups_formed(plan_of(4, ((1, 1), (2, 1), (4, 2), (4, 1))))


def test_communicators_are_the_groups_that_gloo_ranks_form():
    assert run_ranks(count_on_ranks, 4) == [3] * 4


def test_a_plan_of_a_preset_counts_its_own_communicators():
    hardware = preset("v100-16", nodes=2, devices_per_node=8)
    assert hardware.backend is Backend.NCCL
    counts = {"fsdp": 1, "ddp": 1, "zero2": 1, "hsdp": 3, "two_stage": 3}
    for row in compare_strategies(problem(MODEL, hardware, JOB, 15 * 2**30)):
        plan, memory = row.result.plan, row.result.memory
        count = counts.get(row.strategy.value, plan.communicators)
        outside = hardware.device.reserved_bytes + count * COMMUNICATOR_BYTES
        assert (memory.communicators, plan.peak_bytes) == (count, memory.peak_bytes + outside)
    fsdp, hsdp = (least_memory(problem(MODEL, hardware, JOB, strategy=name)) for name in ("fsdp", "hsdp"))
    assert hsdp - fsdp > 2 * COMMUNICATOR_BYTES
