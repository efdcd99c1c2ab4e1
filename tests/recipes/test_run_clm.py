"""The causal language modelling recipe, from its command line to the model it saves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]


def perplexities(output: str) -> dict[str, float]:
    return {when: float(value) for when, value in re.findall(r"perplexity (before|after) training: ([\d.]+)", output)}


def test_two_processes_train_save_and_go_on(recipe):
    """The whole road in one: plan, train, evaluate, checkpoint, save, load, resume."""
    first = recipe.run(processes=2, save_strategy="steps", save_steps=3)
    assert first.returncode == 0, first.stderr[-3000:]
    perplexity = perplexities(first.stdout)
    assert perplexity["after"] < 0.7 * perplexity["before"]

    saved = load_file(recipe.output / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    model, report = AutoModelForCausalLM.from_pretrained(recipe.output, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight
    tokenizer = AutoTokenizer.from_pretrained(recipe.output)
    assert tokenizer.decode(tokenizer("The class statement")["input_ids"]) == "The class statement"
    assert len(tokenizer) == model.config.vocab_size == 300

    report = json.loads((recipe.output / "osdp_report.json").read_text())
    assert report["plan"]["world_size"] == 2

    again = recipe.run(
        processes=2, save_strategy="no", resume_from_checkpoint=recipe.output / "checkpoint-3", output_dir=recipe.folder / "again"
    )
    assert again.returncode == 0, again.stderr[-3000:]
    resumed = load_file(recipe.folder / "again" / "model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in saved.items())


def test_file_of_arguments_first_and_flags_win(recipe):
    (recipe.folder / "short.yaml").write_text("max_steps: 1\nlearning_rate: 1e-3\nseed: 7\nstrategy: ddp\noutput_dir: nowhere\n")
    done = recipe.run("short.yaml", max_steps=2, learning_rate=None, max_train_samples=16)
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((recipe.output / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert not (recipe.folder / "nowhere").exists()
    assert torch.load(recipe.output / "training_args.bin", weights_only=False).learning_rate == 1e-3
    assert json.loads((recipe.output / "osdp_report.json").read_text())["plan"]["strategy"] == "ddp"


@pytest.mark.slow
def test_fp16_keeps_float32_weights(recipe):
    done = recipe.run(processes=2, max_steps=3, max_train_samples=24, do_eval=False, hardware=None, fp16=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {value.dtype for value in load_file(recipe.output / "model.safetensors").values()} == {torch.float32}


@pytest.mark.slow
def test_wikitext_with_the_vocabulary_of_gpt2(recipe, shared_data):
    """Local text and a ready tokenizer; the stock Trainer starts at the same perplexity."""
    options = dict(
        train_file=shared_data / "wikitext-2" / "validation.txt",
        validation_file=shared_data / "wikitext-2" / "test.txt",
        tokenizer_name=shared_data / "tokenizers" / "gpt2",
        max_train_samples=24,
        max_steps=3,
        per_device_eval_batch_size=4,
    )
    done = recipe.run(**options)
    assert done.returncode == 0, done.stderr[-3000:]
    perplexity = perplexities(done.stdout)
    assert perplexity["after"] < perplexity["before"]
    stock = recipe.run(**{**options, "do_train": None, "osdp": False, "hardware": None, "output_dir": recipe.folder / "stock"})
    assert stock.returncode == 0, stock.stderr[-3000:]
    assert float(re.search(r"perplexity: ([\d.]+)", stock.stdout).group(1)) == pytest.approx(perplexity["before"], rel=1e-6)
    assert not (recipe.folder / "stock" / "osdp_report.json").exists()


def test_starts_from_a_saved_model(recipe, shared_data):
    text = recipe.folder / "story.txt"
    text.write_text("Once upon a time there was a little girl who liked to play in the park with her dog.\n" * 60)
    done = recipe.run(
        model_name_or_path=shared_data / "models" / "stories260K", train_file=text, config_overrides=None, max_steps=2, learning_rate=1e-4
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert perplexities(done.stdout)["before"] < 60


@pytest.mark.slow
def test_two_processes_end_with_one_line(recipe):
    """Every process fails; one of them says why."""
    done = recipe.run(processes=2, memory_limit="100KiB")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "No plan fits 100.0 KiB" in lines[0], done.stderr[-3000:]
    assert not recipe.output.exists()


BAD_INPUT = {
    "missing training file": (dict(train_file="none.txt"), "train file none.txt does not exist"),
    "missing validation file": (dict(train_file="some.txt", validation_file="none.txt"), "validation file none.txt does not exist"),
    "empty training file": (dict(train_file="empty.txt"), "empty.txt is empty"),
    "too short for a block": (dict(train_file="some.txt", validation_file="some.txt"), "less than one block of 32"),
    "unknown kind of file": (dict(train_file="some.pdf"), "of no known kind"),
    "one line, nothing to split": (dict(train_file="line.txt"), "line.txt has too little text to split (1 line)"),
    "another encoding": (dict(train_file="latin.txt"), "latin.txt is not UTF-8 text"),
    "malformed line of JSON": (dict(train_file="lines.jsonl"), "lines.jsonl, line 2, is not JSON"),
    "malformed JSON": (dict(train_file="whole.json"), "whole.json cannot be read as json"),
    "numbers for text": (dict(train_file="numbers.jsonl"), "`text` holds int64"),
    "upper-case extension, too short": (dict(train_file="UPPER.TXT", validation_file="UPPER.TXT"), "less than one block of 32"),
    "upper-case extension of JSON": (dict(train_file="LINES.JSONL"), "LINES.JSONL, line 2, is not JSON"),
    "longer than the positions": (dict(block_size=64), "block_size=64 is longer than the model's 32 positions"),
    "unknown strategy": (dict(strategy="zero3"), "strategy='zero3' is not known"),
    "unknown block class": (dict(block_classes="NoSuchBlock"), "NoSuchBlock"),
    "limit below the feasible": (dict(memory_limit="100KiB"), "No plan fits 100.0 KiB"),
    "unreadable limit": (dict(memory_limit="lots"), "memory_limit='lots'"),
    "micro-batch that does not divide": (dict(micro_batch_size=3), "micro_batch_size=3 does not divide"),
    "plan for another world": (dict(plan="world2.json", hardware=None), "The plan is for 2 processes, but 1 are running"),
    "group that does not divide the world": (dict(plan="group.json", hardware=None), "does not divide the world size"),
    "unreadable plan": (dict(plan="broken.json", hardware=None), "broken.json is not JSON"),
    "missing plan": (dict(plan="none.json", hardware=None), "Cannot read the plan none.json"),
    "unknown override": (dict(config_overrides="n_layers=2"), "config_overrides has 'n_layers=2'"),
    "override of another type": (dict(config_overrides="n_layer=two"), "n_layer takes a int"),
    "unknown model type": (dict(model_type="gpt9", config_overrides=None), "model_type='gpt9'"),
    "unknown flag": (dict(no_such_flag=1), "no_such_flag"),
    "value of another type": (dict(max_steps="many"), "many"),
    "no checkpoint": (dict(resume_from_checkpoint="nowhere"), "resume_from_checkpoint=nowhere holds no checkpoint"),
    "nothing to do": (dict(do_train=None, do_eval=None), "Nothing to do"),
    "fp16 on one CPU process": (dict(fp16=True), "use bf16"),
}


@pytest.fixture
def bad_files(recipe):
    (recipe.folder / "empty.txt").write_text(" \n")
    (recipe.folder / "some.txt").write_text("A few words only.\n")
    (recipe.folder / "UPPER.TXT").write_text("A few words only.\n")
    (recipe.folder / "line.txt").write_text("A few words only. " * 200)
    (recipe.folder / "latin.txt").write_bytes("Été à la mer.\n".encode("latin-1") * 50)
    (recipe.folder / "lines.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (recipe.folder / "LINES.JSONL").write_text('{"text": "fine"}\n{"text": \n')
    (recipe.folder / "whole.json").write_text('{"text": "fine"}\n{"text": \n')
    (recipe.folder / "numbers.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    (recipe.folder / "some.pdf").write_text("A few words only.\n")
    (recipe.folder / "broken.json").write_text("{ not a plan")
    plan = {
        "world_size": 2, "strategy": "osdp", "micro_batch_size": 4, "accumulation_steps": 1,
        "model_fingerprint": "0", "units": [{"fqn": "", "shard_size": 1, "reshard_after_forward": False}],
    }  # fmt: skip
    (recipe.folder / "world2.json").write_text(json.dumps(plan))
    plan["units"][0]["shard_size"] = 3
    (recipe.folder / "group.json").write_text(json.dumps(plan))


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(recipe, bad_files, in_process, case):
    changes, part = BAD_INPUT[case]
    code, errors = in_process(recipe, **changes)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 2, errors
    assert len(lines) == 1 and part in lines[0], errors
    assert not recipe.output.exists()


@pytest.mark.parametrize(
    ("launched", "flag", "want"),
    [
        (None, None, {"sequence_length": 32}),
        (None, False, False),
        ("{'osdp': True}", None, {"sequence_length": 32}),
        ("{'osdp': True}", False, False),
        ("{'osdp': False}", None, False),
        ("{'osdp': False}", True, {"sequence_length": 32}),
    ],
)
def test_the_launcher_decides_unless_a_flag_does(monkeypatch, launched, flag, want):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    from recipe_arguments import OSDPArguments

    environment = {} if launched is None else {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": launched}
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_SHARDING_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert OSDPArguments(osdp=flag).options(32) == want


@pytest.mark.parametrize(
    ("content", "part"),
    [("no_such_key: 1\n", "no_such_key"), ("- a list\n", "holds a list"), ("a: [\n", "not valid YAML")],
)
def test_bad_file_of_arguments(recipe, in_process, content, part):
    (recipe.folder / "bad.yaml").write_text(content)
    code, errors = in_process(recipe, "bad.yaml")
    assert code == 2 and part in errors and errors.count("error: ") == 1, errors
    assert not recipe.output.exists()
