"""Precision, links and memory of devices that are described here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.compare import StrategyResult
from hf_osdp.planner.search.search import search
from hf_osdp.planning.preflight.devices import DeviceMemory, fp16_for_bf16, memory_now, native_bf16, slow_link
from hf_osdp.planning.preflight.findings import Severity
from hf_osdp.planning.preflight.run import bf16_on, device_memory
from hf_osdp.planning.problem import check_limit
from tests.helpers.descriptions import transformer
from tests.helpers.problems import problem

GIB = 2**30
JOB = TrainingJob(global_batch_size=32)


@pytest.mark.parametrize(
    ("name", "native"), [("a100-40", True), ("h100", True), ("rtx-3090", True), ("v100-16", False), ("titan-rtx", False)]
)
def test_where_bf16_is_native(name, native):
    device = preset(name).device
    assert native_bf16(device) is native
    assert bf16_on(device, "cuda") == (device.name if native else None)
    assert bf16_on(None, "cpu") is None


def test_fp16_is_worth_a_word_where_bf16_is_native():
    found = fp16_for_bf16(Precision.named("fp16"), "A100-40")
    assert found.severity is Severity.WARNING and "A100-40 computes bf16 as fast" in found.message
    assert fp16_for_bf16(Precision.named("bf16"), "A100-40") is None
    assert fp16_for_bf16(Precision(), "A100-40") is None
    assert fp16_for_bf16(Precision.named("fp16"), None) is None


def link_case(name: str, nodes: int):
    """Full sharding, its time, and what the planner would do."""
    hardware = preset(name, nodes=nodes, devices_per_node=2)
    description = transformer(layers=4, hidden=1024)
    limit = hardware.device.memory_bytes
    full = search(problem(description, hardware, JOB, limit, strategy="fsdp"))
    best = StrategyResult(strategy=Strategy.OSDP, result=search(problem(description, hardware, JOB, limit)))
    return full.plan, hardware, estimate_plan(full.plan, description, JOB, hardware).time, best


def test_full_sharding_over_a_slow_link():
    plan, hardware, time, best = link_case("rtx-4090", 2)
    found = slow_link(plan, hardware, time, [best])
    assert found.severity is Severity.WARNING
    assert "6 of 6 units are sharded across 2 nodes over 1.2 GiB/s" in found.message and "strategy=osdp is estimated to be" in found.message
    assert "try strategy=osdp" in slow_link(plan, hardware, time).message
    same = StrategyResult(strategy=Strategy.FSDP, result=replace(best.result, plan=replace(plan, step_s=time.step_s)))
    assert slow_link(plan, hardware, time, [same]) is None


def test_one_node_has_no_slow_link_and_what_is_unknown_says_nothing():
    plan, hardware, time, best = link_case("rtx-4090", 1)
    assert slow_link(plan, hardware, time, [best]) is None
    assert slow_link(plan, None, None) is None


def test_a_limit_above_the_device():
    device = preset("titan-rtx").device
    assert check_limit(24 * GIB, device, given="memory_limit=24GiB") == 24 * GIB
    with pytest.raises(ValueError, match=r"^memory_limit=25GiB is more than the 24.0 GiB of TITAN RTX; use at most 25769803776 bytes, or"):
        check_limit(25 * GIB, device, given="memory_limit=25GiB")


def memory(free: int, own: int = 0, name: str = "GPU 0", sharing: int = 1) -> DeviceMemory:
    return DeviceMemory(name=name, total_bytes=80 * GIB, free_bytes=free * GIB, own_bytes=own * GIB, sharing=sharing)


def test_what_the_plan_needs_must_be_there():
    found = memory_now(memory(20, own=5), 30 * GIB, 1)
    assert found.severity is Severity.ERROR
    assert "The plan needs 30.0 GiB on GPU 0, but 25.0 GiB of 80.0 GiB are there now" in found.message
    host = memory_now(memory(20, name="cpu", sharing=4), 6 * GIB, 1)
    assert host.severity is Severity.WARNING and "The plan's 4 ranks here need 24.0 GiB on cpu" in host.message
    assert memory_now(memory(20, name="cpu", sharing=4), 5 * GIB, 1) is None


def test_others_on_the_device_are_seen_where_the_plan_fits():
    found = memory_now(memory(60), 30 * GIB, 3)
    assert found.severity is Severity.WARNING and "20.0 GiB of GPU 0 are held outside" in found.message
    assert memory_now(memory(77, own=1), 30 * GIB, 3) is None


def test_this_machines_memory_is_what_psutil_says():
    here = device_memory("cpu")
    assert 0 < here.free_bytes <= here.total_bytes and (here.own_bytes, here.sharing) == (0, 1)
