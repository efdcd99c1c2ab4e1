"""`hf-osdp` from the shell, on a tiny GPT-2: what it says is what the planner's functions say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hf_osdp.cli import what_if
from hf_osdp.cli.app import app
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.job import OptimizerSpec, Precision, TrainingJob
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile, SegmentTimes, SegmentWork, TimePoint, with_block_times
from hf_osdp.planner.search.compare import compare_strategies, frontier
from hf_osdp.planner.search.search import search
from hf_osdp.report.content import comparison_content, explanation_content
from hf_osdp.report.explain import explain
from hf_osdp.report.plan_file import read_plan_file
from hf_osdp.tracing.describe import describe
from tests.helpers.problems import problem

SIZES = ("--sequence-length", "32", "--global-batch-size", "32")
DEVICES = ("--device", "titan-rtx", "--devices-per-node", "4")
HARDWARE = preset("titan-rtx", devices_per_node=4)
LIMIT = HARDWARE.limit_for(HARDWARE.unavoidable_bytes + 13 * 2**19)
OPTIONS = (*SIZES, *DEVICES, "--memory-limit", str(LIMIT))
WHOLE = (*OPTIONS, "--no-operator-splitting")
ROOMY = (*WHOLE, "--memory-limit", str(LIMIT + 2**26))
"""Room for a page of 20 MiB on each of the allocator's streams."""
JOB = TrainingJob(global_batch_size=32)


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
    """The folder with `plan.json` and `content.json`, and what was shown."""
    folder = tmp_path_factory.mktemp("plans")
    done = call("plan", model, *OPTIONS, "--output", folder / "plan.json", "--json", folder / "content.json")
    assert done.exit_code == 0, done.output
    return folder, done


@pytest.fixture(scope="module")
def plan_content(planned) -> dict:
    return json.loads((planned[0] / "content.json").read_text())


@pytest.fixture(scope="module")
def plan_file(planned) -> str:
    return str(planned[0] / "plan.json")


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def as_json(*arguments) -> dict:
    """What a command writes with `--json -`."""
    done = call(*arguments, "--json", "-")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def assert_readable(text: str) -> None:
    assert text and "…" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_lists_the_commands_and_every_option_of_plan():
    text = call("--help").output
    assert all(name in text for name in ("plan", "explain", "compare", "what-if", "profile"))
    shown = call("plan", "--help").output
    assert all(option in shown for option in ("--memory-limit", "--device", "--profile", "--simulate", "--json", "--plot"))


def test_plan_finds_what_search_finds(plan_content, description):
    expected, content = search(problem(description, HARDWARE, JOB, LIMIT)).plan, plan_content
    assert content["plan"]["fingerprint"] == expected.fingerprint
    assert content["estimated"]["peak_bytes"] + HARDWARE.outside_bytes(expected.communicators) == expected.peak_bytes
    assert content["hardware"]["margin"] == 0.04 and expected.peak_bytes <= HARDWARE.room_bytes(LIMIT) < LIMIT
    assert content["estimated"]["step_s"] == expected.step_s
    assert content["model"]["parameters"] == description.numel


def test_plan_shows_the_plan(planned, description):
    done = planned[1]
    assert done.stderr == ""
    assert_readable(done.stdout)
    assert search(problem(description, HARDWARE, JOB, LIMIT)).plan.fingerprint in done.stdout
    assert all(unit.label.split(".")[0] in done.stdout for unit in description.units)


def test_every_option_reaches_the_planner(model, config):
    content = as_json(
        "plan", model, "--sequence-length", 16, "--global-batch-size", 96, "--device", "a100-40", "--num-nodes", 2, "--devices-per-node", 3,
        "--precision", "bf16", "--optimizer", "sgd", "--strategy", "hsdp", "--micro-batch-size", 4, "--activation-checkpointing",
        "--block-classes", "GPT2MLP", "--auto-class", "AutoModel",
    )  # fmt: skip
    hardware = preset("a100-40", nodes=2, devices_per_node=3)
    description = describe(
        config, sequence_length=16, device_type="cuda", compute_dtype=DType.BFLOAT16, block_classes=["GPT2MLP"], auto_class="AutoModel",
        activation_checkpointing=True,
    )  # fmt: skip
    job = TrainingJob(
        global_batch_size=96, micro_batch_size=4, precision=Precision.named("bf16"), optimizer=OptimizerSpec(name="sgd", states=0)
    )
    expected = search(problem(description, hardware, job, hardware.device.memory_bytes, strategy="hsdp")).plan
    assert content["plan"]["fingerprint"] == expected.fingerprint
    assert content["estimated"]["peak_bytes"] + hardware.outside_bytes(expected.communicators) == expected.peak_bytes
    assert content["plan"]["memory_limit_bytes"] == hardware.device.memory_bytes
    assert content["model"]["class"] == "GPT2Model"


def test_adapters_are_planned_for(model, config, description):
    pytest.importorskip("peft")
    content = as_json("plan", model, *ROOMY, "--lora-rank", 2, "--lora-targets", "c_attn")
    adapters = config.n_layer * 2 * (config.n_embd + 3 * config.n_embd)
    assert content["model"]["parameters"] == description.numel + adapters
    assert content["estimated"]["peak_breakdown"]["optimizer"] <= 2 * 4 * adapters


def test_a_folder_is_a_model_too(model):
    file, folder = (as_json("plan", path, *SIZES, *DEVICES)["plan"] for path in (model, model.removesuffix("/config.json")))
    assert file == folder


def test_the_output_runs_and_holds_what_it_was_made_from(plan_file, description):
    plan, inputs = read_plan_file(plan_file)
    assert plan == Plan.load(plan_file)
    plan.check(description, 4)
    assert inputs.hardware == HARDWARE and inputs.job == JOB
    assert estimate_plan(plan, inputs.description, inputs.job, inputs.hardware).time.step_s == plan.step_s


def test_explain_needs_the_file_alone(plan_file):
    plan, inputs = read_plan_file(plan_file)
    done = call("explain", plan_file)
    assert done.exit_code == 0 and "What binds: " in done.stdout
    assert_readable(done.stdout)
    expected = explain(plan, inputs)
    assert as_json("explain", plan_file) == json.loads(json.dumps(explanation_content(expected)))


def test_the_margin_is_an_option_of_commands(model, plan_file):
    none = as_json("plan", model, *OPTIONS, "--margin", 0)
    assert none["hardware"]["margin"] == 0 and none["plan"]["peak_bytes"] > as_json("plan", model, *OPTIONS)["plan"]["peak_bytes"]
    for command in ("plan", "compare", "what-if"):
        done = call(command, model, *OPTIONS, "--margin", "1.5")
        said = "--margin=1.5 must be the share of the limit that stays free, at least 0 and below 1, such as 0.04."
        assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert "--margin would have no effect" in call("explain", plan_file, "--margin", "0.1").stderr


def test_explain_takes_a_bare_plan_with_its_model(plan_file, model, tmp_path):
    Plan.load(plan_file).save(tmp_path / "bare.json")
    assert "add --model" in call("explain", tmp_path / "bare.json").stderr
    content = as_json("explain", tmp_path / "bare.json", "--model", model, "--device", "titan-rtx")
    assert content["rows"] == as_json("explain", plan_file)["rows"]


def test_compare_holds_all_strategies_and_the_front(model, description, tmp_path):
    rows = compare_strategies(problem(description, HARDWARE, JOB, LIMIT))
    peaks = [row.result.plan.peak_bytes for row in rows if row.result]
    front = frontier(
        problem(description, HARDWARE, JOB, HARDWARE.room_bytes(HARDWARE.device.memory_bytes)),
        points=3,
        at=[HARDWARE.room_bytes(LIMIT), *peaks],
    )
    done = call("compare", model, *WHOLE, "--points", 3, "--json", tmp_path / "x.json", "--plot", tmp_path / "x.png")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "x.json").read_text()) == json.loads(json.dumps(comparison_content(HARDWARE, LIMIT, rows, front)))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert_readable(done.stdout)
    assert all(row.strategy.value in done.stdout for row in rows)


@pytest.mark.slow
def test_what_if_answers_by_searching(model, description, monkeypatch):
    monkeypatch.setattr(what_if, "_LONGEST", 64)  # every size that is tried is another trace
    monkeypatch.setattr(what_if, "_WIDEST", 1.5)
    answers = {row["question"]: row for row in as_json("what-if", model, *WHOLE)["answers"]}
    now = search(problem(description, HARDWARE, JOB, LIMIT)).plan
    assert answers["now"]["result"]["samples_per_s"] == now.samples_per_s
    assert answers["twice the memory"]["result"]["step_s"] == search(problem(description, HARDWARE, JOB, 2 * LIMIT)).plan.step_s
    more = search(problem(description, preset("titan-rtx", devices_per_node=5), TrainingJob(global_batch_size=35), LIMIT)).plan
    assert answers["one more device"]["result"]["samples_per_s"] == more.samples_per_s
    assert "from 32 to 35" in answers["one more device"]["change"]
    longest, widest = answers["longest sequence"], answers["largest width"]
    assert longest["result"]["sequence_length"] == 64 and longest["result"]["peak_bytes"] <= LIMIT
    assert longest["change"] == "64 tokens or more"
    assert widest["parameters"] > description.numel and widest["result"]["peak_bytes"] <= LIMIT


def test_simulation_stands_beside_the_estimate(model, tmp_path):
    done = call("plan", model, *ROOMY, "--simulate", "--json", tmp_path / "x.json", "--plot", tmp_path / "x.svg")
    assert done.exit_code == 0, done.stderr
    assert "simulated" in done.stdout and "%" in done.stdout
    assert_readable(done.stdout)
    assert (tmp_path / "x.svg").read_bytes().startswith(b"<svg")
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["simulated"][-1]["fingerprint"] == content["plan"]["fingerprint"]
    assert content["simulated"][-1]["peak_bytes"] == pytest.approx(content["estimated"]["peak_bytes"], rel=0.05)


def test_json_to_a_file_leaves_the_tables(plan_file, tmp_path):
    done = call("explain", plan_file, "--json", tmp_path / "report.json", "--plot", tmp_path / "x.html")
    assert "What binds: " in done.stdout
    assert json.loads((tmp_path / "report.json").read_text()) == as_json("explain", plan_file)
    assert (tmp_path / "x.html").stat().st_size > 2000


@pytest.fixture
def profile_file(description, tmp_path) -> str:
    """Measured links, and blocks that take a second forward and two backward whatever the batch."""
    points = (TimePoint(samples=1, forward_s=1.0, backward_s=2.0), TimePoint(samples=2, forward_s=1.0, backward_s=2.0))
    segments = tuple(
        SegmentTimes(
            class_name=description.units[segment.unit].class_name,
            parameter_shapes=tuple(p.shape for p in description.units[segment.unit].parameters),
            sequence_length=32,
            compute_dtype=DType.FLOAT32,
            work=SegmentWork.of(segment),
            points=points,
        )
        for segment in description.segments
    )
    Profile(hardware=HARDWARE, segments=segments).save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_a_profile_stands_in_for_the_device(model, description, profile_file):
    content = as_json("plan", model, *SIZES, "--profile", profile_file)
    timed = with_block_times(description, Profile.load(profile_file))
    expected = search(problem(timed, HARDWARE, JOB, HARDWARE.device.memory_bytes)).plan
    assert content["plan"]["fingerprint"] == expected.fingerprint
    assert content["estimated"]["step_s"] == expected.step_s > 3 * len(description.segments)
    more = as_json("plan", model, *SIZES, "--profile", profile_file, "--devices-per-node", 8)
    assert more["plan"]["world_size"] == 8


def test_a_profile_of_other_lengths_is_one_line(model, profile_file):
    done = call("plan", model, "--sequence-length", 16, "--global-batch-size", 32, "--profile", profile_file)
    assert done.exit_code == 2 and "no times for" in done.stderr and done.stderr.count("\n") == 1


WRONG = [
    ((*SIZES,), "Neither was given"),
    ((*SIZES, "--device", "abacus"), "Hardware 'abacus' is not known"),
    ((*SIZES, *DEVICES, "--profile", "none.json"), "Both were given"),
    ((*SIZES, "--profile", "none.json"), "Cannot read the profile none.json"),
    ((*SIZES, *DEVICES, "--memory-limit", "lots"), "is not a number of bytes"),
    ((*SIZES, *DEVICES, "--memory-limit", "25GiB"), "more than the 24.0 GiB of TITAN RTX"),
    ((*SIZES, *DEVICES, "--micro-batch-size", "5"), "micro_batch_size=5 does not divide"),
    ((*SIZES, "--device", "titan-rtx", "--devices-per-node", "5"), "does not divide by 5 processes"),
    ((*SIZES, *DEVICES, "--strategy", "hsdp", "--devices-per-node", "1"), "strategy=hsdp needs a group size"),
    ((*SIZES, "--device", "cpu", "--precision", "fp16"), "float16 rate of CPU is not known"),
    (("--sequence-length", "65", "--global-batch-size", "32", *DEVICES), "more than the 64 positions"),
    ((*OPTIONS, "--block-classes", "LlamaDecoderLayer"), "LlamaDecoderLayer"),
    ((*OPTIONS, "--auto-class", "AutoModelForNothing"), "AutoModelForNothing"),
    ((*OPTIONS, "--lora-targets", "c_attn"), "--lora-targets c_attn has no effect without --lora-rank"),
    ((*OPTIONS, "--lora-rank", "2", "--lora-targets", "nothing"), "LoRA adapters cannot be put into GPT2LMHeadModel"),
    ((*OPTIONS, "--output", "no/such/folder/plan.json"), "there is no folder"),
    ((*OPTIONS, "--json", "no/such/folder/x.json"), "there is no folder"),
    ((*OPTIONS, "--plot", "chart.pdf"), "use one of .png, .svg, .html"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_input_is_one_line_and_code_2(model, options, message):
    done = call("plan", model, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, "no such file or folder"),
        ("config.json", "{", "not a valid JSON"),
        ("config.json", "{}", "model_type"),
        ("config.json", '{"model_type": "gpt2", "n_embd": "wide"}', "n_embd"),
        ("config.json", '{"model_type": "gpt2", "n_layer": 2, "n_embd": 63, "n_head": 4}', "63"),
    ],
)
def test_unreadable_models_are_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    done = call("plan", tmp_path / name, *OPTIONS)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = call("plan", "no-such-owner/no-such-model", *OPTIONS)
    assert done.exit_code == 2
    assert "cannot be reached" in done.stderr and done.stderr.count("\n") == 1


def test_nothing_fits_is_one_line_and_code_1(model):
    done = call("plan", model, *SIZES, *DEVICES, "--memory-limit", "100KiB")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "No plan fits 100.0 KiB" in done.stderr and done.stderr.count("\n") == 1


def test_explain_refuses_options_that_would_have_no_effect(plan_file):
    done = call("explain", plan_file, "--device", "h100")
    assert done.exit_code == 2 and "--device would have no effect" in done.stderr


def test_explain_of_no_plan_is_one_line(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    for path in (tmp_path / "x.json", tmp_path / "none.json"):
        done = call("explain", path)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1


def test_the_command_line_loads_nothing_heavy():
    code = "import sys, hf_osdp.cli.app; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert not {"torch", "transformers", "ortools", "altair", "pydantic"} & set(loaded)
