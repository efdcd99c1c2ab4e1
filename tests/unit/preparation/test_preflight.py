"""Preflight checks: each fires on its case, is silent on a sound one, and stands after the plan or stops the run."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from transformers import TrainingArguments

from hf_osdp.errors import PreflightError
from hf_osdp.integrations.accelerator_preparation import project_folder
from hf_osdp.integrations.announce import announce_plan
from hf_osdp.integrations.trainer_facts import trainer_folder
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.presets import preset
from hf_osdp.planner.training_job import OptimizerSpec, Precision
from hf_osdp.preparation import preflight
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.job import RunFolder
from hf_osdp.preparation.plan_run import plan_run
from hf_osdp.preparation.preflight import Check, DeviceMemory, Finding, Severity, bf16_on, check_model
from tests.helpers.descriptions import transformer
from tests.helpers.models import MODELS, SEQUENCE_LENGTH, tiny_model
from tests.helpers.problems import run_job

GIB = 2**30
SIZES = {"sequence_length": SEQUENCE_LENGTH, "global_batch_size": 4}
CONFIG = OSDPConfig(hardware="cpu", compare=False, operator_splitting=False, **SIZES)
Usage = namedtuple("Usage", "total used free")


def assert_found(finding: Finding | None, severity: Severity, *parts: str) -> None:
    assert finding is not None and finding.severity is severity
    assert all(part in finding.message for part in parts), finding.message
    assert "\n" not in finding.message and finding.line.startswith(f"{severity.value}: ")


@pytest.mark.parametrize("name", MODELS)
def test_model_checks_find_nothing_in_sound_models(name):
    model = tiny_model(name, dtype=torch.float32)
    units = find_units(model)
    assert preflight.whole_in_one_unit(units) is preflight.no_masters(units, Precision()) is None
    assert preflight.frozen(units) is None
    assert preflight.unused_block_classes(None, ()) is None and preflight.unused_block_classes(["A"], ["A"]) is None
    check_model(model)


def test_unit_around_all_blocks_is_named_with_repeated_classes():
    found = preflight.whole_in_one_unit(find_units(tiny_model("gpt2"), ["GPT2Model"]))
    assert_found(found, Severity.WARNING, "transformer (GPT2Model)", "all 4 of transformer.h", "block_classes")
    assert preflight.whole_in_one_unit(find_units(tiny_model("gpt2", layers=1), ["GPT2Block"])) is None
    unused = preflight.unused_block_classes(["GPT2Block", "BertLayer"], ["GPT2Block"])
    assert_found(unused, Severity.NOTE, "BertLayer", "units are GPT2Block")


def test_untied_head_is_an_error_unless_configuration_says_so():
    model = tiny_model("gpt2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    found = preflight.split_ties(model)
    assert_found(found, Severity.ERROR, "lm_head.weight", "transformer.wte.weight", "tie_weights()")
    with pytest.raises(PreflightError, match=r"ties lm_head\.weight"):
        check_model(model)
    model.config.tie_word_embeddings = False
    assert preflight.split_ties(model) is None
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert preflight.split_ties(model) is preflight.split_ties(nn.Linear(2, 2)) is None
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    assert preflight.split_ties(peft.get_peft_model(tiny_model("gpt2"), lora)) is None


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_half_precision_without_masters_is_a_warning(dtype, name):
    units = find_units(model := tiny_model("gpt2", dtype=dtype))
    found = preflight.no_masters(units, Precision())
    assert_found(found, Severity.WARNING, str(dtype).removeprefix("torch."), f"mixed_precision={name}")
    assert preflight.no_masters(units, Precision.named(name)) is None
    assert preflight.no_masters(find_units(model.requires_grad_(False)), Precision()) is None


def test_frozen_parameters_are_counted_and_all_frozen_refused():
    model = tiny_model("gpt2")
    model.transformer.wte.requires_grad_(False)
    assert_found(preflight.frozen(find_units(model)), Severity.NOTE, "1.2K of", "plan again.")
    assert_found(preflight.frozen(find_units(model), in_optimizer=1), Severity.NOTE, "received 1 of them")
    model.requires_grad_(False)
    assert preflight.frozen(find_units(model)) is None
    assert_found(preflight.nothing_to_train(model), Severity.ERROR, "parameters are frozen", "requires_grad=True")
    check_model(model, trains=False)


@pytest.mark.parametrize(
    ("name", "native"), [("a100-40", True), ("rtx-3090", True), ("mi300x", True), ("titan-rtx", False)]
)
def test_fp16_is_a_warning_where_bf16_is_native(name, native):
    device = preset(name).device
    assert bf16_on(device, "cuda") == (device.name if native else None)
    assert bf16_on(None, "cpu") is None
    found = preflight.fp16_for_bf16(Precision.named("fp16"), bf16_on(device, "cuda"))
    if native:
        assert_found(found, Severity.WARNING, f"{device.name} computes bf16 as fast")
    assert (found is not None) == native
    for precision in (Precision.named("bf16"), Precision()):
        assert not preflight.fp16_for_bf16(precision, device.name)


def test_fixed_segments_are_told_where_the_margin_is_small(monkeypatch):
    found = preflight.fixed_segments(preset("a100-80"))
    assert_found(found, Severity.WARNING, "may take more than the margin (1.7 GiB of the whole device)")
    assert preflight.fixed_segments(preset("a100-80").with_margin(0.2)) is None
    job = run_job(device_type="cuda")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    for fixed in (True, False):
        monkeypatch.setattr(preflight, "has_fixed_segments", lambda fixed=fixed: fixed)
        found = preflight.findings_of(job, transformer().units, None, preset("a100-80", devices_per_node=2))
        assert (Check.ALLOCATOR in {finding.check for finding in found if finding}) == fixed


@pytest.mark.parametrize(
    ("memory", "needed", "severity", "part"),
    [
        (
            {"free": 20, "own": 5},
            30,
            Severity.ERROR,
            "needs 30.0 GiB on GPU 0, but 25.0 GiB of 80.0 GiB are available",
        ),
        ({"free": 20, "name": "cpu", "sharing": 4}, 6, Severity.WARNING, "plan's 4 ranks here need 24.0 GiB on cpu"),
        ({"free": 20, "name": "cpu", "sharing": 4}, 5, None, ""),
        ({"free": 60}, 30, Severity.WARNING, "20.0 GiB of GPU 0 are held outside"),
        ({"free": 77, "own": 1}, 30, None, ""),
    ],
)
def test_memory_that_is_missing_or_held_by_others_is_found(memory, needed, severity, part):
    free, own = memory.pop("free") * GIB, memory.pop("own", 0) * GIB
    now = DeviceMemory(**{"name": "GPU 0", **memory}, total_bytes=80 * GIB, free_bytes=free, own_bytes=own)
    found = preflight.memory_now(now, needed * GIB, 3)
    assert (found and found.severity) == severity and (found is None or part in found.message)
    here = preflight.device_memory("cpu")
    assert 0 < here.free_bytes <= here.total_bytes and (here.own_bytes, here.sharing) == (0, 1)


def test_checkpoint_bytes_are_what_torch_saves():
    model = tiny_model("gpt2", dtype=torch.float32)
    assert preflight.checkpoint_bytes(find_units(model), None) == sum(p.nbytes for p in model.parameters())
    model.transformer.wte.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
    weights = {id(p): p for p in model.state_dict(keep_vars=True).values()}
    saved = sum(tensor.nbytes for tensor in (*weights.values(), *states))
    assert preflight.checkpoint_bytes(find_units(model), OptimizerSpec(states=2)) == saved
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert preflight.checkpoint_bytes(find_units(model), None, adapters=True) == trained


@pytest.mark.parametrize(
    ("room", "there", "folder", "severity", "part"),
    [
        (0.9, 0, {}, Severity.ERROR, "A checkpoint takes"),
        (1.9, 0, {}, Severity.WARNING, "room for 1 of the 2"),
        (2.0, 0, {}, None, ""),
        (3.9, 0, {"limit": 3}, Severity.WARNING, "room for 3 of the 4"),
        (0.9, 0, {"states": False, "limit": 2}, Severity.WARNING, "room for 2 of the 3"),
        (0.3, 0, {"saves": False}, Severity.WARNING, "The model takes"),
        (0.4, 0, {"saves": False}, None, ""),
        (1.0, 0, {"limit": 2}, Severity.WARNING, "room for 1 of the 3"),
        (1.0, 2, {"limit": 2}, None, ""),
        (1.0, 2, {"limit": 1}, None, ""),
    ],
)
def test_too_small_counts_the_checkpoints_that_will_lie_there(
    tmp_path, monkeypatch, room, there, folder, severity, part
):
    units = find_units(tiny_model("gpt2", dtype=torch.float32))
    size = preflight.checkpoint_bytes(units, OptimizerSpec())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10 * size, 0, int(room * size)))
    for number in range(there):
        (tmp_path / f"checkpoint-{number}").mkdir()
    found = preflight.too_small(RunFolder(path=tmp_path, **folder), units, OptimizerSpec())
    assert (found and found.severity) == severity and (found is None or part in found.message)


def test_folders_of_trainer_and_projects(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, save_total_limit=3, save_only_model=True)
    assert trainer_folder(args, None) == RunFolder(path=str(tmp_path), limit=3, states=False)
    assert not trainer_folder(TrainingArguments(output_dir="x", use_cpu=True, save_strategy="no"), None).saves
    assert project_folder(ProjectConfiguration()) is None
    assert not project_folder(ProjectConfiguration(project_dir="x")).saves
    named = ProjectConfiguration(project_dir="x", automatic_checkpoint_naming=True, total_limit=2)
    assert project_folder(named).limit == 2


def test_sound_run_prints_nothing_and_given_plan_is_checked(tmp_path, capsys):
    model = tiny_model("gpt2", dtype=torch.float32, layers=2)
    run = plan_run(model, run_job(CONFIG, folder=RunFolder(path=tmp_path / "out")))
    assert run.findings == () and not list(tmp_path.iterdir())
    announce_plan(run)
    assert not any(severity.value in capsys.readouterr().out for severity in Severity)
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="is a file; give a folder"):
        plan_run(model, run_job(OSDPConfig(plan=run.plan, **SIZES), folder=RunFolder(path=tmp_path / "file")))


def test_findings_stand_once_after_the_plan_each_in_a_line(capsys, monkeypatch):
    model = tiny_model("gpt2", dtype=torch.bfloat16, layers=2)
    model.transformer.wpe.requires_grad_(False)
    run = plan_run(model, run_job(replace(CONFIG, block_classes="GPT2Block,[red]")))
    announce_plan(run)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("warning: ", "note: "))]
    assert [line.split()[0] for line in lines] == ["note:", "warning:", "note:"]
    assert "[red]" in lines[0] and "mixed_precision=bf16" in lines[1] and "frozen" in lines[2]
    monkeypatch.setattr("hf_osdp.integrations.announce.rank", lambda: 1)
    announce_plan(run)
    assert capsys.readouterr().out == ""


def test_errors_stand_in_one_line_and_stop_training():
    model = tiny_model("gpt2", layers=2).requires_grad_(False)
    with pytest.raises(PreflightError, match="there is nothing to train"):
        plan_run(model, run_job(CONFIG))
    assert plan_run(model, run_job(CONFIG, trains=False)).plan
    one, two = (Finding(check, Severity.ERROR, text) for check, text in ((Check.MODEL, "One."), (Check.BATCH, "Two.")))
    warning = replace(one, severity=Severity.WARNING)
    with pytest.raises(PreflightError, match=r"^One\. Two\.$"):
        preflight.refuse_errors([one, warning, two])
    assert preflight.merged_findings([warning]) == (warning,)
