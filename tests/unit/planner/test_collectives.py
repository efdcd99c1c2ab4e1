"""Ring α-β model, and measured timings before it; `tests/property/test_group_properties.py` has any world's rings."""

from dataclasses import replace

import pytest

from hf_osdp.planner.cost.collectives import collective_seconds, replicate_ring, shard_ring, sharded_seconds
from hf_osdp.planner.hardware import Backend, Collective, CollectiveTiming, Hardware
from tests.helpers.hardware import toy_hardware

INSIDE, OUTSIDE = 1e-6, 1e-4
"""α of the two links; β is 1e-9 inside a node (1 GB/s), 1e-8 outside."""
N = 8_000_000
GATHER, SCATTER, REDUCE = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE


def machine(nodes: int = 1, devices_per_node: int = 4, *, inside_bytes_per_s: float = 1e9, **more) -> Hardware:
    return toy_hardware(nodes, devices_per_node, intra=(INSIDE, inside_bytes_per_s), inter=(OUTSIDE, 1e8), **more)


TWO, THREE_PAIRS = machine(nodes=2), machine(nodes=3, devices_per_node=2)
ONE_LAP = 3 * INSIDE + 3 / 4 * N * 1e-9
SLOW_INSIDE = machine(nodes=2, inside_bytes_per_s=1e7)
LAPS = {
    "all-gather": (machine(), GATHER, shard_ring, 4, N, ONE_LAP),
    "reduce-scatter": (machine(), SCATTER, shard_ring, 4, N, ONE_LAP),
    "all-reduce is two laps": (machine(), REDUCE, replicate_ring, 1, N, 2 * ONE_LAP),
    "a group over two nodes": (TWO, GATHER, shard_ring, 8, N, 5 * INSIDE + 2 * OUTSIDE + 7 / 8 * N * 1e-8),
    "where the inner link is slower": (SLOW_INSIDE, GATHER, shard_ring, 8, N,
        5 * INSIDE + 2 * OUTSIDE + 7 / 8 * N * 1e-7),
    # groups 0-2 and 3-5: both pass through the middle node
    "groups that straddle nodes share the link": (THREE_PAIRS, GATHER, shard_ring, 3, N,
        2 * OUTSIDE + 2 / 3 * N * 2e-8),
    # rank 0 with rank 4, and three more pairs over the same link
    "replicas of a shard share it": (TWO, REDUCE, replicate_ring, 4, N // 4, 2 * (OUTSIDE + 1 / 2 * (N // 4) * 4e-8)),
    "alone": (machine(), GATHER, shard_ring, 1, N, 0.0), "nothing to send": (machine(), REDUCE, shard_ring, 4, 0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize(("hardware", "collective", "ring", "size", "nbytes", "wanted_s"), LAPS.values(), ids=LAPS)
def test_collective_seconds_are_laps_of_the_ring(hardware, collective, ring, size, nbytes, wanted_s):
    assert collective_seconds(hardware, collective, ring(hardware, size), nbytes) == pytest.approx(wanted_s)


@pytest.mark.parametrize("collective", [GATHER, SCATTER])
def test_two_stages_are_two_rings(collective):
    """3 nodes of 4: N/4 bytes among 3 ranks, whose node's link 4 of them share, then N bytes among 4 ranks."""
    hardware = machine(nodes=3)
    between, within = 2 * OUTSIDE + 2 / 3 * (N / 4) * 4e-8, ONE_LAP
    assert sharded_seconds(hardware, collective, 12, 4, N) == pytest.approx(between + within)
    flat_s = 8 * INSIDE + 3 * OUTSIDE + 11 / 12 * N * 1e-8
    assert sharded_seconds(hardware, collective, 12, 1, N) == pytest.approx(flat_s)
    assert sharded_seconds(hardware, collective, 12, 4, 0) == 0.0


def measured(collective, group_size, latency_s, *, crosses_nodes=False) -> CollectiveTiming:
    known = {"collective": collective, "group_size": group_size, "crosses_nodes": crosses_nodes}
    return CollectiveTiming(**known, latency_s=latency_s, seconds_per_byte=1e-6)


@pytest.mark.parametrize("backend", Backend)
def test_measured_timing_precedes_formula_for_its_collective_and_size(backend):
    hardware = machine(backend=backend, timings=(measured(GATHER, 4, 0.5),))
    asked = [(GATHER, 4), (GATHER, 2), (SCATTER, 4)]
    found = [collective_seconds(hardware, kind, shard_ring(hardware, size), N) for kind, size in asked]
    formula = [collective_seconds(machine(), kind, shard_ring(hardware, size), N) for kind, size in asked]
    assert found == [pytest.approx(0.5 + N * 1e-6), *formula[1:]]


def test_measured_timing_holds_where_its_group_lies():
    """Two nodes of 2: pairs that gather lie inside a node, pairs that reduce replicas across; both have 2 ranks."""
    plain = machine(nodes=2, devices_per_node=2)
    inside, across = measured(REDUCE, 2, 1.0), measured(REDUCE, 2, 2.0, crosses_nodes=True)

    def seconds(*timings: CollectiveTiming) -> list[float]:
        hardware = replace(plain, timings=timings)
        return [collective_seconds(hardware, REDUCE, ring(hardware, 2), N) for ring in (shard_ring, replicate_ring)]

    assert seconds(inside, across) == pytest.approx([1.0 + N * 1e-6, 2.0 + N * 1e-6])
    assert seconds(inside) == [pytest.approx(1.0 + N * 1e-6), seconds()[1]]


def test_measured_two_stages_go_before_the_formula():
    hardware = replace(TWO, timings=(measured(Collective.TWO_STAGE_REDUCE_SCATTER, 8, 0.5, crosses_nodes=True),))
    assert sharded_seconds(hardware, SCATTER, 8, 4, N) == pytest.approx(0.5 + N * 1e-6)
    assert sharded_seconds(hardware, GATHER, 8, 4, N) == sharded_seconds(TWO, GATHER, 8, 4, N)
