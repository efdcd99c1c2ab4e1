"""Measurements of this machine: plausible alone, and the same on every rank together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_osdp.errors import HardwareError
from hf_osdp.measurement.links import links_of
from hf_osdp.measurement.machine import measure_hardware
from hf_osdp.planner.affine import linear_fit
from hf_osdp.planner.cost.collectives import collective_seconds, shard_ring
from hf_osdp.planner.description import DType
from hf_osdp.planner.hardware import Backend, Collective, CollectiveTiming, Link
from hf_osdp.planner.presets import preset
from tests.helpers.distributed import run_ranks


def test_measure_hardware_alone_is_plausible_and_leaves_the_random_state():
    state = torch.get_rng_state()
    hardware = measure_hardware(device_type="cpu", seconds=0.2)
    assert (hardware.world_size, hardware.backend, hardware.timings) == (1, Backend.GLOO, ())
    assert hardware.device.name.startswith("cpu (")
    assert 1e8 < hardware.device.rate(DType.FLOAT32) < 1e14
    assert 1e8 < hardware.device.memory_bytes_per_s < 1e13
    assert 2**20 < hardware.device.memory_bytes < 2**50
    assert torch.equal(torch.get_rng_state(), state)


def _measure_here():
    hardware = measure_hardware(device_type="cpu", seconds=0.1)
    sizes = {(t.collective, t.group_size, t.crosses_nodes) for t in hardware.timings}
    positive = all(t.latency_s >= 0 and t.seconds_per_byte > 0 for t in hardware.timings)
    return repr(hardware), hardware.devices_per_node, hardware.nodes, sizes, positive


def test_measure_hardware_is_equal_on_all_ranks():
    results = run_ranks(_measure_here, 2)
    text, devices_per_node, nodes, sizes, positive = results[0]
    assert results[1][0] == text
    assert (devices_per_node, nodes, positive) == (2, 1, True)
    flat = {Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE}
    assert sizes == {(collective, 2, False) for collective in flat}


@pytest.mark.slow
def test_four_ranks_measure_every_divisor_and_two_nodes():
    results = run_ranks(_measure_here, 4, nodes=2)
    text, devices_per_node, nodes, sizes, positive = results[0]
    assert all(result[0] == text for result in results)
    assert (devices_per_node, nodes, positive) == (2, 2, True)
    # pairs that gather and scatter lie inside a node, pairs that reduce replicas across
    pairs = {(Collective.ALL_GATHER, 2, False), (Collective.REDUCE_SCATTER, 2, False), (Collective.ALL_REDUCE, 2, True)}
    assert sizes == pairs | {(collective, 4, True) for collective in Collective}


def test_measure_hardware_raises_for_bad_requests():
    with pytest.raises(ValueError, match="device_type='tpu' is not known; use cpu or cuda"):
        measure_hardware(device_type="tpu")
    with pytest.raises(ValueError, match="group_sizes has 3, which does not divide the 1 processes"):
        measure_hardware(device_type="cpu", group_sizes=[3])
    if not torch.cuda.is_available():
        with pytest.raises(HardwareError, match="torch sees no CUDA device here"):
            measure_hardware(device_type="cuda")


def test_linear_fit_recovers_a_line():
    latency_s, seconds_per_byte = linear_fit([(n, 1e-4 + 2e-9 * n) for n in (1_000, 100_000, 10_000_000)])
    assert latency_s == pytest.approx(1e-4) and seconds_per_byte == pytest.approx(2e-9)


def test_linear_fit_stays_physical_under_noise():
    latency_s, seconds_per_byte = linear_fit([(1_000, 2e-3), (1_000_000, 1e-3)])
    assert latency_s == 0.0 and seconds_per_byte == pytest.approx(1e-9)


def test_links_give_back_the_gathers_that_were_measured():
    """Two nodes of four: a ring of four inside, one of eight of which two hops leave a node."""
    inside, across = Link(latency_s=1e-5, bytes_per_s=1e9, source=""), Link(latency_s=1e-3, bytes_per_s=1e8, source="")
    known = replace(preset("cpu", nodes=2, devices_per_node=4), intra_node=inside, inter_node=across)
    timings = []
    for size in (2, 4, 8):
        ring = shard_ring(known, size)
        latency_s = collective_seconds(known, Collective.ALL_GATHER, ring, 1)
        seconds_per_byte = collective_seconds(known, Collective.ALL_GATHER, ring, 10**9) / 10**9
        timings.append(
            CollectiveTiming(
                collective=Collective.ALL_GATHER, group_size=size, latency_s=latency_s, seconds_per_byte=seconds_per_byte,
                crosses_nodes=size == 8,
            )
        )  # fmt: skip
    found = links_of(known.device, timings, local=4, world=8)
    for link, original in zip(found, (inside, across), strict=True):
        assert link.latency_s == pytest.approx(original.latency_s, rel=1e-3)
        assert link.bytes_per_s == pytest.approx(original.bytes_per_s, rel=1e-3)
    alone = links_of(known.device, [replace(timings[2], crosses_nodes=False)], local=1, world=8)
    assert alone[0].assumed and not alone[1].assumed
