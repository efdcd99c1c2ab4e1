"""From a model and a configuration to a plan, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_osdp.errors import DescriptionError, HardwareError, InfeasibleError
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.find_plan import ProblemBuilder
from hf_osdp.preparation.plan_run import PlannedRun, grouped_as_planned, plan_run
from tests.helpers.architectures import tiny_architecture
from tests.helpers.models import tiny_model
from tests.helpers.problems import run_job

HARDWARE = preset("cpu")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("gpt2", layers=2, width=32, dtype=torch.float32)


def planned(model: nn.Module, *, known: Mapping[str, object] = {}, **options: object) -> PlannedRun:
    defaults = {"sequence_length": 12, "global_batch_size": 8}
    if "plan" not in options:
        defaults |= {"operator_splitting": False} | ({} if "profile" in options else {"hardware": HARDWARE})
    return plan_run(model, run_job(OSDPConfig(**{**defaults, **options}), **known))


@pytest.fixture(scope="module")
def given(model) -> Plan:
    return planned(model).plan


def test_plan_run_searches_and_compares(model):
    run = planned(model, hardware="cpu", memory_limit="1GiB", compare=True)
    assert run.plan.global_batch_size == 8 and run.estimate.time.step_s == run.plan.step_s
    assert run.plan.memory_limit_bytes == 2**30 and "CPU" in run.hardware.summary
    assert {row.strategy.value for row in run.comparison} == {"osdp", "fsdp", "ddp", "zero2", "hsdp"}


def test_margin_and_reserved_bytes_stay_free_once(model, given):
    with pytest.raises(InfeasibleError) as caught:
        planned(model, memory_limit="10KiB")
    assert caught.value.least_peak_bytes > 10 * 2**10
    assert given.memory_limit_bytes == HARDWARE.device.memory_bytes
    limit = given.peak_bytes
    assert planned(model, memory_limit=limit, memory_margin=0.0).plan.peak_bytes == limit
    assert planned(model, memory_limit=limit, memory_margin=0.1).plan.peak_bytes <= 0.9 * limit
    device = replace(HARDWARE.device, memory_bytes=given.peak_bytes + 1000, reserved_bytes=1000)
    run = planned(model, hardware=replace(HARDWARE, device=device))
    assert run.plan.memory_limit_bytes == given.peak_bytes + 1000
    assert run.plan.units == given.units


def test_given_plan_runs_as_it_is(model, given, tmp_path):
    given.save(tmp_path / "plan.json")
    run = planned(model, plan=tmp_path / "plan.json")
    assert run.plan == given and run.hardware is None and run.estimate is None


def test_what_cannot_run_is_refused_in_one_line(model):
    with pytest.raises(HardwareError, match="is not known; leave hardware out"):
        planned(model, known={"device_type": "cuda"}, host_offload=True)
    with pytest.raises(ValueError, match="has 2 devices, but 1 processes"):
        planned(model, profile=Profile(hardware=preset("cpu", devices_per_node=2)))


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, features: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            features = features + block(features).relu()
        return {"loss": (features.sum(-1) - wanted).pow(2).mean()}


def test_inputs_of_the_user_are_planned_with_or_refused():
    def plan_with(inputs):
        return planned(Scores(), inputs=inputs, block_classes="Linear", sequence_length=8).plan

    assert plan_with(lambda samples: {"features": torch.rand(samples, 8), "wanted": torch.rand(samples)}).units
    for wrong, said in (([1], "TypeError"), ({"input_ids": 1}, "unexpected keyword argument 'input_ids'")):
        with pytest.raises(DescriptionError, match=rf"{said}.* Pass inputs that its forward accepts"):
            plan_with(lambda samples, wrong=wrong: wrong)


def builder_of(model: nn.Module, **options: object) -> ProblemBuilder:
    config = OSDPConfig(sequence_length=12, global_batch_size=4, **options)
    job = run_job(config, world_size=4, device_type="cuda")
    return ProblemBuilder(model, job, hardware=preset("h100", devices_per_node=4))


def test_a_limit_that_an_error_has_lowered_holds_for_every_search(model):
    builder = builder_of(model)
    builder.limit_bytes -= 2**30
    assert builder.for_job(builder.job).limit_bytes == builder.limit_bytes


def test_plan_of_several_blocks_a_unit_is_that_of_a_given_plan(model, caplog):
    builder = builder_of(model, blocks_per_unit=2)
    found = builder.find()
    assert "transformer.h.0+transformer.h.1" in {unit.fqn for unit in found.plan.units}
    single = builder.describe(found.plan.split.of_single_blocks)
    assert grouped_as_planned(single, found.plan) == found.problem.description
    assert builder_of(model, offload_activations=True).blocks_per_unit == 1
    assert not caplog.records and planned(model, blocks_per_unit=2).plan.split.is_none
    assert "blocks_per_unit=2 has no effect" in caplog.text, "one process gathers nothing"


def test_models_that_leave_out_layers_keep_single_blocks():
    model = tiny_architecture("OPTForCausalLM", num_hidden_layers=4).float()
    builder = builder_of(model)
    assert builder._best_split(builder.build()).blocks_per_unit > 1
    model.config.layerdrop = 0.1
    assert builder._best_split(builder.build()).blocks_per_unit == 1
    with pytest.raises(ValueError, match="leaves out some at random \\(LayerDrop\\); leave blocks_per_unit out"):
        builder_of(model, blocks_per_unit=2).find()
