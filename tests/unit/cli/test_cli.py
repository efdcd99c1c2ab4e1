"""`hf-osdp` on a tiny GPT-2 says what the planner's functions say; wrong input: tests/faults/bad_inputs.py."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest
import typer
from huggingface_hub import constants
from typer.testing import CliRunner

from hf_osdp.cli.app import app
from hf_osdp.cli.cases import Case, load_config
from hf_osdp.cli.options import Request
from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.profile import Profile, SegmentTimes, SegmentWork, TimePoint, with_block_times
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import OptimizerSpec, Precision, TrainingJob
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.report.content import comparison_content
from hf_osdp.report.explain import explain
from hf_osdp.report.plan_file import read_plan_file
from hf_osdp.tracing.describe import describe
from tests.helpers import problems

SIZES = ("--sequence-length", "32", "--global-batch-size", "32")
DEVICES = ("--device", "titan-rtx", "--devices-per-node", "4")
HARDWARE = preset("titan-rtx", devices_per_node=4)
LIMIT = HARDWARE.limit_for(HARDWARE.unavoidable_bytes + 13 * 2**19)
OPTIONS = (*SIZES, *DEVICES, "--memory-limit", str(LIMIT))
WHOLE = (*OPTIONS, "--no-operator-splitting", "--blocks-per-unit", 1)
JOB = TrainingJob(global_batch_size=32)


def problem(*arguments, **options) -> PlanningProblem:
    """Return a problem with the command's default simplicity."""
    return replace(problems.problem(*arguments, **options), simplicity=OSDPConfig().simplicity)


@pytest.fixture(scope="module")
def config():
    from transformers import GPT2Config

    return GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500, n_positions=64)


@pytest.fixture(scope="module")
def model(config, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    config.save_pretrained(folder)
    return str(folder / "config.json")


@pytest.fixture(scope="module")
def description(config) -> ModelDescription:
    return describe(config, sequence_length=32, device_type="cuda")


@pytest.fixture(scope="module")
def planned(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    done = call("plan", model, *WHOLE, "--output", folder / "plan.json", "--json", folder / "content.json")
    assert done.exit_code == 0, done.output
    return str(folder / "plan.json"), json.loads((folder / "content.json").read_text()), done


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def as_json(*arguments) -> dict:
    done = call(*arguments, "--json", "-")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def assert_readable(text: str) -> None:
    assert text and "…" not in text
    assert max(map(len, text.splitlines())) <= 100


def assert_refused(done, message: str) -> None:
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


@pytest.mark.parametrize("name", ("plan", "explain", "compare", "profile", "config", "app"))
def test_help_ends_with_an_example_that_is_understood(name):
    example = " ".join(call(name, "--help").output.split()).rpartition(f"Example: hf-osdp {name} ")[2]
    assert example and len(example) < 200
    assert typer.main.get_command(app).commands[name].make_context(name, shlex.split(example)).params


def test_plan_finds_and_shows_what_search_finds(planned, model, description):
    (path, content, done), expected = planned, search(problem(description, HARDWARE, JOB, LIMIT)).plan
    assert content["plan"]["fingerprint"] == expected.fingerprint and expected.fingerprint in done.stdout
    assert content["estimated"]["peak_bytes"] + HARDWARE.outside_bytes(expected.communicators) == expected.peak_bytes
    assert content["estimated"]["step_s"] == expected.step_s and content["model"]["parameters"] == description.numel
    assert done.stderr == "" and all(unit.label.split(".")[0] in done.stdout for unit in description.units)
    assert_readable(done.stdout)
    plan, inputs = read_plan_file(path)
    assert plan == Plan.load(path) and inputs.hardware == HARDWARE and inputs.job == JOB
    plan.check(description, 4)
    assert load_config(model.removesuffix("/config.json")).to_dict() == load_config(model).to_dict()
    assert estimate_plan(plan, inputs.description, inputs.job, inputs.hardware).time.step_s == plan.step_s


def test_plan_passes_every_option_to_the_planner(model, config):
    options = (
        "--sequence-length 16 --global-batch-size 96 --device a100-40 --num-nodes 2 --devices-per-node 3"
        " --precision bf16 --optimizer sgd --strategy hsdp --micro-batch-size 4 --activation-checkpointing"
        " --block-classes GPT2MLP --auto-class AutoModel"
    )
    content = as_json("plan", model, *options.split())
    hardware = preset("a100-40", nodes=2, devices_per_node=3)
    of = {"compute_dtype": DType.BFLOAT16, "block_classes": ["GPT2MLP"], "auto_class": "AutoModel"}
    described = describe(config, sequence_length=16, device_type="cuda", **of)
    sgd, bf16 = OptimizerSpec(name="sgd", states=0), Precision.named("bf16")
    job = TrainingJob(global_batch_size=96, micro_batch_size=4, precision=bf16, optimizer=sgd, recompute=True)
    expected = search(problem(described, hardware, job, hardware.device.memory_bytes, strategy="hsdp")).plan
    assert content["plan"]["fingerprint"] == expected.fingerprint
    assert content["estimated"]["peak_bytes"] + hardware.outside_bytes(expected.communicators) == expected.peak_bytes
    assert content["plan"]["memory_limit_bytes"] == hardware.device.memory_bytes
    assert content["model"]["class"] == "GPT2Model"


def test_plan_counts_adapters_and_a_base_in_4_bits(model, config, description):
    pytest.importorskip("peft")
    lora = (*WHOLE, "--lora-rank", 2, "--lora-targets", "c_attn")
    plain = as_json("plan", model, *lora)
    adapters = config.n_layer * 2 * (config.n_embd + 3 * config.n_embd)
    assert plain["model"]["parameters"] == description.numel + adapters
    assert plain["estimated"]["peak_breakdown"]["optimizer"] <= 2 * 4 * adapters
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; pip install 'hf_osdp[bnb]'")
    packed = as_json("plan", model, *lora, "--quantize", "nf4")
    assert packed["model"]["parameters"] == plain["model"]["parameters"]
    held = [content["estimated"]["peak_breakdown"]["parameters"] for content in (plain, packed)]
    assert held[1] < held[0]


@pytest.mark.parametrize(
    ("device", "asked", "precision"), [("a100-80", None, "bf16"), ("v100-16", None, "no"), ("a100-80", "no", "no")]
)
def test_precision_follows_the_device(device, asked, precision):
    case = Case(Request.of(model="none", sequence_length=8, global_batch_size=8, device=device, precision=asked))
    assert case.precision == precision and case.job.precision == Precision.named(precision, autocast=True)


def test_precision_without_units_for_it_is_said(model, caplog):
    assert call("plan", model, *SIZES, *DEVICES, "--precision", "bf16").exit_code == 0
    assert "TITAN RTX has no units for bfloat16: products run at " in caplog.text and "; use fp16." in caplog.text


def test_explain_needs_the_plan_file_alone(planned, tmp_path):
    plan, inputs = read_plan_file(planned[0])
    done = call("explain", planned[0], "--json", tmp_path / "report.json", "--plot", tmp_path / "x.html")
    assert done.exit_code == 0 and "Bottleneck: " in done.stdout
    assert_readable(done.stdout)
    assert (tmp_path / "x.html").stat().st_size > 2000
    content, expected = (
        json.loads((tmp_path / "report.json").read_text()),
        json.loads(json.dumps(explain(plan, inputs))),
    )
    for name in ("plan", "model", "hardware", "estimated", "bottleneck"):
        assert content[name] == expected[name]
    Plan.load(planned[0]).save(tmp_path / "bare.json")
    assert_refused(call("explain", tmp_path / "bare.json"), "holds only a plan; give a file from")
    assert_refused(call("explain", planned[0], "--proof", "--plot", tmp_path / "p.png"), "--proof has no chart")
    proven = call("explain", planned[0], "--proof", "--json", tmp_path / "proof.json")
    assert json.loads((tmp_path / "proof.json").read_text())["gap"] == 0
    assert "Gap: 0, none is faster." in proven.output


def test_compare_holds_all_strategies_and_draws_the_front(model, description, tmp_path):
    asked = problem(description, HARDWARE, replace(JOB, micro_batch_size=2), LIMIT)
    rows = list(compare_strategies(asked))
    files = ("--json", tmp_path / "x.json", "--plot", tmp_path / "x.png")
    done = call("compare", model, *WHOLE, "--micro-batch-size", 2, *files)
    assert done.exit_code == 0, done.output
    content, expected = json.loads((tmp_path / "x.json").read_text()), comparison_content(asked, rows)
    assert content.pop("front") and content == json.loads(json.dumps({**expected, "model": content["model"]}))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert_readable(done.stdout)
    assert all(row.strategy.value in done.stdout for row in rows)


def test_plan_takes_devices_and_times_of_a_profile(model, description, tmp_path):
    """Blocks take a second forward and two backward whatever the batch."""
    profile_file = str(tmp_path / "profile.json")
    points = tuple(TimePoint(samples=samples, forward_s=1.0, backward_s=2.0) for samples in (1, 2))
    of = {"sequence_length": 32, "compute_dtype": DType.FLOAT32, "points": points}
    units = [description.units[segment.unit] for segment in description.segments]
    shapes = [tuple(parameter.shape for parameter in unit.parameters) for unit in units]
    segments = tuple(
        SegmentTimes(class_name=unit.class_name, parameter_shapes=shape, work=SegmentWork.of(segment), **of)
        for unit, shape, segment in zip(units, shapes, description.segments, strict=True)
    )
    Profile(hardware=HARDWARE, segments=segments).save(profile_file)
    content = as_json("plan", model, *SIZES, "--profile", profile_file)
    timed = with_block_times(description, Profile.load(profile_file))
    expected = search(problem(timed, HARDWARE, JOB, HARDWARE.device.memory_bytes)).plan
    assert content["plan"]["fingerprint"] == expected.fingerprint
    assert content["estimated"]["step_s"] == expected.step_s > 3 * len(description.segments)
    more = as_json("plan", model, *SIZES, "--profile", profile_file, "--devices-per-node", 8)
    assert more["plan"]["world_size"] == 8
    sizes = ("--sequence-length", 16, "--global-batch-size", 32)
    assert_refused(call("plan", model, *sizes, "--profile", profile_file), "no times for")


HOST = {"host_memory": "64GiB"}


@pytest.mark.slow
def test_remedies_are_flags_and_true(tmp_path):
    """Of a large vocabulary, at the least limit at which slices of it fit."""
    from transformers import GPT2Config

    GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=8000, n_positions=256).save_pretrained(tmp_path)
    given = {"sequence_length": 256, "global_batch_size": 32, "device": "titan-rtx", "devices_per_node": 4}

    def with_limit(limit: int, *, split: bool) -> Case:
        asked = {**given, "split_vocabulary": split, "memory_limit": str(limit)}
        return Case(Request.of(model=str(tmp_path / "config.json"), precision="no", **asked))

    with pytest.raises(InfeasibleError) as nothing:
        _ = with_limit(HARDWARE.limit_for(HARDWARE.unavoidable_bytes + 2**20), split=True).found.plan
    limit = nothing.value.least_peak_bytes
    with pytest.raises(InfeasibleError) as caught:
        _ = with_limit(limit, split=False).found.plan
    flags = [re.search(r"(--[a-z][^;()]*)", way.flags)[1].strip() for way in caught.value.remedies]
    assert "--split-vocabulary" in flags, flags
    assert "split_vocabulary=True" in str(caught.value) and "split_vocabulary" not in caught.value.on_command_line
    assert with_limit(limit, split=True).found.plan.peak_bytes <= limit


@pytest.mark.slow
def test_remedy_of_host_memory_asks_for_no_more_than_some_plan_needs():
    """The plan that needs the least of the device keeps more on the host than 64 GiB have room for."""
    asked = {"sequence_length": 4096, "global_batch_size": 16, "device": "rtx-3090", "devices_per_node": 4}
    made = [
        Case(Request.of(model="meta-llama/meta-llama-3-8b", precision="bf16", **asked, **more)) for more in ({}, HOST)
    ]
    with pytest.raises(InfeasibleError, match=r"Use --host-memory 64GiB \(if .* given\); or 8 devices; or"):
        _ = made[0].found.plan
    assert made[1].found.plan.peak_bytes <= 24 * 2**30


@pytest.mark.parametrize(
    ("model", "said"), [("large", "GiB less for other programs"), ("xl", r"or devices of [\d.]+ GiB")]
)
def test_other_programs_are_asked_for_memory_only_where_the_device_has_enough(model, said):
    asked = {"sequence_length": 1024, "global_batch_size": 8, "device": "rtx-3090", "beside": 0.5}
    request = Request.of(model=f"openai-community/gpt2-{model}", precision="no", **asked)
    with pytest.raises(InfeasibleError, match=said):
        _ = Case(request).found.plan


def test_load_config_without_a_network_names_the_nearest_shapes(monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'qwen3-8' .*connect.*give a config.json, .* \(nearest: qwen3-8b"):
        load_config("qwen3-8")
    assert load_config("Qwen3-8B").hidden_size == 4096
    assert "shape of Qwen/Qwen3-8B, from https://huggingface.co/Qwen/Qwen3-8B/" in caplog.text


def test_steps_are_cut_by_length_only_for_models_that_the_trainer_cuts(tmp_path):
    from transformers import T5Config

    sizes = {"num_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16, "vocab_size": 100}
    T5Config(**sizes, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    given = ("plan", tmp_path, *SIZES, "--device", "a100-80", "--mean-length", 8, "--batch-by-tokens")
    assert_refused(call(*given), "batch_by_tokens=True cannot be used, since the model has rows of two lengths")


def test_lengths_of_samples_change_seconds_and_no_peak(model, tmp_path):
    given = ("plan", model, *SIZES, "--device", "a100-80", "--micro-batch-size", 8, "--no-operator-splitting")
    (tmp_path / "lengths").write_text("8\n8\n8\n32\n")
    plain, mean, read = (as_json(*given, *more)["estimated"] for more in (
        (), ("--mean-length", 14, "--no-batch-by-tokens"), ("--lengths", tmp_path / "lengths", "--batch-by-tokens")
    ))  # fmt: skip
    assert plain["expected"] is None and plain["peak_bytes"] == mean["peak_bytes"]
    assert mean["expected"]["micro_steps"] == 4 and mean["expected"]["tokens"] < 8 * 32
    assert mean["expected"]["sample_tokens"] == pytest.approx(14, rel=0.01)
    assert read["expected"]["sample_tokens"] == 14 and read["expected"]["micro_steps"] < 4
    shown = call(*given, "--mean-length", 14).stdout
    assert "tokens/s without padding" in shown and "Samples have 14 of 32 tokens in the mean" in " ".join(
        shown.split()
    )
