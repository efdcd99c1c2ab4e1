"""Links are measured in few groups, within a limit of time, and give back the collectives that were measured."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist

from hf_osdp.measurement import links
from hf_osdp.planner.cost.collectives import collective_seconds, shard_ring
from hf_osdp.planner.hardware import Backend, Collective, CollectiveTiming
from tests.helpers.fake_step import fake_process_group
from tests.helpers.hardware import toy_hardware

CPU = torch.device("cpu")
NODE = 8
CALLS = ("new_group", "barrier", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def counted(monkeypatch, world: int) -> tuple[Counter, int, set]:
    """Calls of torch.distributed, the most groups that this rank had at once, and what was timed; nothing is sent."""
    calls, held = Counter(), 0

    def called(name: str, stock, *args, **kwargs):
        nonlocal held
        calls[name] += 1
        result = stock(*args, **kwargs)
        held = max(held, len(dist.distributed_c10d._world.pg_map))
        return result

    for name in CALLS:
        monkeypatch.setattr(dist, name, partial(called, name, getattr(dist, name)))
    monkeypatch.setattr(links, "_SIZES_BYTES", {"cpu": (2**10, 2**12, 2**14, 2**16)})
    with fake_process_group(world):
        before = len(dist.distributed_c10d._world.pg_map)
        timings = links.measure_collectives(CPU, 1e-6, local=NODE)
        assert len(dist.distributed_c10d._world.pg_map) == before, "communicators are given back"
    return calls, held, {(t.collective, t.group_size, t.crosses_nodes) for t in timings}


@pytest.mark.parametrize(("world", "formed"), [(16, 2 + 8), (64, 8 + 8), (128, 16 + 8)])
def test_measure_collectives_forms_groups_of_node_and_place(monkeypatch, world, formed):
    calls, held, timed = counted(monkeypatch, world)
    assert calls["new_group"] == formed
    assert held <= 3
    gathers = {(c, NODE, False) for c in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)}
    everywhere = {(collective, world, True) for collective in Collective}
    assert timed == gathers | {(Collective.ALL_REDUCE, world // NODE, True)} | everywhere
    # Eight collectives of four sizes: twice to choose the sizes, three rounds, and what ranks agree on.
    assert sum(calls.values()) - calls["new_group"] < 500


@pytest.mark.parametrize(("nodes", "local"), [(16, NODE), (2, 4)])
def test_links_of_measured_gathers_predict_rings_of_every_size(nodes, local):
    known = toy_hardware(nodes, local, intra=(1e-5, 1e11), inter=(1e-3, 1e10), backend=Backend.GLOO)
    inside, across, world = known.intra_node, known.inter_node, nodes * local

    def timing_of(size: int) -> CollectiveTiming:
        ring = shard_ring(known, size)
        alone, most = (collective_seconds(known, Collective.ALL_GATHER, ring, nbytes) for nbytes in (1, 10**9))
        kind = {"collective": Collective.ALL_GATHER, "group_size": size, "crosses_nodes": ring.node_crossings > 0}
        return CollectiveTiming(**kind, latency_s=alone, seconds_per_byte=(most - alone) / 10**9)

    timings = [timing_of(size) for size in links.group_sizes(world, local)[0]]
    found = links.links_of(known.device, timings, local=local, world=world)
    for link, original in zip(found, (inside, across), strict=True):
        assert link.latency_s == pytest.approx(original.latency_s, rel=0.02)
        assert link.bytes_per_s == pytest.approx(original.bytes_per_s, rel=0.01)
        assert not link.assumed
    alone = links.links_of(known.device, [timing_of(world)], local=1, world=world)
    assert alone[0].assumed and not alone[1].assumed, "one rank in each node"
