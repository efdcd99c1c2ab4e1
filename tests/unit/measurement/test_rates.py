"""The host beside a device."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_osdp.measurement.rates import measure_host, update_rate
from hf_osdp.planner.hardware import HostSpec
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile
from hf_osdp.report.run_tables import profile_tables

HOST = HostSpec(memory_bytes=3 * 2**30, to_device_bytes_per_s=2e10, to_host_bytes_per_s=1e10, update_bytes_per_s=4.2e9, source="measured")


def test_measure_host_is_none_on_the_cpu():
    assert measure_host(torch.device("cpu"), 0.1) is None


def test_update_rate_is_plausible_and_leaves_the_random_state():
    state = torch.get_rng_state()
    assert 1e8 < update_rate(torch.device("cpu"), 0.02, elements=2**16) < 1e13
    assert torch.equal(torch.get_rng_state(), state)


def test_a_profile_keeps_the_host():
    profile = Profile(hardware=replace(preset("rtx-4090"), host=HOST))
    assert Profile.from_json(profile.to_json()).hardware.host == HOST
    assert Profile.from_json(Profile(hardware=preset("cpu")).to_json()).hardware.host is None


def test_the_table_tells_of_the_host():
    told = " ".join(str(part) for part in profile_tables(Profile(hardware=replace(preset("rtx-4090"), host=HOST))))
    assert "Host: 3.0 GiB for each, optimizer steps at 4.2 GB/s." in told
