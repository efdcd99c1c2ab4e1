"""From a model and a configuration to a plan, in one process."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp.errors import HardwareError, InfeasibleError, PlanError, ProfileError
from hf_osdp.planner.hardware import HostSpec
from hf_osdp.planner.job import OptimizerSpec, Precision
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.planning.plan_run import plan_run
from hf_osdp.planning.problem import RunFacts

HARDWARE = preset("cpu")


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=61, n_positions=16))


def facts(**changes: object) -> RunFacts:
    options: dict[str, object] = {
        "world_size": 1, "device_type": "cpu", "precision": Precision(), "sequence_length": 16, "global_batch_size": 8,
        "micro_batch_size": None, "reduce_every_micro_step": None, "optimizer": OptimizerSpec(), "holds_outputs": False,
    }  # fmt: skip
    return RunFacts(**{**options, **changes})


def test_searches_and_compares(model):
    run = plan_run(model, OSDPConfig(hardware=HARDWARE, memory_limit="1GiB"), facts())
    assert run.plan.global_batch_size == 8
    assert run.plan is run.search.plan
    assert run.memory_limit_bytes == 2**30
    assert {row.strategy.value for row in run.comparison} == {"osdp", "fsdp", "ddp", "zero2", "hsdp"}


def test_comparison_can_be_left_out(model):
    assert plan_run(model, OSDPConfig(hardware=HARDWARE, compare=False), facts()).comparison is None


def test_without_a_limit_the_device_is_the_limit(model):
    run = plan_run(model, OSDPConfig(hardware=HARDWARE, compare=False), facts())
    assert run.memory_limit_bytes == HARDWARE.device.memory_bytes


def test_the_margin_stays_free_of_the_plan(model):
    limit = plan_run(model, OSDPConfig(hardware=HARDWARE, compare=False), facts()).plan.peak_bytes
    options = dict(hardware=HARDWARE, compare=False, memory_limit=limit)
    assert plan_run(model, OSDPConfig(**options, memory_margin=0.0), facts()).plan.peak_bytes == limit
    assert plan_run(model, OSDPConfig(**options, memory_margin=0.1), facts()).plan.peak_bytes <= 0.9 * limit


def test_what_the_device_reserves_counts_once(model):
    """The search takes it off the limit; the limit that it is given is whole."""
    plain = plan_run(model, OSDPConfig(hardware=HARDWARE, compare=False), facts())
    own = plain.search.plan.peak_bytes
    device = dataclasses.replace(HARDWARE.device, memory_bytes=own + 1000, reserved_bytes=1000)
    run = plan_run(model, OSDPConfig(hardware=dataclasses.replace(HARDWARE, device=device), compare=False), facts())
    assert run.memory_limit_bytes == own + 1000
    assert run.plan.units == plain.plan.units


@pytest.mark.parametrize("source", ["cpu", HARDWARE])
def test_a_limit_above_the_device_is_refused(model, source):
    with pytest.raises(ValueError, match=r"memory_limit='900TiB' is more than the .* of .*use at most \d+ bytes") as caught:
        plan_run(model, OSDPConfig(hardware=source, memory_limit="900TiB"), facts())
    assert "\n" not in str(caught.value)


def test_names_of_hardware_are_presets(model):
    assert "CPU" in plan_run(model, OSDPConfig(hardware="cpu", compare=False), facts()).hardware.summary


def test_infeasible_says_what_would_do(model):
    with pytest.raises(InfeasibleError) as caught:
        plan_run(model, OSDPConfig(hardware=HARDWARE, memory_limit="10KiB"), facts())
    assert caught.value.least_peak_bytes > 10 * 2**10


@pytest.fixture(scope="module")
def given(model):
    return plan_run(model, OSDPConfig(hardware=HARDWARE, compare=False), facts()).plan


def test_a_given_plan_runs_as_it_is(model, given, tmp_path):
    given.save(tmp_path / "plan.json")
    run = plan_run(model, OSDPConfig(plan=tmp_path / "plan.json"), facts())
    assert run.plan == given
    assert run.hardware is None and run.search is None


@pytest.mark.parametrize(
    ("changes", "options", "part"),
    [
        ({"global_batch_size": 16}, {}, "takes 8 samples a step, but 16"),
        ({"micro_batch_size": 1}, {}, "samples at once, but batches hold 1"),
        ({"reduce_every_micro_step": None, "world_size": 2}, {}, "for 1 processes, but 2 are running"),
        ({}, {"memory_limit": "10KiB"}, "more than memory_limit=10.0 KiB"),
    ],
)
def test_a_given_plan_for_another_run_is_refused(model, given, changes, options, part):
    with pytest.raises(PlanError, match=part) as caught:
        plan_run(model, OSDPConfig(plan=given, **options), facts(**changes))
    assert "\n" not in str(caught.value)


def test_a_given_plan_for_shorter_samples_is_refused(model, given):
    with pytest.raises(PlanError, match="for 8 tokens a sample, but samples have 16"):
        plan_run(model, OSDPConfig(plan=dataclasses.replace(given, sequence_length=8)), facts())


def test_fp16_on_one_cpu_process_is_refused(model):
    with pytest.raises(ValueError, match="use bf16"):
        plan_run(model, OSDPConfig(hardware=HARDWARE), facts(precision=Precision.named("fp16")))


@pytest.mark.slow
def test_a_profile_is_the_hardware_and_is_read_from_its_file(model, tmp_path):
    named = dataclasses.replace(HARDWARE, device=dataclasses.replace(HARDWARE.device, name="profiled"))
    Profile(hardware=named).save(tmp_path / "profile.json")
    for profile in (Profile(hardware=named), tmp_path / "profile.json", str(tmp_path / "profile.json")):
        assert plan_run(model, OSDPConfig(profile=profile, compare=False), facts()).hardware.device.name == "profiled"
    with pytest.raises(ValueError, match="has 2 devices, but 1 processes"):
        plan_run(model, OSDPConfig(profile=Profile(hardware=preset("cpu", devices_per_node=2))), facts())
    with pytest.raises(ProfileError, match="absent"):
        plan_run(model, OSDPConfig(profile=tmp_path / "absent.json"), facts())


def test_activation_checkpointing_is_seen_by_the_planner(model):
    config = OSDPConfig(hardware=HARDWARE, compare=False, micro_batch_size=8)
    peaks = [plan_run(model, config, facts(activation_checkpointing=on, micro_batch_size=8)).plan.peak_bytes for on in (False, True)]
    assert peaks[1] < peaks[0]


def test_one_process_tries_its_plan_too(model):
    before = [parameter.clone() for parameter in model.parameters()]
    run = plan_run(model, OSDPConfig(hardware=HARDWARE, compare=False, recalibrate=True), facts())
    assert [past.plan.fingerprint for past in run.rounds if past.fits] and run.meshes is None
    assert run.plan.fingerprint in {past.plan.fingerprint for past in run.rounds}
    assert run.search.memory.peak_bytes == pytest.approx(run.rounds[-1].observed.peak_bytes, rel=0.02)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_trials_of_what_would_not_run_are_refused(model):
    with pytest.raises(ValueError, match="cannot try bfloat16"):
        plan_run(model, OSDPConfig(hardware=HARDWARE, recalibrate=True), facts(precision=Precision.named("bf16")))


def test_all_states_on_a_host_that_is_not_known(model):
    with pytest.raises(HardwareError, match="is not known; leave hardware out"):
        plan_run(model, OSDPConfig(hardware=HARDWARE), facts(cpu_offload=True, device_type="cuda"))


def test_all_states_on_the_host(model):
    host = HostSpec(memory_bytes=2**34, to_device_bytes_per_s=1e10, to_host_bytes_per_s=1e10, update_bytes_per_s=1e10, source="made up")
    run = plan_run(model, OSDPConfig(hardware=replace(HARDWARE, host=host)), facts(cpu_offload=True, device_type="cuda"))
    assert run.job.host_offload is True and all(unit.on_host for unit in run.plan.units)


def test_a_given_plan_that_keeps_units_on_the_device_is_not_offloaded(model):
    plan = plan_run(model, OSDPConfig(hardware=HARDWARE), facts()).plan
    with pytest.raises(PlanError, match="stay on the device; leave it out"):
        plan_run(model, OSDPConfig(plan=plan), facts(cpu_offload=True, device_type="cuda"))


def test_the_cpu_has_no_host_beside_it(model, caplog):
    run = plan_run(model, OSDPConfig(hardware=HARDWARE), facts(cpu_offload=True))
    assert not any(unit.on_host for unit in run.plan.units) and "no effect on the CPU" in caplog.text


class Scores(nn.Module):
    """A model of one's own, whose batch nobody else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, features: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            features = features + block(features).relu()
        return {"loss": (features.sum(-1) - wanted).pow(2).mean()}


def scores_batch(samples: int) -> dict[str, torch.Tensor]:
    return {"features": torch.rand(samples, 8), "wanted": torch.rand(samples)}


@pytest.mark.parametrize("recalibrate", [False, True])
def test_the_users_inputs_are_planned_and_tried_with(recalibrate):
    config = OSDPConfig(hardware=HARDWARE, compare=False, inputs=scores_batch, recalibrate=recalibrate, block_classes="Linear")
    run = plan_run(Scores(), config, facts(sequence_length=8))
    assert not run.description.trace.startswith("formula")
    assert bool(run.rounds) is recalibrate


@pytest.mark.parametrize(
    ("inputs", "line"),
    [
        (lambda samples: [samples], r"inputs\(1\) gave a list; it must give a mapping of forward's keyword arguments"),
        (lambda samples: {"input_ids": samples}, r"inputs\(1\) has 'input_ids', which Scores.forward does not take; .* features, wanted"),
    ],
)
def test_inputs_that_make_no_batch_are_refused(inputs, line):
    with pytest.raises(ValueError, match=line):
        plan_run(Scores(), OSDPConfig(hardware=HARDWARE, inputs=inputs), facts())
