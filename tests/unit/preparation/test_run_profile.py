"""A run measures its machine and the blocks of its model: within the limit, kept on disk for a while, without a trace
in the training.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp.measurement import machine
from hf_osdp.measurement.block_times import TimedModel, measure_block_times
from hf_osdp.planner.block_forms import COUNTED_AS_EAGER
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import SegmentTimes
from hf_osdp.preparation import run_profile
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.plan_run import PlannedRun, plan_run
from hf_osdp.preparation.run_profile import MEASURED_EARLIER, measured_hardware
from tests.helpers.models import tiny_model
from tests.helpers.problems import run_job

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[str]:
    """The devices that were measured; the machine is idle."""
    monkeypatch.setenv("OSDP_CACHE", str(tmp_path))
    monkeypatch.setattr(run_profile, "seconds_without_core", lambda: 0.0)
    asked: list[str] = []

    def measure(*, device_type: str, seconds: float) -> Hardware:
        asked.append(device_type)
        return preset("h100", devices_per_node=1)

    monkeypatch.setattr(run_profile, "measure_hardware", measure)
    return asked


def test_the_second_start_measures_memory_alone_and_says_so(measured, monkeypatch):
    first = measured_hardware("cpu")
    monkeypatch.setattr(machine, "_memory_bytes", lambda device, communicator: (2**33, 2**48, 2**33, ""))
    second = measured_hardware("cpu")
    assert measured == ["cpu"]
    assert second.device.source.startswith(f"{MEASURED_EARLIER}, 0 min ago")
    assert (second.device.memory_bytes, second.device.reserved_bytes) == (2**33, 2**48), "others hold it now"
    same = {"memory_bytes": 1, "reserved_bytes": 0, "source": ""}
    assert replace(second.device, **same) == replace(first.device, **same)
    monkeypatch.setattr(machine, "_memory_bytes", lambda device, communicator: (2**33, 0, 2**33, ""))
    assert measured_hardware("cpu").device.reserved_bytes == first.device.reserved_bytes > 0, "as when it was measured"


def kept(folder: Path) -> Path:
    (file,) = folder.rglob("*.json")
    return file


CHANGES = {
    "a day old": lambda patch, folder: os.utime(kept(folder), (time.time() - 25 * 3600,) * 2),
    "damaged": lambda patch, folder: kept(folder).write_text('{"device": {}}'),
    "other digits": lambda patch, folder: kept(folder).write_text(kept(folder).read_text().replace("1", "2")),
    "no cache": lambda patch, folder: patch.setenv("OSDP_CACHE", "0"),
    "code": lambda patch, folder: patch.setattr(run_profile, "code_hash", lambda *_: "another"),
    "device": lambda patch, folder: patch.setattr(run_profile, "device_name", lambda *_: "another"),
    "topology": lambda patch, folder: patch.setattr(run_profile, "find_topology", lambda *_: "another"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_measured_anew(measured, monkeypatch, tmp_path, change):
    measured_hardware("cpu")
    CHANGES[change](monkeypatch, tmp_path)
    measured_hardware("cpu")
    assert measured == ["cpu", "cpu"]


@pytest.mark.on_ranks(2)
def test_ranks_take_the_same_file(tmp_path):
    os.environ["OSDP_CACHE"] = str(tmp_path / "shared")
    run_profile.seconds_without_core = lambda: 0.0
    measured = [preset("cpu", devices_per_node=2)]
    run_profile.measure_hardware = lambda **asked: measured.pop()  # once
    first, second = (measured_hardware("cpu") for _ in range(2))
    assert first.device.flops_per_s == second.device.flops_per_s and not measured
    assert second.device.source.startswith(MEASURED_EARLIER)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("gpt2", layers=5, dtype=torch.float32)


@pytest.fixture
def timings(measured, monkeypatch) -> list[TimedModel]:
    """The models that were timed."""
    monkeypatch.setattr(run_profile, "measure_hardware", lambda **_: preset("cpu", devices_per_node=1))
    monkeypatch.setattr(run_profile, "BLOCKS_S", 0.01)
    taken: list[TimedModel] = []

    def measure(timed: TimedModel, **options: object):
        taken.append(timed)
        return measure_block_times(timed, **options)

    monkeypatch.setattr(run_profile, "measure_block_times", measure)
    return taken


def planned(model: nn.Module, *, known: Mapping[str, object] = {}, **options: object) -> PlannedRun:
    defaults = {"sequence_length": 16, "global_batch_size": 8}
    return plan_run(model, run_job(OSDPConfig(**{**defaults, **options}), **known))


def test_run_measures_times_and_the_second_start_reads_them(model, timings):
    first = planned(model).inputs.description
    assert timings[0].micro_batch_sizes == (1, 4, 8)
    phases = [phase for segment in first.segments for phase in (segment.forward, segment.backward)]
    assert all(phase.seconds is not None and phase.seconds(4) > 0 for phase in phases)
    assert first.timing == "measured (1, 4 and 8 samples at once)"
    again = planned(model).inputs.description
    assert len(timings) == 1 and again.segments == first.segments
    assert again.timing == "measured 0 min ago (1, 4 and 8 samples at once)"
    planned(model, sequence_length=12)
    assert len(timings) == 2, "another length has other times"


def test_times_of_blocks_on_the_cpu_are_kept_for_minutes_and_the_machine_for_a_day(model, timings, tmp_path):
    planned(model)
    for file in tmp_path.rglob("*.json"):
        os.utime(file, (time.time() - 11 * 60,) * 2)
    again = planned(model).inputs
    assert len(timings) == 2 and again.description.timing.startswith("measured (")
    assert again.hardware.device.source.startswith(f"{MEASURED_EARLIER}, 11 min ago")


def test_loss_in_chunks_is_timed_where_a_plan_takes_it(timings, monkeypatch):
    # too deep for a split into operators; the logits of 8 samples alone take 4 MiB
    model = GPT2LMHeadModel(GPT2Config(n_layer=9, n_embd=16, n_head=2, vocab_size=8192, n_positions=16))
    asked = {"split_vocabulary": True, "micro_batch_size": 8}
    planned(model, memory_limit="64MiB", **asked)
    assert [timed.micro_batch_sizes for timed in timings] == [(1, 4, 8)], "this plan takes it whole"
    times: list[tuple[SegmentTimes, ...]] = []
    measure = run_profile.measure_block_times

    def kept(*args: object, **options: object) -> tuple[SegmentTimes, ...]:
        times.append(measure(*args, **options))
        return times[-1]

    monkeypatch.setattr(run_profile, "measure_block_times", kept)
    monkeypatch.setenv("OSDP_CACHE", "0")
    described = planned(model, memory_limit="6MiB", **asked).inputs.description
    assert [timed.micro_batch_sizes for timed in timings[1:]] == [(1, 2), (1, 4, 8)], "in chunks more samples fit"
    assert described.split.loss_chunks == 8 and described.timing == "measured (1, 4 and 8 samples at once)"
    for name in ("ChunkedHead", "GPT2Block"):
        last = {(one.linear("forward_s"), one.linear("backward_s")) for one in times[-1] if name in one.class_name}
        there = [one for one in described.segments if name in described.units[one.unit].class_name]
        assert {(one.forward.seconds, one.backward.seconds) for one in there} == last, name


class WithState(GPT2LMHeadModel):
    """Has running statistics, draws random numbers of all kinds, and has a forward replaced on the instance."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.n_embd)
        inner = self.lm_head.forward
        self.lm_head.forward = lambda hidden: inner(self.norm(hidden.transpose(1, 2)).transpose(1, 2))  # its closure

    def forward(self, *args, **kwargs):
        random.random(), np.random.rand(), torch.rand(1)
        return super().forward(*args, **kwargs)


def test_timing_changes_neither_generators_nor_gradients_nor_buffers():
    model = WithState(tiny_model("gpt2").config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    timed = TimedModel(model_or_config=model, sequence_length=16, micro_batch_sizes=(1, 2))
    assert measure_block_times(timed, device=CPU, seconds=0.01)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_blocks_to_be_compiled_are_timed_as_they_are_on_the_cpu(model, timings):
    described = planned(model, compile=True).inputs.description
    assert [timed.compile for timed in timings] == [False]
    assert f"GPT2Block {COUNTED_AS_EAGER}" in described.trace and described.timing.startswith("measured")
