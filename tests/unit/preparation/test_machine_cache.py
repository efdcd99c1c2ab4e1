"""A start takes the machine as one of the last day measured it, with the memory of now."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from hf_osdp.measurement import machine
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.presets import preset
from hf_osdp.preparation import cache
from hf_osdp.preparation.cache import MEASURED_EARLIER, measured_once


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The seconds that each measurement was asked for."""
    monkeypatch.setenv("OSDP_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "seconds_without_core", lambda: 0.0)
    asked: list[float] = []

    def measure(*, device_type: str, seconds: float) -> Hardware:
        asked.append(seconds)
        return preset("h100", devices_per_node=1)

    monkeypatch.setattr(cache, "measure_hardware", measure)
    return asked


def taken(seconds: float = 0.5) -> Hardware:
    return measured_once(device_type="cpu", seconds=seconds)


def test_the_second_start_measures_memory_alone_and_says_so(measured, monkeypatch):
    first = taken()
    monkeypatch.setattr(machine, "_memory_bytes", lambda device, before: (2**33, 2**50, ""))
    second = taken()
    assert measured == [0.5]
    assert second.device.source.startswith(f"{MEASURED_EARLIER}, 0 min ago")
    assert (second.device.memory_bytes, second.device.reserved_bytes) == (2**33, 2**50), "others hold it now"
    same = {"memory_bytes": 1, "reserved_bytes": 0, "source": ""}
    assert replace(second.device, **same) == replace(first.device, **same)
    monkeypatch.setattr(machine, "_memory_bytes", lambda device, before: (2**33, 0, ""))
    assert taken().device.reserved_bytes == first.device.reserved_bytes > 0, "as it was when it was measured"


def kept(folder: Path) -> Path:
    (file,) = folder.rglob("*.json")
    return file


CHANGES = {
    "a day old": lambda patch, folder: os.utime(kept(folder), (time.time() - 25 * 3600,) * 2),
    "damaged": lambda patch, folder: kept(folder).write_text('{"device": {}}'),
    "no cache": lambda patch, folder: patch.setenv("OSDP_CACHE", "0"),
    "code": lambda patch, folder: patch.setattr(cache, "code_hash", lambda *_: "another"),
    "device": lambda patch, folder: patch.setattr(cache, "device_name", lambda *_: "another"),
    "topology": lambda patch, folder: patch.setattr(cache, "find_topology", lambda *_: "another"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_measured_anew(measured, monkeypatch, tmp_path, change):
    taken()
    CHANGES[change](monkeypatch, tmp_path)
    taken()
    assert measured == [0.5, 0.5]


def test_nothing_is_kept_of_a_busy_machine(measured, monkeypatch):
    monkeypatch.setattr(cache, "seconds_without_core", count().__next__)
    taken()
    taken()
    assert measured == [0.5, 0.5]


@pytest.mark.on_ranks(2)
def test_ranks_take_the_same_file(tmp_path):
    os.environ["OSDP_CACHE"] = str(tmp_path / "shared")
    cache.seconds_without_core = lambda: 0.0
    measured = [preset("cpu", devices_per_node=2)]
    cache.measure_hardware = lambda **asked: measured.pop()  # once
    first, second = (measured_once(device_type="cpu", seconds=0.05) for _ in range(2))
    assert first.device.flops_per_s == second.device.flops_per_s and not measured
    assert second.device.source.startswith(MEASURED_EARLIER)
