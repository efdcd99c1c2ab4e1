"""Presets have sources, scaling drops what was measured, impossible figures are refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.description import DType
from hf_osdp.planner.hardware import CACHING_MARGIN, Backend, Collective, CollectiveTiming, DeviceSpec, FsdpOverhead, Link, WorkTime
from hf_osdp.planner.job import OptimizerStep
from hf_osdp.planner.presets import COMMUNICATOR_BYTES, CONTEXT_BYTES, preset, preset_names

MEASURED = CollectiveTiming(collective=Collective.ALL_GATHER, group_size=2, latency_s=1.0, seconds_per_byte=0.0)


@pytest.mark.parametrize("name", preset_names())
def test_every_figure_of_a_preset_has_a_source(name):
    hardware = preset(name, nodes=2, devices_per_node=4)
    for part in (hardware.device, hardware.intra_node, hardware.inter_node):
        assert len(part.source) > 20
    assert DType.FLOAT32 in hardware.device.flops_per_s
    assert hardware.world_size == 8


@pytest.mark.parametrize("name", preset_names())
def test_links_between_nodes_are_those_of_a_whole_node(name):
    hardware = preset(name)
    if hardware.backend is Backend.NCCL:
        assert hardware.inter_node.latency_s > hardware.intra_node.latency_s
        assert hardware.inter_node.bytes_per_s < hardware.intra_node.bytes_per_s


def test_presets_are_those_that_were_promised():
    names = "v100-16 v100-32 v100-pcie-16 v100-pcie-32 titan-rtx rtx-3090 rtx-4090 a100-40 a100-80 h100 h200 cpu"
    assert preset_names() == tuple(names.split())
    assert preset("A100_80").device.memory_bytes == 80 * 2**30
    assert preset("cpu").backend is Backend.GLOO


@pytest.mark.parametrize(
    ("name", "inside_gb_per_s", "between_gbit_per_s"),
    [("a100-40", 300, 400), ("v100-pcie-16", 15.75, 25), ("v100-16", 150, 25), ("titan-rtx", 15.75, 10), ("rtx-4090", 31.5, 10)],
)
def test_links_of_common_clusters(name, inside_gb_per_s, between_gbit_per_s):
    hardware = preset(name, nodes=2, devices_per_node=8)
    assert hardware.intra_node.bytes_per_s == inside_gb_per_s * 1e9
    assert hardware.inter_node.bytes_per_s * 8 == between_gbit_per_s * 1e9


def test_unknown_preset_lists_the_names():
    with pytest.raises(HardwareError) as caught:
        preset("b9000")
    message = str(caught.value)
    assert "'b9000'" in message
    assert all(name in message for name in preset_names())
    assert "\n" not in message


def test_scaled_changes_the_counts_and_drops_what_was_measured():
    hardware = replace(preset("a100-40", nodes=2, devices_per_node=4), timings=(MEASURED,))
    grown = hardware.scaled(nodes=3)
    assert (grown.nodes, grown.devices_per_node, grown.timings) == (3, 4, ())
    assert grown.device == hardware.device
    assert hardware.scaled(devices_per_node=8).world_size == 16
    assert hardware.timing(Collective.ALL_GATHER, 2) is MEASURED
    assert hardware.timing(Collective.ALL_GATHER, 4) is None
    assert hardware.timing(Collective.ALL_REDUCE, 2) is None


def test_timings_inside_and_across_nodes_are_told_apart():
    across = replace(MEASURED, crosses_nodes=True)
    hardware = replace(preset("cpu", devices_per_node=2), timings=(MEASURED, across))
    assert hardware.timing(Collective.ALL_GATHER, 2) is MEASURED
    assert hardware.timing(Collective.ALL_GATHER, 2, crosses_nodes=True) is across


def test_handling_has_a_time_for_each_kind_of_step():
    work = WorkTime(call_s=1.0, tensor_s=0.5, seconds_per_byte=0.25)
    assert (work(0, 0), work(2, 8)) == (0.0, 4.0)
    with pytest.raises(ValueError, match="finite and at least 0"):
        WorkTime(call_s=-1.0)
    with pytest.raises(ValueError, match="optimizer step 'fused' is missing"):
        FsdpOverhead(gather=work, reduce=work, updates={OptimizerStep.FOREACH: work, OptimizerStep.FOR_LOOP: work})


@pytest.mark.parametrize("wrong", [{"group_size": 1}, {"latency_s": -1.0}, {"seconds_per_byte": float("nan")}])
def test_timings_are_checked(wrong):
    with pytest.raises(ValueError, match="A timing needs"):
        replace(MEASURED, **wrong)


def test_summary_names_nodes_devices_and_backend():
    assert preset("a100-40", nodes=2, devices_per_node=8).summary == "2 nodes x 8 x A100-40 (nccl)"
    assert preset("cpu", devices_per_node=2).summary == "2 x CPU (gloo)"


@pytest.mark.parametrize(("nodes", "devices"), [(0, 1), (1, 0), (-1, 4)])
def test_no_machine_has_less_than_one_device(nodes, devices):
    with pytest.raises(ValueError, match="must be at least 1"):
        preset("cpu", nodes=nodes, devices_per_node=devices)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(-1e-6, 1.0), (0.0, 0.0), (0.0, -1.0)])
def test_impossible_links_are_refused(latency_s, bytes_per_s):
    with pytest.raises(ValueError, match="A link needs"):
        Link(latency_s=latency_s, bytes_per_s=bytes_per_s, source="made up")


@pytest.mark.parametrize("change", [{"memory_bytes": 0}, {"memory_bytes_per_s": 0.0}, {"flops_per_s": {DType.FLOAT32: 0.0}}])
def test_impossible_devices_are_refused(change):
    values = {"name": "toy", "memory_bytes": 1, "flops_per_s": {DType.FLOAT32: 1.0}, "memory_bytes_per_s": 1.0, "source": "made up"}
    with pytest.raises(ValueError, match="Device 'toy'"):
        DeviceSpec(**{**values, **change})


def test_rates_cannot_be_changed():
    rates = {DType.FLOAT32: 1.0}
    device = DeviceSpec(name="toy", memory_bytes=1, flops_per_s=rates, memory_bytes_per_s=1.0, source="made up")
    rates[DType.FLOAT32] = 2.0
    assert device.rate(DType.FLOAT32) == 1.0
    with pytest.raises(TypeError):
        device.flops_per_s[DType.FLOAT32] = 3.0


def test_what_cuda_devices_reserve_has_the_context_and_the_communicators():
    for name in preset_names():
        alone, node = preset(name), preset(name, devices_per_node=8)
        if alone.backend is Backend.GLOO:
            assert (alone.unavoidable_bytes, node.outside_bytes(3)) == (0, 0)
            continue
        assert CONTEXT_BYTES < alone.unavoidable_bytes == node.device.reserved_bytes < 2 * 2**30
        assert node.unavoidable_bytes == alone.unavoidable_bytes + COMMUNICATOR_BYTES
        assert node.outside_bytes(3) == alone.unavoidable_bytes + 3 * COMMUNICATOR_BYTES


@pytest.mark.parametrize(("margin", "share"), [(None, CACHING_MARGIN), (0.0, 0.0), (0.25, 0.25)])
def test_margin_is_what_a_plan_may_not_fill(margin, share):
    hardware = preset("h100").with_margin(margin)
    assert hardware.free_share == share and preset("cpu").free_share == 0.0
    assert hardware.room_bytes(1000) == round(1000 * (1 - share))
    for needed in (1, 7, 96, 10**9 + 1, 2**59):
        limit = hardware.limit_for(needed)
        assert hardware.room_bytes(limit) >= needed > hardware.room_bytes(limit - 1)


@pytest.mark.parametrize("margin", [-0.01, 1, 1.5, float("nan"), float("inf"), "4 %", True])
def test_a_margin_that_is_no_share_is_refused_in_one_line(margin):
    message = f"margin={margin!r} must be the share of the limit that stays free, at least 0 and below 1, such as 0.04."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        preset("h100").with_margin(margin)


LINK = Link(latency_s=0.0, bytes_per_s=1e9, source="stands in for a link that is not there")


def test_a_size_whose_link_was_never_measured_is_refused():
    alone = replace(preset("a100-40"), intra_node=replace(LINK, assumed=True), inter_node=replace(LINK, assumed=True))
    with pytest.raises(HardwareError, match="link between devices of a node is not known: 1 x A100-40"):
        alone.scaled(devices_per_node=2)
    with pytest.raises(HardwareError, match="link between nodes is not known"):
        alone.scaled(nodes=2)
    assert alone.scaled(nodes=1).world_size == 1
    one_node = replace(preset("a100-40", devices_per_node=4), inter_node=replace(LINK, assumed=True))
    assert one_node.scaled(devices_per_node=8).world_size == 8


@pytest.mark.parametrize(("nodes", "devices"), [(1, 1), (1, 8), (4, 8), (4, 1)])
def test_scaling_reserves_what_the_preset_of_that_size_does(nodes, devices):
    from_one, from_many = preset("h100"), preset("h100", nodes=2, devices_per_node=2)
    wanted = preset("h100", nodes=nodes, devices_per_node=devices)
    assert wanted.device == from_one.device
    for hardware in (from_one, from_many):
        assert hardware.scaled(nodes=nodes, devices_per_node=devices).device == wanted.device


def test_devices_of_a_node_share_its_host():
    whole, eighth = preset("a100-40").host, preset("a100-40", nodes=2, devices_per_node=8).host
    assert whole.memory_bytes == 10**12 and eighth.memory_bytes == whole.memory_bytes // 8
    assert eighth.update_bytes_per_s == whole.update_bytes_per_s / 8 == 51.2e9
    assert eighth.to_device_bytes_per_s == whole.to_device_bytes_per_s == 31.5e9, "each has its own link"
    assert preset("a100-40", devices_per_node=8).scaled(devices_per_node=1).host == whole
    assert "DGX A100" in whole.source


def test_devices_sold_without_a_server_have_no_host():
    assert {name for name in preset_names() if preset(name).host is not None} == {
        "v100-16",
        "v100-32",
        "a100-40",
        "a100-80",
        "h100",
        "h200",
    }
    assert preset("rtx-4090", devices_per_node=2).scaled(devices_per_node=1).host is None
