"""Links are measured in few groups, within a limit of time, and give back the collectives that were measured."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_osdp.measurement import links, timing
from hf_osdp.planner.cost.collectives import collective_seconds, shard_ring
from hf_osdp.planner.hardware import Backend, Collective, CollectiveTiming
from hf_osdp.preparation.simulate import fake_process_group
from tests.helpers.hardware import toy_hardware

CPU = torch.device("cpu")
NODE = 8
CALLS = ("new_group", "barrier", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
FLAT = {Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE}


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
    monkeypatch.setattr(links, "cores_are_shared", lambda device: False)
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


def test_measure_collectives_takes_every_size_of_up_to_eight_ranks(monkeypatch):
    calls, _, timed = counted(monkeypatch, 8)
    assert timed == {(collective, size, False) for collective in FLAT for size in (2, 4, 8)}
    assert calls["new_group"] == 12


@pytest.mark.parametrize(
    ("world", "local", "every", "sizes"),
    [(16, 1, False, ([16], [16])), (16, 16, False, ([16], [16])), (16, 8, True, ([2, 4, 8, 16], [2, 4, 8, 16]))],
)
def test_group_sizes_holds_the_world_and_nothing_twice(world, local, every, sizes):
    assert links.group_sizes(world, local, every=every) == sizes


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


STANDARD = (2**16, 2**19, 2**21)


def emulated_measurement(monkeypatch, *, bytes_per_s, latency_s, seconds=0.7, shared_cores=False):
    """Seconds on a clock that collectives move, sizes of messages, and timings; four ranks on two nodes."""
    clock, sent = [0.0], []

    def timed(test: links._CollectiveTest, nbytes: int, device: torch.device) -> float:
        taken = latency_s + nbytes / bytes_per_s
        clock[0] += taken
        return taken

    def choose(test: links._CollectiveTest, device: torch.device, **limits: float) -> float:
        spent_s = stock(test, device, **limits)
        sent.append(set(test.taken))
        return spent_s

    stock = links._CollectiveTest.choose_sizes
    monkeypatch.setattr(links._CollectiveTest, "timed", timed)
    monkeypatch.setattr(links._CollectiveTest, "choose_sizes", choose)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(links, "cores_are_shared", lambda device: shared_cores)
    with fake_process_group(4):
        found = links.measure_collectives(CPU, seconds, local=2)
    return clock[0], sent, found


@pytest.mark.parametrize("latency_s", [1e-4, 0.05])
@pytest.mark.parametrize("bytes_per_s", [1e5, 1e6, 1e7])
def test_measure_collectives_ends_within_a_limit_on_a_slow_network(monkeypatch, bytes_per_s, latency_s):
    taken_s, sent, found = emulated_measurement(monkeypatch, bytes_per_s=bytes_per_s, latency_s=latency_s)
    assert taken_s < 10.5
    assert all(len(sizes) >= 2 for sizes in sent)
    for one in found:
        assert (one.seconds_per_byte, one.latency_s) == pytest.approx((1 / bytes_per_s, latency_s), rel=0.01)


@pytest.mark.parametrize("network", [{"bytes_per_s": 1e9}, {"bytes_per_s": 1e6, "seconds": 60.0}])
def test_measure_collectives_sends_large_messages_where_time_suffices(monkeypatch, network):
    _, sent, _ = emulated_measurement(monkeypatch, latency_s=1e-4, **network)
    assert all(sizes >= set(STANDARD) for sizes in sent)
    assert "seconds" in network or all(min(sizes) == STANDARD[0] for sizes in sent)


def test_measure_collectives_adds_wait_where_ranks_share_cores(monkeypatch):
    monkeypatch.setattr(links, "_wait_seconds", lambda device: 0.25)
    _, _, found = emulated_measurement(monkeypatch, bytes_per_s=1e9, latency_s=1e-4, shared_cores=True)
    assert found
    assert all(one.latency_s == pytest.approx(0.2501, rel=0.01) for one in found)


def test_wait_seconds_is_what_call_after_work_adds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(links.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(links, "call_seconds", lambda *_, **__: [links._WORK_S])  # one product is all the work
    waiting = []

    def spend(seconds, waits=False):
        clock[0] += seconds + (0.5 if waits and waiting else 0.0)
        waiting[:] = [] if waits else [True]

    monkeypatch.setattr(links.torch, "mm", lambda *_, **__: spend(0.02))
    monkeypatch.setattr(links.dist, "all_reduce", lambda *_, **__: spend(0.003, waits=True))
    monkeypatch.setattr(links, "barrier", lambda device: waiting.clear())
    assert links._wait_seconds(CPU) == pytest.approx(0.5)


def test_work_clock_counts_all_ranks_where_they_share_cores(monkeypatch):
    monkeypatch.setattr(timing, "cores_are_shared", lambda device: True)
    monkeypatch.setattr(timing, "usable_cores", lambda: 2)
    monkeypatch.setattr(timing, "find_topology", lambda: SimpleNamespace(ranks_per_node=6))
    monkeypatch.setattr(timing.time, "process_time", lambda: 1.5)
    assert timing.work_clock(CPU)() == 4.5
    monkeypatch.setattr(timing, "cores_are_shared", lambda device: False)
    assert timing.work_clock(CPU) is timing.time.perf_counter
