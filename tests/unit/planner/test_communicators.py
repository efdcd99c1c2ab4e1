"""The count of a plan's communicators is that of the groups that `Meshes.prepare` forms."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.planner.decision import UnitDecision
from hf_osdp.planner.plan import Plan
from tests.helpers.fake_step import fake_process_group


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
    (2, ((1, 1), (2, 1)), 2), (8, ((8, 1),), 1), (8, ((1, 1), (8, 1)), 2), (8, ((1, 1), (2, 1), (8, 1)), 4),
    (8, ((2, 1), (4, 1)), 5), (8, ((8, 4),), 3), (8, ((8, 4), (4, 1)), 3), (8, ((4, 2),), 8),
    (16, ((16, 8), (16, 1), (8, 1), (2, 1)), 5), (16, ((8, 4), (8, 2), (1, 1)), 13),
    (8, ((1, 1),), 1), (8, ((1, 1), (4, 1)), 3),
])  # fmt: skip
def test_communicators_are_the_groups_that_meshes_form(world_size, layouts, count):
    plan = plan_of(world_size, layouts)
    with fake_process_group(world_size):
        formed = groups_formed(plan)
    assert plan.communicators == formed == count
