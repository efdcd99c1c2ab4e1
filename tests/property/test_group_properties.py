"""Who communicates with whom, over any world: groups partition the ranks, and cross each other in one rank."""

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import strategies as st

from hf_osdp.distributed.mesh import NODES_AXIS, REPLICATE_AXIS, SHARD_AXIS, Meshes, mesh_axes, stage_axes, topology_of
from hf_osdp.errors import HardwareError
from hf_osdp.planner.cost.collectives import Ring, replicate_ring, shard_ring
from hf_osdp.planner.decision import UnitDecision
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import divisors
from tests.helpers.fake_step import fake_process_group
from tests.helpers.hardware import bare_preset
from tests.helpers.properties import holds

worlds = st.integers(1, 512)
Groups = list[list[int]]


def groups(axes: dict[str, int], axis: str) -> Groups:
    """The ranks of each group along an axis, as torch's meshes have them."""
    ranks = np.arange(np.prod(list(axes.values()))).reshape(list(axes.values()))
    return np.moveaxis(ranks, list(axes).index(axis), -1).reshape(-1, axes[axis]).tolist()


def assert_partition(found: Groups, world_size: int) -> None:
    assert sorted(rank for group in found for rank in group) == list(range(world_size))


def assert_cross_once(some: Groups, others: Groups) -> None:
    """Every group of the one kind has one rank in common with each group of the other that it meets."""
    place = {rank: index for index, group in enumerate(others) for rank in group}
    for group in some:
        assert len({place[rank] for rank in group}) == len(group)


@holds(worlds, few=60, many=1000)
def test_shard_and_replicate_groups_partition_the_ranks(world_size):
    for shard_size in divisors(world_size):
        axes = mesh_axes(world_size, shard_size)
        assert np.prod(list(axes.values())) == world_size and axes[SHARD_AXIS] == shard_size
        shards = groups(axes, SHARD_AXIS)
        assert_partition(shards, world_size)
        assert all(group == list(range(group[0], group[0] + shard_size)) for group in shards)
        if shard_size < world_size:
            replicas = groups(axes, REPLICATE_AXIS)
            assert_partition(replicas, world_size)
            assert_cross_once(shards, replicas)
            assert len(shards) * len(shards[0]) == len(replicas) * len(replicas[0]) == world_size
            place = {rank: group.index(rank) for group in shards for rank in group}
            assert all(len({place[rank] for rank in group}) == 1 for group in replicas), "replicas hold the same shard"


def stage_groups(world_size: int, shard_size: int, stage_size: int) -> tuple[Groups, Groups]:
    """Between nodes and inside, of the meshes that `Meshes.stages` takes them from."""
    nodes = mesh_axes(world_size, stage_size)
    between = groups(stage_axes(world_size, shard_size, stage_size), NODES_AXIS)
    if shard_size == world_size:
        assert sorted(between) == sorted(groups(nodes, REPLICATE_AXIS)), "the short cut gives the same groups"
    return between, groups(nodes, SHARD_AXIS)


@holds(worlds, few=15, many=1000)
def test_two_stages_reach_all_of_the_shard_group_once(world_size):
    for shard_size in divisors(world_size):
        shards = groups(mesh_axes(world_size, shard_size), SHARD_AXIS)
        for stage_size in divisors(shard_size)[1:-1]:
            between, within = stage_groups(world_size, shard_size, stage_size)
            assert len(between[0]) * len(within[0]) == shard_size
            assert_partition(between, world_size)
            assert_partition(within, world_size)
            assert_cross_once(between, within)
            across, inside = ({rank: group for group in found for rank in group} for found in (between, within))
            for group in shards:
                for place, rank in enumerate(group):
                    assert sorted(other for neighbour in inside[rank] for other in across[neighbour]) == group
                    assert place == across[rank].index(rank) * stage_size + inside[rank].index(rank)


def ring_of(found: Groups, per_node: int) -> Ring:
    """Hops that leave a node, of the worst group; groups that leave one node at once."""
    hops = [
        [(a // per_node, b // per_node) for a, b in zip(group, [*group[1:], group[0]], strict=True)] for group in found
    ]
    leaving = [[a for a, b in ring if a != b] for ring in hops]
    links = [node for ring in leaving for node in ring]
    return Ring(
        size=len(found[0]), node_crossings=max(map(len, leaving)), sharing=max(map(links.count, links), default=1)
    )


@holds(st.integers(1, 12), st.integers(1, 12), few=40, many=144)
def test_the_rings_that_cost_are_the_groups_that_run(nodes, per_node):
    hardware = bare_preset("a100-40", nodes=nodes, devices_per_node=per_node)
    for shard_size in divisors(hardware.world_size):
        axes = mesh_axes(hardware.world_size, shard_size)
        assert shard_ring(hardware, shard_size) == ring_of(groups(axes, SHARD_AXIS), per_node)
        if shard_size < hardware.world_size:
            assert replicate_ring(hardware, shard_size) == ring_of(groups(axes, REPLICATE_AXIS), per_node)
    if 1 < per_node < hardware.world_size:
        between, within = stage_groups(hardware.world_size, hardware.world_size, per_node)
        assert replicate_ring(hardware, per_node) == ring_of(between, per_node)
        assert shard_ring(hardware, per_node) == ring_of(within, per_node)


@holds(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), few=200, many=5000)
def test_a_topology_is_equal_nodes_in_order_or_an_error(names):
    counts = {name: names.count(name) for name in names}
    in_order = names == [name for name in dict.fromkeys(names) for _ in range(counts[name])]
    try:
        found = topology_of(names)
    except HardwareError:
        assert not in_order or len(set(counts.values())) > 1
    else:
        assert in_order and set(counts.values()) == {found.ranks_per_node} and found.nodes == len(counts)


@pytest.mark.parametrize(("world_size", "layouts", "count"), [
    (2, ((1, 1), (2, 1)), 2), (8, ((1, 1), (2, 1), (8, 1)), 4), (8, ((2, 1), (4, 1)), 5), (8, ((8, 4), (4, 1)), 3),
    (8, ((4, 2),), 8), (16, ((16, 8), (16, 1), (8, 1), (2, 1)), 5), (16, ((8, 4), (8, 2), (1, 1)), 13),
    (8, ((1, 1),), 1), (1, ((1, 1), (1, 1)), 0),
])  # fmt: skip
def test_communicators_of_a_plan_are_the_groups_that_its_meshes_form(world_size, layouts, count):
    units = tuple(
        UnitDecision(fqn=f"unit{i}", shard_size=shard, stage_size=stage, reshard_after_forward=True)
        for i, (shard, stage) in enumerate(layouts)
    )
    plan = Plan(
        world_size=world_size, strategy="osdp", units=units, model_fingerprint="x", micro_batch_size=1,
        accumulation_steps=1,
    )  # fmt: skip
    with fake_process_group(world_size):
        Meshes("cpu").prepare(plan)
        formed = sum(group.size() > 1 for group in dist.distributed_c10d._world.pg_map)
    assert plan.communicators == formed == count
