"""Ring α-β model: each collective, each kind of group, and measured timings before the formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.planner.cost.collectives import Ring, collective_seconds, gather_seconds, reduce_scatter_seconds, replicate_ring, shard_ring
from hf_osdp.planner.description import DType
from hf_osdp.planner.hardware import Backend, Collective, CollectiveTiming, DeviceSpec, Hardware, Link
from hf_osdp.planner.search.strategies import divisors

INSIDE, OUTSIDE = 1e-6, 1e-4
"""α of the two links; β is 1e-9 inside a node (1 GB/s), 1e-8 outside."""
N = 8_000_000


def machine(nodes: int = 1, devices_per_node: int = 4, backend: Backend = Backend.NCCL) -> Hardware:
    return Hardware(
        device=DeviceSpec(name="toy", memory_bytes=10**9, flops_per_s={DType.FLOAT32: 1e12}, memory_bytes_per_s=1e12, source="made up"),
        nodes=nodes,
        devices_per_node=devices_per_node,
        intra_node=Link(latency_s=INSIDE, bytes_per_s=1e9, source="made up"),
        inter_node=Link(latency_s=OUTSIDE, bytes_per_s=1e8, source="made up"),
        backend=backend,
    )


@pytest.mark.parametrize("collective", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
def test_all_gather_and_reduce_scatter_are_one_lap(collective):
    hardware = machine()
    assert collective_seconds(hardware, collective, shard_ring(hardware, 4), N) == pytest.approx(3 * INSIDE + 3 / 4 * N * 1e-9)
    assert collective_seconds(hardware, collective, shard_ring(hardware, 2), N) == pytest.approx(1 * INSIDE + 1 / 2 * N * 1e-9)


def test_all_reduce_is_two_laps():
    hardware = machine()
    seconds = collective_seconds(hardware, Collective.ALL_REDUCE, replicate_ring(hardware, 1), N)
    assert seconds == pytest.approx(2 * 3 * INSIDE + 2 * 3 / 4 * N * 1e-9)


@pytest.mark.parametrize("backend", Backend)
def test_a_reduce_scatter_costs_half_an_all_reduce(backend):
    hardware = machine(backend=backend)
    ring = shard_ring(hardware, 4)
    scatter = collective_seconds(hardware, Collective.REDUCE_SCATTER, ring, N)
    assert 2 * scatter == pytest.approx(collective_seconds(hardware, Collective.ALL_REDUCE, ring, N))


@pytest.mark.parametrize("seconds", [gather_seconds, reduce_scatter_seconds])
def test_two_stages_are_two_rings(seconds):
    """3 nodes of 4: N/4 bytes among 3 ranks, whose node's link 4 of them share, then N bytes among 4 ranks."""
    hardware = machine(nodes=3)
    between = 2 * OUTSIDE + 2 / 3 * (N / 4) * 4e-8
    within = 3 * INSIDE + 3 / 4 * N * 1e-9
    assert seconds(hardware, 12, 4, N) == pytest.approx(between + within)
    assert seconds(hardware, 12, 1, N) == pytest.approx(8 * INSIDE + 3 * OUTSIDE + 11 / 12 * N * 1e-8)
    assert seconds(hardware, 12, 4, 0) == 0.0


def test_two_stages_as_they_were_measured():
    kind = Collective.TWO_STAGE_REDUCE_SCATTER
    measured = CollectiveTiming(collective=kind, group_size=8, latency_s=0.5, seconds_per_byte=1e-6, crosses_nodes=True)
    hardware = replace(machine(nodes=2), timings=(measured,))
    assert reduce_scatter_seconds(hardware, 8, 4, N) == pytest.approx(0.5 + N * 1e-6)
    assert gather_seconds(hardware, 8, 4, N) == gather_seconds(machine(nodes=2), 8, 4, N)


@pytest.mark.parametrize("collective", Collective)
def test_nothing_is_sent_alone_or_for_nothing(collective):
    hardware = machine()
    assert collective_seconds(hardware, collective, shard_ring(hardware, 1), N) == 0
    assert collective_seconds(hardware, collective, shard_ring(hardware, 4), 0) == 0


def test_measured_timing_goes_before_the_formula():
    measured = CollectiveTiming(collective=Collective.ALL_GATHER, group_size=4, latency_s=0.5, seconds_per_byte=1e-6)
    hardware = replace(machine(), timings=(measured,))
    assert collective_seconds(hardware, Collective.ALL_GATHER, shard_ring(hardware, 4), N) == pytest.approx(0.5 + N * 1e-6)
    for collective, size in ((Collective.ALL_GATHER, 2), (Collective.REDUCE_SCATTER, 4)):
        plain = collective_seconds(machine(), collective, shard_ring(machine(), size), N)
        assert collective_seconds(hardware, collective, shard_ring(hardware, size), N) == plain


def test_measured_timing_holds_where_its_group_lies():
    """Two nodes of 2: pairs that gather lie inside a node, pairs that reduce replicas across; both have 2 ranks."""

    def pair(latency_s: float, crosses: bool) -> CollectiveTiming:
        return CollectiveTiming(
            collective=Collective.ALL_REDUCE, group_size=2, latency_s=latency_s, seconds_per_byte=0.0, crosses_nodes=crosses
        )

    hardware = replace(machine(nodes=2, devices_per_node=2), timings=(pair(1.0, False), pair(2.0, True)))
    assert collective_seconds(hardware, Collective.ALL_REDUCE, shard_ring(hardware, 2), N) == 1.0
    assert collective_seconds(hardware, Collective.ALL_REDUCE, replicate_ring(hardware, 2), N) == 2.0
    inside_only = replace(hardware, timings=(pair(1.0, False),))
    plain = collective_seconds(machine(nodes=2, devices_per_node=2), Collective.ALL_REDUCE, replicate_ring(hardware, 2), N)
    assert collective_seconds(inside_only, Collective.ALL_REDUCE, replicate_ring(hardware, 2), N) == plain


def test_measured_gloo_reduce_scatter_is_not_doubled():
    measured = CollectiveTiming(collective=Collective.REDUCE_SCATTER, group_size=4, latency_s=0.0, seconds_per_byte=1e-6)
    hardware = replace(machine(backend=Backend.GLOO), timings=(measured,))
    assert collective_seconds(hardware, Collective.REDUCE_SCATTER, shard_ring(hardware, 4), N) == pytest.approx(N * 1e-6)


def test_shard_group_inside_a_node_never_leaves_it():
    hardware = machine(nodes=2, devices_per_node=4)
    assert shard_ring(hardware, 2) == Ring(size=2, node_crossings=0, sharing=1)
    assert shard_ring(hardware, 4) == Ring(size=4, node_crossings=0, sharing=1)
    seconds = collective_seconds(hardware, Collective.ALL_GATHER, shard_ring(hardware, 4), N)
    assert seconds == pytest.approx(3 * INSIDE + 3 / 4 * N * 1e-9)


def test_shard_group_over_two_nodes_goes_at_the_outer_link():
    hardware = machine(nodes=2, devices_per_node=4)
    assert shard_ring(hardware, 8) == Ring(size=8, node_crossings=2, sharing=1)
    seconds = collective_seconds(hardware, Collective.ALL_GATHER, shard_ring(hardware, 8), N)
    assert seconds == pytest.approx(5 * INSIDE + 2 * OUTSIDE + 7 / 8 * N * 1e-8)


def test_shard_group_that_straddles_nodes_shares_the_outer_link():
    hardware = machine(nodes=3, devices_per_node=2)  # groups 0-2 and 3-5: both pass through the middle node
    ring = shard_ring(hardware, 3)
    assert (ring.size, ring.sharing) == (3, 2)
    seconds = collective_seconds(hardware, Collective.ALL_GATHER, ring, N)
    assert seconds == pytest.approx(2 * OUTSIDE + 2 / 3 * N * 2e-8)


def test_replicas_of_one_shard_share_the_outer_link_with_the_other_shards_of_the_node():
    hardware = machine(nodes=2, devices_per_node=4)
    ring = replicate_ring(hardware, 4)  # rank 0 with rank 4, and three more pairs over the same link
    assert ring == Ring(size=2, node_crossings=2, sharing=4)
    seconds = collective_seconds(hardware, Collective.ALL_REDUCE, ring, N // 4)
    assert seconds == pytest.approx(2 * (OUTSIDE + 1 / 2 * (N // 4) * 4e-8))


def test_replicas_of_everything_cross_each_node_once():
    hardware = machine(nodes=2, devices_per_node=4)
    assert replicate_ring(hardware, 1) == Ring(size=8, node_crossings=2, sharing=1)
    assert replicate_ring(hardware, 8).size == 1


def hops_out(groups: list[range], devices_per_node: int) -> list[list[int]]:
    """For each group, the nodes that its ring leaves."""
    return [
        [
            a // devices_per_node
            for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
            if a // devices_per_node != b // devices_per_node
        ]
        for ranks in groups
    ]


@pytest.mark.parametrize("nodes", [1, 2, 3, 6])
@pytest.mark.parametrize("devices_per_node", [1, 2, 3, 4, 8])
def test_rings_cross_and_share_links_as_their_ranks_lie(nodes, devices_per_node):
    hardware = machine(nodes, devices_per_node)
    world = hardware.world_size
    for size in divisors(world):
        shards = [range(start, start + size) for start in range(0, world, size)]
        replicas = [range(start, world, size) for start in range(size)]
        for ring, groups in ((shard_ring(hardware, size), shards), (replicate_ring(hardware, size), replicas)):
            out = hops_out(groups, devices_per_node)
            busiest = max((sum(node in left for left in out) for node in range(nodes)), default=0)
            assert ring == Ring(size=len(groups[0]), node_crossings=max(map(len, out)), sharing=max(1, busiest))


def test_only_the_groups_that_leave_a_node_share_its_link():
    """Pairs of 6 devices in 2 nodes: one of the three pairs lies across, and has the link to itself."""
    assert shard_ring(machine(nodes=2, devices_per_node=3), 2) == Ring(size=2, node_crossings=2, sharing=1)


def test_slower_inner_link_decides_where_it_is_slower():
    hardware = replace(machine(nodes=2), intra_node=Link(latency_s=INSIDE, bytes_per_s=1e7, source="made up"))
    seconds = collective_seconds(hardware, Collective.ALL_GATHER, shard_ring(hardware, 8), N)
    assert seconds == pytest.approx(5 * INSIDE + 2 * OUTSIDE + 7 / 8 * N * 1e-7)
