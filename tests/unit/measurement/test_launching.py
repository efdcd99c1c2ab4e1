"""What the CPU takes to issue work to a GPU: how it is measured, and that small models get large micro-batches for it."""

import time
from dataclasses import replace

import pytest
import torch

from hf_osdp.measurement import machine, rates, timing
from hf_osdp.measurement.fsdp_overhead import measure_hooks
from hf_osdp.planner.description import DType
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import search
from hf_osdp.planning.simulate import fake_process_group
from hf_osdp.tracing.describe import describe
from tests.helpers.descriptions import untraced
from tests.helpers.problems import problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_operators_of_a_gpu_cost_the_cpus_time_and_not_the_gpus(monkeypatch):
    waits = []
    step = rates._tiny_step(CPU)
    monkeypatch.setattr(rates, "_tiny_step", lambda device: lambda: (step(), time.sleep(2e-3))[0])
    monkeypatch.setattr(timing, "synchronize", lambda device: (waits.append(device), time.sleep(20e-3)))
    with rates._Counter() as counter:
        step()
    found = rates.operator_seconds(CUDA, 0.01)
    assert 2e-3 < found * counter.operators < 20e-3
    assert set(waits) == {CUDA}


def test_hooks_of_fsdp2_are_timed_on_the_machine(monkeypatch):
    with fake_process_group(2):
        assert 1e-6 < measure_hooks(CPU, 0.01) < 1
    assert machine._hooks_s(CPU, 0.01) == 0.0
    monkeypatch.setattr(machine, "measure_hooks", lambda device, seconds: 0.25)
    assert machine._hooks_s(CUDA, 0.01) == 1e-3  # alone
    monkeypatch.setattr(machine, "world_size", lambda: 2)
    assert machine._hooks_s(CUDA, 0.01) == 0.25


@pytest.fixture
def small(configuration):
    config = configuration("GPT2LMHeadModel", n_layer=4, n_embd=128, vocab_size=1000, n_positions=128)
    return untraced(describe(config, sequence_length=128, compute_dtype=DType.BFLOAT16, device_type="cuda", capability=(9, 0)))


def micro_batch(description, limit_bytes: int, **changes) -> int:
    gpus = preset("h100", devices_per_node=8)
    gpus = replace(gpus, host=None, margin=0.0, device=replace(gpus.device, reserved_bytes=0, communicator_bytes=0, **changes))
    job = TrainingJob(global_batch_size=512, precision=Precision.named("bf16"))
    return search(problem(description, gpus, job, limit_bytes)).plan.micro_batch_size


def test_a_small_model_runs_in_few_micro_steps(small):
    """Recomputing more is quicker than issuing a micro-step more often."""
    assert micro_batch(small, 120_000_000) == 64
    assert micro_batch(small, 120_000_000, operator_s=0.0, unit_s=0.0) < 64


def test_presets_of_gpus_name_what_issuing_takes():
    assert (preset("h100").device.operator_s, preset("h100").device.unit_s) == (5e-6, 1e-3)
    assert preset("cpu").device.unit_s == 0.0
