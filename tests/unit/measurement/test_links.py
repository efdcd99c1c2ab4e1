"""How many groups and collectives it takes to measure links; ranks are emulated, nothing is sent."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from hf_osdp.measurement import links, machine, timing
from hf_osdp.planner.cost.collectives import collective_seconds, replicate_ring, shard_ring
from hf_osdp.planner.hardware import Collective, CollectiveTiming, Hardware, Link
from hf_osdp.planner.presets import preset
from hf_osdp.planning.simulate import fake_process_group

NODE = 8
CALLS = ("new_group", "barrier", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def counted(monkeypatch, world: int) -> tuple[Counter, int, set]:
    """Calls of torch.distributed, the most groups that this rank had at once, and what was timed."""
    calls, held = Counter(), 0

    def count(name: str):
        stock = getattr(dist, name)

        def called(*args, **kwargs):
            nonlocal held
            calls[name] += 1
            result = stock(*args, **kwargs)
            held = max(held, len(dist.distributed_c10d._world.pg_map))
            return result

        monkeypatch.setattr(dist, name, called)

    for name in CALLS:
        count(name)
    monkeypatch.setattr(links, "_SIZES_BYTES", {"cpu": (2**10, 2**12, 2**14, 2**16)})
    with fake_process_group(world):
        before = len(dist.distributed_c10d._world.pg_map)
        sizes = machine._group_sizes(world, NODE, None)
        timings = links.measure_collectives(torch.device("cpu"), sizes, 1e-6, local_world_size=NODE)
        assert len(dist.distributed_c10d._world.pg_map) == before, "communicators are given back"
    return calls, held, {(t.collective, t.group_size, t.crosses_nodes) for t in timings}


@pytest.mark.parametrize(("world", "formed"), [(16, 2 + 8), (64, 8 + 8), (128, 16 + 8)])
def test_several_nodes_are_measured_in_two_groups_beside_the_world(monkeypatch, world, formed):
    calls, held, timed = counted(monkeypatch, world)
    assert calls["new_group"] == formed
    assert held <= 3
    gathers = {(c, NODE, False) for c in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)}
    assert timed == gathers | {(Collective.ALL_REDUCE, world // NODE, True)} | {(collective, world, True) for collective in Collective}
    # Eight collectives of four sizes: twice to choose the sizes, three rounds, and what ranks agree on.
    assert sum(calls.values()) - calls["new_group"] < 500


def test_up_to_eight_ranks_every_size_is_measured(monkeypatch):
    calls, _, timed = counted(monkeypatch, 8)
    flat = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
    assert timed == {(collective, size, False) for collective in flat for size in (2, 4, 8)}
    assert calls["new_group"] == 12


def test_one_rank_in_each_node_needs_the_world_alone():
    assert links.few_sizes(16, 1) == links.GroupSizes(shards=(16,), replicas=(16,))
    assert links.few_sizes(16, 16) == links.GroupSizes(shards=(16,), replicas=(16,))


def timing_of(known: Hardware, collective: Collective, size: int) -> CollectiveTiming:
    ring = replicate_ring(known, known.world_size // size) if collective is Collective.ALL_REDUCE else shard_ring(known, size)
    alone, most = (collective_seconds(known, collective, ring, nbytes) for nbytes in (1, 10**9))
    return CollectiveTiming(
        collective=collective, group_size=size, latency_s=alone, seconds_per_byte=(most - alone) / 10**9,
        crosses_nodes=ring.node_crossings > 0,
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 4, 16, 32, 64])
def test_sizes_that_are_not_measured_follow_from_the_links(size):
    """Rings on known links: what is measured in few groups gives the others back."""
    known = Hardware(
        device=preset("cpu", devices_per_node=1).device, nodes=16, devices_per_node=NODE, backend=preset("cpu").backend,
        intra_node=Link(latency_s=1e-5, bytes_per_s=4e11, source=""), inter_node=Link(latency_s=2e-5, bytes_per_s=2e11, source=""),
    )  # fmt: skip
    sizes = links.few_sizes(128, NODE)
    timings = [timing_of(known, Collective.ALL_GATHER, shard) for shard in sizes.shards]
    inside, across = links.links_of(known.device, timings, local=NODE, world=128)
    found = Hardware(
        device=known.device, nodes=16, devices_per_node=NODE, backend=known.backend, intra_node=inside, inter_node=across,
        timings=tuple(timings),
    )  # fmt: skip
    for nbytes in (2**20, 2**28):
        ring = shard_ring(known, size)
        expected = collective_seconds(known, Collective.ALL_GATHER, ring, nbytes)
        assert collective_seconds(found, Collective.ALL_GATHER, ring, nbytes) == pytest.approx(expected, rel=0.01)


STANDARD = (2**16, 2**19, 2**21)


def emulated_measurement(monkeypatch, *, bytes_per_s: float, latency_s: float, seconds: float = 0.7) -> tuple[float, list[set[int]], tuple]:
    """Seconds on a clock that only calls of collectives move, sizes of messages of each, and the timings; four ranks on two nodes."""
    clock, sent = [0.0], []

    def timed(test: links._Test, nbytes: int, device: torch.device) -> float:
        taken = latency_s + nbytes / bytes_per_s
        clock[0] += taken
        return taken

    def choose(test: links._Test, device: torch.device, **limits: float) -> float:
        spent_s = stock(test, device, **limits)
        sent.append(set(test.taken))
        return spent_s

    stock = links._Test.choose_sizes
    monkeypatch.setattr(links._Test, "timed", timed)
    monkeypatch.setattr(links._Test, "choose_sizes", choose)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    with fake_process_group(4):
        found = links.measure_collectives(torch.device("cpu"), links.few_sizes(4, 2), seconds, local_world_size=2)
    return clock[0], sent, found


@pytest.mark.parametrize("latency_s", [1e-4, 0.05])
@pytest.mark.parametrize("bytes_per_s", [1e5, 1e6, 1e7])
def test_links_are_measured_within_a_limit_on_a_slow_network(monkeypatch, bytes_per_s, latency_s):
    taken_s, sent, found = emulated_measurement(monkeypatch, bytes_per_s=bytes_per_s, latency_s=latency_s)
    assert taken_s < 10.5
    assert all(len(sizes) >= 2 for sizes in sent)
    for timing_found in found:
        assert timing_found.seconds_per_byte == pytest.approx(1 / bytes_per_s, rel=0.01)
        assert timing_found.latency_s == pytest.approx(latency_s, rel=0.01)


def test_links_are_measured_with_large_messages_on_a_fast_network(monkeypatch):
    _, sent, _ = emulated_measurement(monkeypatch, bytes_per_s=1e9, latency_s=1e-4)
    assert all(sizes >= set(STANDARD) and min(sizes) == STANDARD[0] for sizes in sent)


def test_links_are_measured_for_longer_where_more_time_is_given(monkeypatch):
    _, sent, _ = emulated_measurement(monkeypatch, bytes_per_s=1e6, latency_s=1e-4, seconds=60.0)
    assert all(sizes >= set(STANDARD) for sizes in sent)
