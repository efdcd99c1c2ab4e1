"""From a model and a configuration to a plan, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp.errors import HardwareError, InfeasibleError, PlanError
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile
from hf_osdp.planner.training_job import Precision
from hf_osdp.preparation.cache import describe_once
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.find_plan import Describer, find_plan
from hf_osdp.preparation.plan_run import PlannedRun, plan_run
from hf_osdp.tracing.options import TRACED_MICRO_BATCH
from tests.helpers.descriptions import transformer
from tests.helpers.problems import run_job

HARDWARE = preset("cpu")
BF16, FP16 = Precision.named("bf16"), Precision.named("fp16")


@pytest.fixture(autouse=True, scope="module")
def traced_once():
    """A model that was traced for one test is not traced for another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(find_plan.__kwdefaults__, "trace", describe_once)
        patch.setattr(Describer.__init__, "__defaults__", (describe_once,))
        yield


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=61, n_positions=16))


def planned(model: nn.Module, *, known: Mapping[str, object] = {}, **options: object) -> PlannedRun:
    defaults = {"compare": False, "sequence_length": 16, "global_batch_size": 8}
    if "plan" not in options:
        defaults |= {"operator_splitting": False} | ({} if "profile" in options else {"hardware": HARDWARE})
    return plan_run(model, run_job(OSDPConfig(**{**defaults, **options}), **known))


@pytest.fixture(scope="module")
def given(model) -> Plan:
    return planned(model).plan


def test_plan_run_searches_and_compares(model):
    run = planned(model, hardware="cpu", memory_limit="1GiB", compare=True)
    assert run.plan.global_batch_size == 8 and run.plan is run.search.plan
    assert run.problem.memory_limit_bytes == 2**30 and "CPU" in run.hardware.summary
    assert {row.strategy.value for row in run.comparison} == {"osdp", "fsdp", "ddp", "zero2", "hsdp"}
    run = planned(model)
    assert run.problem.memory_limit_bytes == HARDWARE.device.memory_bytes and run.comparison is None


def test_margin_and_reserved_bytes_stay_free_once(model, given):
    with pytest.raises(InfeasibleError) as caught:
        planned(model, memory_limit="10KiB")
    assert caught.value.least_peak_bytes > 10 * 2**10
    limit = given.peak_bytes
    assert planned(model, memory_limit=limit, memory_margin=0.0).plan.peak_bytes == limit
    assert planned(model, memory_limit=limit, memory_margin=0.1).plan.peak_bytes <= 0.9 * limit
    device = replace(HARDWARE.device, memory_bytes=given.peak_bytes + 1000, reserved_bytes=1000)
    run = planned(model, hardware=replace(HARDWARE, device=device))
    assert run.problem.memory_limit_bytes == given.peak_bytes + 1000
    assert run.plan.units == given.units


def test_given_plan_runs_as_it_is_or_is_refused(model, given, tmp_path):
    given.save(tmp_path / "plan.json")
    run = planned(model, plan=tmp_path / "plan.json")
    assert run.plan == given
    assert run.hardware is None and run.problem is None and run.search is None
    with pytest.raises(PlanError, match="samples at once, but batches hold 1") as caught:
        planned(model, plan=given, micro_batch_size=1)
    assert "\n" not in str(caught.value)


TWO = Profile(hardware=preset("cpu", devices_per_node=2))


@pytest.mark.parametrize(
    ("changes", "options", "error", "part"),
    [
        ({}, {"hardware": "cpu", "memory_limit": "900TiB"}, ValueError, r"'900TiB' is more than .*use at most \d+MiB"),
        ({}, {"memory_limit": "900TiB"}, ValueError, "memory_limit='900TiB' is more than the"),
        ({"precision": FP16}, {}, ValueError, "use bf16"),
        ({"precision": BF16}, {"recalibrate": True}, ValueError, "cannot try bfloat16"),
        ({"device_type": "cuda"}, {"host_offload": True}, HardwareError, "is not known; leave hardware out"),
        ({}, {"profile": TWO}, ValueError, "has 2 devices, but 1 processes"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(model, changes, options, error, part):
    with pytest.raises(error, match=part) as caught:
        planned(model, known=changes, **options)
    assert "\n" not in str(caught.value)


def test_profile_is_the_hardware(model, tmp_path):
    profile = Profile(hardware=replace(HARDWARE, device=replace(HARDWARE.device, name="profiled")))
    path = tmp_path / "profile.json"
    profile.save(path)
    for given in (profile, path, str(path)):
        assert planned(model, profile=given).hardware.device.name == "profiled"


def test_activation_checkpointing_is_seen_by_the_planner(model):
    runs = [planned(model, known={"activation_checkpointing": on}, micro_batch_size=8) for on in (False, True)]
    assert runs[1].plan.peak_bytes < runs[0].plan.peak_bytes


def test_recalibrate_in_one_process_tries_plan_and_leaves_weights(model):
    before = [parameter.clone() for parameter in model.parameters()]
    run = planned(model, recalibrate=True)
    assert [past.plan.fingerprint for past in run.rounds if past.fits] and run.meshes is None
    assert run.plan.fingerprint in {past.plan.fingerprint for past in run.rounds}
    assert run.search.memory.peak_bytes == pytest.approx(run.rounds[-1].observed.peak_bytes, rel=0.02)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Scores(nn.Module):
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
def test_inputs_of_the_user_are_planned_and_tried_with(recalibrate):
    run = planned(Scores(), inputs=scores_batch, recalibrate=recalibrate, block_classes="Linear", sequence_length=8)
    assert bool(run.rounds) is recalibrate


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ([1], r"inputs\(1\) returned a list; it must return a mapping of forward's keyword arguments"),
        ({"input_ids": 1}, r"inputs\(1\) has 'input_ids', which Scores.forward does not take; .* features, wanted"),
    ],
)
def test_inputs_that_make_no_batch_are_refused(batch, line):
    with pytest.raises(ValueError, match=line):
        planned(Scores(), inputs=lambda samples: batch)


def test_compiled_blocks_are_described_where_the_plan_runs(model):
    sizes = []

    def described(model: nn.Module, **options: object) -> ModelDescription:
        sizes.append(options.get("micro_batch_size"))
        classes = ("Block",) if options["compile"] else ()
        return replace(transformer(), compiled_classes=classes, sequence_length=options["sequence_length"])

    config = OSDPConfig(hardware=HARDWARE, compile=True, sequence_length=16, global_batch_size=8, micro_batch_size=8)
    found = find_plan(model, run_job(config), trace=described)
    assert sizes == [TRACED_MICRO_BATCH, 8]
    assert found.problem.description.compiled_classes == found.plan.compiled_classes == ("Block",)
    assert found.problem.description == found.whole, "compiled blocks stay whole"
    assert found.eager.compiled_classes == () and replace(found, whole=found.eager).eager is None
