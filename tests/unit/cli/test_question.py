"""What the planner's page is asked and answers, without the page: the same as the command line."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from urllib.parse import parse_qsl

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from typer.testing import CliRunner

from hf_osdp import OSDPConfig
from hf_osdp.cli.app import app
from hf_osdp.cli.output import error_line
from hf_osdp.cli.question import Planner, Question
from hf_osdp.preparation import cache

SHAPE = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 64}
SIZES = {"devices_per_node": 4, "sequence_length": 32, "global_batch_size": 32}
QUESTION = Question(model="", config=json.dumps(SHAPE), device="a100-40", memory_limit="30GiB", **SIZES)


@pytest.fixture(scope="module")
def planner():
    return Planner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the command of a question finds its config.json."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "config.json").write_text(QUESTION.config)
    return folder


def command_line(question: Question, folder, command: str = "plan", *more: str):
    path = [str(folder / "config.json")] if question.config else [question.model] * bool(question.model)
    return CliRunner().invoke(app, [command, *path, *question.options, *more])


def line(planner: Planner, question: Question) -> str:
    with pytest.raises(Exception) as refused:
        planner.plan(question)
    text = error_line(refused.value, ["plan", *question.options])
    assert text is not None and error_line(KeyError("x"), []) is None
    return text


def test_plan_and_comparison_are_those_of_the_shown_command(planner, folder):
    planned = planner.plan(QUESTION)
    content = json.loads(command_line(QUESTION, folder, "compare", "--points", "2", "--json", "-").stdout)
    rows = [(row.label, row.result.plan.step_s) for row in planned.compared]
    assert rows == [(row["strategy"], row["step_s"]) for row in content["strategies"]] and len(rows) >= 6
    content = json.loads(command_line(QUESTION, folder, "plan", "--json", "-").stdout)
    assert content["plan"]["fingerprint"] == planned.plan.fingerprint
    assert content["estimated"]["step_s"] == planned.estimate.time.step_s == planned.plan.step_s
    assert QUESTION.command == f"hf-osdp plan config.json {' '.join(QUESTION.options)}"
    assert "--compile" not in QUESTION.options
    assert replace(QUESTION, compile=True, memory_limit="").options[-1] == "--compile"


def test_warnings_are_kept_with_what_was_traced(planner):
    turing = replace(QUESTION, device="titan-rtx", precision="bf16", memory_limit="")
    first, again = planner.plan(turing), planner.plan(replace(turing, memory_limit="20GiB"))
    assert first.warnings == again.warnings
    assert "bfloat16 has no other kernel on compute capability 7.5" in first.warnings[0]
    assert planner.plan(QUESTION).warnings == ()


def test_model_is_described_once_for_other_limits_and_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("OSDP_CACHE", str(tmp_path))
    planner, lengths, stock = Planner(), [], cache.describe

    def described(*given, **options):
        lengths.append(options["sequence_length"])
        return stock(*given, **options)

    monkeypatch.setattr(cache, "describe", described)
    first = planner.plan(QUESTION)
    assert planner.plan(replace(QUESTION)) is first and lengths == [32]
    planner.plan(replace(QUESTION, memory_limit="20GiB", devices_per_node=8))
    assert lengths == [32]
    planner.plan(replace(QUESTION, sequence_length=16))
    assert lengths == [32, 16]


def test_what_if_plans_for_other_devices_and_raises_the_batch(planner):
    before, after = planner.what_if(QUESTION, "20GiB", 5)
    assert before.plan is planner.plan(QUESTION).plan
    assert after.change == "5 devices, global batch raised from 32 to 35, 20GiB each"
    asked = replace(QUESTION, memory_limit="20GiB", devices_per_node=5, global_batch_size=35)
    assert after.plan == planner.plan(asked).plan and after.plan.world_size == 5
    assert planner.what_if(replace(QUESTION, num_nodes=2), "30GiB", 2)[1].change == "2 nodes x 2 devices, 30GiB each"
    _, after = planner.what_if(QUESTION, "1GiB", 4)
    assert after.plan is None and after.reason.startswith("needs 1.") and after.reason.endswith("GiB")


@pytest.mark.parametrize(
    "question",
    [
        QUESTION,
        Question(),
        Question(model="a/b", compile=True, memory_limit="40GiB", num_nodes=3, precision="no"),
        Question(sequence_length=None, device=""),
        replace(QUESTION, config='{"model_type": "gpt2", "name": "ä & b=c?#%"}'),
    ],
)
def test_link_keeps_the_question(question):
    assert Question.of_link(dict(parse_qsl(question.link[1:], keep_blank_values=True))) == question
    too_long = json.dumps(SHAPE | {"id2label": {i: "label" for i in range(2000)}})
    assert replace(question, config=too_long).link == ""


def test_link_ignores_what_hosts_add_and_refuses_unknown_fields():
    known = Question.of_link({"__theme": "dark", "device": "h100", "compile": "1"})
    assert known == Question(device="h100", compile=True)
    with pytest.raises(ValueError, match="'devise', which is not a field of a question; use model, config, device"):
        Question.of_link({"devise": "h100"})
    for field, value in (("num_nodes", "two"), ("compile", "yes"), ("sequence_length", "-1"), ("num_nodes", "9" * 10)):
        with pytest.raises(ValueError, match="which is not a whole number"):
            Question.of_link({field: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_limit": "lots"}, "memory-limit='lots' is not a number of bytes"),
        ({"config": "", "model": ""}, "MODEL"),
        ({"config": "", "model": "nowhere/nothing"}, "'nowhere/nothing'"),
    ],
)
def test_errors_are_the_lines_of_the_command_line(planner, folder, monkeypatch, change, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = line(planner, question := replace(QUESTION, **change))
    assert said in text and f"hf-osdp: {text}\n" == command_line(question, folder).stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"devices_per_node": 2.5}, "--devices-per-node 2.5 is not a whole number; enter a whole number."),
        ({"devices_per_node": None}, "--devices-per-node is empty; enter a whole number."),
        ({"model": "gpt2"}, "Both MODEL 'gpt2' and a config.json were given; clear one of them."),
        ({"config": "", "model": "/etc/hosts"}, "MODEL '/etc/hosts' is not a hub id; upload its config.json"),
        ({"config": "", "model": "--json=x"}, "MODEL '--json=x' is not a hub id"),
        ({"config": "{}"}, "it is not a JSON object with a model_type"),
        ({"config": "{"}, "it is not a JSON object with a model_type"),
        ({"config": '{"model_type": "../../x"}'}, "has no configuration that transformers can read"),
    ],
)
def test_what_only_the_page_takes_is_refused_in_one_line(planner, change, said):
    assert said in line(planner, replace(QUESTION, **change))


@pytest.mark.parametrize("model", ["gpt2", "runs/gpt2"])
def test_page_reads_no_local_folder_and_shows_no_path(planner, tmp_path, monkeypatch, model):
    (tmp_path / model).mkdir(parents=True)
    (tmp_path / model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert f"MODEL {model!r} is not a hub id" in line(planner, replace(QUESTION, config="", model=model))
    said = line(planner, replace(QUESTION, config='{"model_type": "no such type"}'))
    assert said.startswith("MODEL 'config.json' has no configuration that transformers can read") and "/" not in said


def test_script_asks_for_the_plan_that_is_shown(planner):
    def calls(question: Question) -> dict[str, str]:
        tree = ast.parse(planner.plan(question).script)
        return {node.targets[0].id: ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign)}

    config = eval(calls(QUESTION)["osdp"], {"OSDPConfig": OSDPConfig})
    assert config == OSDPConfig(memory_limit="30GiB")
    assert calls(QUESTION)["trainer"].startswith("Trainer(model=model, args=args")
    assert calls(replace(QUESTION, memory_limit=""))["osdp"] == "True"
    plan = planner.plan(QUESTION).plan
    sizes = f"_batch_size={plan.micro_batch_size}, gradient_accumulation_steps={plan.accumulation_steps}, bf16=True"
    assert f"per_device_train{sizes}" in planner.plan(QUESTION).script
    assert 4 * plan.micro_batch_size * plan.accumulation_steps == 32


@pytest.mark.parametrize(("nodes", "device"), [(1, "a100-40"), (2, "a100-40"), (1, "cpu")])
def test_launch_file_is_read_by_accelerate_and_asks_for_plan(planner, tmp_path, nodes, device):
    limit = "" if device == "cpu" else "30GiB"
    text = planner.plan(replace(QUESTION, num_nodes=nodes, device=device, memory_limit=limit)).launch_file
    (tmp_path / "osdp.yaml").write_text(text)
    config = load_config_from_file(str(tmp_path / "osdp.yaml"))
    options = config.fsdp_config["fsdp_sharding_strategy"]
    assert (config.num_machines, config.num_processes, config.use_cpu) == (nodes, 4 * nodes, device == "cpu")
    assert config.mixed_precision == ("no" if device == "cpu" else "bf16")
    assert options == {"osdp": True} | ({"use_cpu": True} if device == "cpu" else {"memory_limit": "30GiB"})


def test_built_in_shape_is_announced(planner, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (said, *_) = planner.plan(Question(model="openai-community/gpt2", device="a100-80", **SIZES)).warnings
    assert "using the built-in shape of openai-community/gpt2" in said and not said.startswith("hf-osdp")


def test_app_without_its_extra_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hf_osdp.cli.browser")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = CliRunner().invoke(app, ["app"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "hf-osdp: The page needs gradio, which is not installed; run: pip install 'hf_osdp[app]'.\n"
