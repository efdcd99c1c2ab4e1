"""Presets have sources, scaling drops what was measured, margins leave room."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner import presets
from hf_osdp.planner.cost.collectives import Ring, collective_seconds
from hf_osdp.planner.description import DType
from hf_osdp.planner.hardware import (
    CACHING_BYTES,
    CACHING_MARGIN,
    GIB,
    Backend,
    Collective,
    CollectiveTiming,
    Link,
)
from hf_osdp.planner.presets import COMMUNICATOR_BYTES, CONTEXT_BYTES, preset, preset_names

MEASURED = CollectiveTiming(collective=Collective.ALL_GATHER, group_size=2, latency_s=1.0, seconds_per_byte=0.0)


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_sources_and_reserve_context_and_communicators(name):
    alone, node = preset(name), preset(name, nodes=2, devices_per_node=8)
    assert all(len(part.source) > 20 for part in (node.device, node.intra_node, node.inter_node))
    assert DType.FLOAT32 in node.device.flops_per_s and node.world_size == 16
    assert (node.host is not None) is (name in ("v100-16", "v100-32", "a100-40", "a100-80", "h100", "h200", "b200"))
    if alone.backend is Backend.GLOO:
        assert name == "cpu" and (alone.unavoidable_bytes, node.outside_bytes(3)) == (0, 0)
        return
    assert node.inter_node.latency_s > node.intra_node.latency_s
    assert node.inter_node.bytes_per_s / 8 < node.intra_node_bytes_per_s, "a device's part of the machine's link"
    sheet = preset(name, nodes=2, devices_per_node=8, data_sheet=True)
    for dtype, rate in node.device.flops_per_s.items():
        assert 0.3 * sheet.device.rate(dtype) < rate <= sheet.device.rate(dtype)
    assert 0.4 * sheet.device.memory_bytes_per_s < node.device.memory_bytes_per_s < sheet.device.memory_bytes_per_s
    assert node.device.attention_flops_per_s < node.device.rate(DType.FLOAT16) * 1.1
    for reached, line in ((node.intra_node, sheet.intra_node), (node.inter_node, sheet.inter_node)):
        assert reached.bytes_per_s < line.bytes_per_s and line.source in reached.source
    assert CONTEXT_BYTES < alone.unavoidable_bytes == node.device.reserved_bytes
    assert node.device.reserved_bytes < node.device.memory_bytes / 9  # of which ECC takes a 16th with GDDR6
    with_one = alone.unavoidable_bytes + COMMUNICATOR_BYTES
    assert node.outside_bytes(3) - 2 * COMMUNICATOR_BYTES == node.unavoidable_bytes == with_one


def test_files_that_sources_name_exist():
    root = Path(presets.__file__).parents[2]
    text = Path(presets.__file__).with_suffix(".json").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/]+\.(?:md|csv|json|py)\b", text))
    assert named and {name for name in named if not (root / name).is_file()} == set()


def test_presets_are_those_that_were_promised():
    names = "v100-16 v100-32 v100-pcie-16 v100-pcie-32 titan-rtx rtx-3090 rtx-4090 rtx-5090 a6000 a10 l4 l40s a100-40 a100-80 h100"  # noqa: E501
    assert preset_names() == (*names.split(), "h200", "b200", "mi300x", "cpu")
    assert preset("A100_80").device.memory_bytes == 80 * 2**30
    texts = [preset("a100-40", nodes=2, devices_per_node=8).summary, preset("cpu", devices_per_node=2).summary]
    assert texts == ["2 nodes x 8 x A100-40 (nccl)", "2 x CPU (gloo)"]
    with pytest.raises(HardwareError, match="'b9000'") as caught:
        preset("b9000")
    assert all(name in str(caught.value) for name in preset_names()) and "\n" not in str(caught.value)


def test_devices_that_send_through_the_host_share_what_it_moves():
    rates = [preset("rtx-4090", devices_per_node=devices).intra_node_bytes_per_s for devices in (2, 4, 8)]
    assert rates == [2.6e9, 2.5e9, 1.25e9]
    assert preset("rtx-4090", devices_per_node=2).scaled(devices_per_node=8).intra_node_bytes_per_s == 1.25e9
    assert preset("a100-80", devices_per_node=8).intra_node_bytes_per_s == 232e9
    ring = Ring(size=8, node_crossings=0, sharing=1)
    lap = collective_seconds(preset("rtx-4090", devices_per_node=8), Collective.ALL_GATHER, ring, 10**9)
    assert lap == pytest.approx(7 / 8 / 1.25, rel=1e-3)


def test_scaled_changes_the_counts_and_drops_what_was_measured():
    across = replace(MEASURED, crosses_nodes=True)
    hardware = replace(preset("a100-40", nodes=2, devices_per_node=4), timings=(MEASURED, across))
    grown = hardware.scaled(nodes=3)
    assert (grown.nodes, grown.devices_per_node, grown.timings, grown.device) == (3, 4, (), hardware.device)
    assert hardware.scaled(devices_per_node=8).world_size == 16
    assert hardware.timing(Collective.ALL_GATHER, 2) is MEASURED
    assert hardware.timing(Collective.ALL_GATHER, 2, crosses_nodes=True) is across
    assert hardware.timing(Collective.ALL_GATHER, 4) is hardware.timing(Collective.ALL_REDUCE, 2) is None


def test_scaled_to_a_link_that_was_never_measured_is_refused():
    link = Link(latency_s=0.0, bytes_per_s=1e9, source="stands in for a link that is not there", assumed=True)
    alone = replace(preset("a100-40"), intra_node=link, inter_node=link)
    with pytest.raises(HardwareError, match="link between devices of a node is not known: 1 x A100-40"):
        alone.scaled(devices_per_node=2)
    with pytest.raises(HardwareError, match="link between nodes is not known"):
        alone.scaled(nodes=2)
    assert alone.scaled(nodes=1).world_size == 1
    assert replace(preset("a100-40", devices_per_node=4), inter_node=link).scaled(devices_per_node=8).world_size == 8


@pytest.mark.parametrize(
    ("margin", "share", "free"), [(None, CACHING_MARGIN, CACHING_BYTES), (0.0, 0.0, 0), (0.25, 0.25, 0)]
)
def test_margin_is_what_a_plan_may_not_fill(margin, share, free):
    hardware = preset("h100").with_margin(margin)
    assert (hardware.free_share, hardware.free_bytes) == (share, free)
    assert preset("cpu").free_share == preset("cpu").free_bytes == 0
    assert hardware.room_bytes(10**10) == round(10**10 * (1 - share)) - free
    assert hardware.room_bytes(1) == 0 or not free
    for needed in (1, 7, 96, 10**9 + 1, 2**59):
        limit = hardware.limit_for(needed)
        assert hardware.room_bytes(limit) >= needed > hardware.room_bytes(limit - 1)


def test_devices_of_a_node_share_its_host():
    whole, eighth = preset("a100-40").host, preset("a100-40", nodes=2, devices_per_node=8).host
    assert whole.memory_bytes == 10**12 and eighth.memory_bytes == whole.memory_bytes // 8
    assert eighth.update_bytes_per_s == whole.update_bytes_per_s / 8 == 51.2e9
    assert eighth.to_device_bytes_per_s == whole.to_device_bytes_per_s == 26.3e9, "each has its own link"
    assert preset("a100-40", devices_per_node=8).scaled(devices_per_node=1).host == whole


@pytest.mark.parametrize(("stated", "asked", "limit"), [
    (79.14, 80, 79.14),  # an A100 with 80 GB, as torch states it
    (14.58, 16, 14.58),  # a T4
    (79.14, 40, 40),
    (79.14, None, 79.14),
    (80, 80, 80),
    (79.14, 96, None),
    (80, 81, None),  # a preset has its nominal size
])  # fmt: skip
def test_nominal_size_of_a_card_means_all_of_it(stated, asked, limit):
    device = replace(preset("a100-80").device, memory_bytes=int(stated * GIB))
    if limit is None:
        with pytest.raises(ValueError, match=f"is more than the {int(stated)}"):
            device.check_limit(asked * GIB, given="memory_limit='96GiB'")
    else:
        assert device.check_limit(asked and asked * GIB, given="") == int(limit * GIB)


def test_other_programs_keep_what_they_have():
    alone = preset("a100-80")
    whole = alone.device.memory_bytes
    shared = replace(alone, beside_bytes=30 * GIB)
    assert shared.check_limit(None, given="") == shared.check_limit(whole, given="") == whole - 30 * GIB
    assert shared.check_limit(8 * GIB, given="") == 8 * GIB
    with pytest.raises(ValueError, match="which leaves nothing; end them, or lower beside"):
        replace(alone, beside_bytes=whole).check_limit(8 * GIB, given="")
