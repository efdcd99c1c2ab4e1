"""The causal language modelling recipe, from its command line to the model it saves."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.shared_data import SHARED_DATA, needs_shared_data
from tests.recipes.conftest import log_of, perplexities
from tests.recipes.ranks import run_together

ROOT = Path(__file__).parents[2]


FIGURES = {
    "step", "epoch", "loss", "perplexity", "learning_rate", "gradient_norm", "loss_scale", "tokens_per_s", "free_device_memory_bytes",
}  # fmt: skip


def test_two_processes_train_and_save(recipe):
    """As a person starts it, with the file of the demo: plan, train, evaluate, save; what is saved loads again."""
    done = recipe.run(str(ROOT / "recipes" / "gpt2" / "demo.yaml"), processes=2, warmup_steps=0)
    assert done.returncode == 0, done.stderr[-3000:]
    perplexity = perplexities(done.stdout)
    assert perplexity["after"] < 0.7 * perplexity["before"]

    assert {value.dtype for value in load_file(recipe.output / "model.safetensors").values()} == {torch.float32}
    model, report = AutoModelForCausalLM.from_pretrained(recipe.output, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight
    tokenizer = AutoTokenizer.from_pretrained(recipe.output)
    assert tokenizer.decode(tokenizer("The class statement")["input_ids"]) == "The class statement"
    assert len(tokenizer) == model.config.vocab_size == 300

    report = json.loads((recipe.output / "osdp_report.json").read_text())
    assert report["plan"]["world_size"] == 2


@pytest.mark.slow
def test_a_stream_trains_as_its_text_does_and_goes_on(recipe):
    """Two micro-batches a step on two ranks: every sample once, in the same order, from the start and from a checkpoint."""
    options = dict(micro_batch_size=2, logging_steps=1)
    stream = dict(**options, streaming=True, shuffle_buffer=0, max_train_samples=None)
    jobs = [
        recipe.job("text", train_sampling_strategy="sequential", **options),
        recipe.job("stream", save_strategy="steps", save_steps=3, **stream),
        recipe.job("stream", resume_from_checkpoint=recipe.folder / "stream" / "checkpoint-3", **stream),
    ]
    printed = [perplexities(text) for text in run_together(recipe.folder, jobs)]
    assert printed[0]["after"] == printed[1]["after"] == printed[2]["after"] < 0.7 * printed[0]["before"]
    text, stream = (log_of(recipe.folder / name) for name in ("text", "stream"))
    steps, streamed = ([line for line in log if "loss" in line] for log in (text, stream))
    assert [line["step"] for line in streamed] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    for line in streamed:
        assert (line["loss"], line["gradient_norm"]) == (steps[line["step"] - 1]["loss"], steps[line["step"] - 1]["gradient_norm"])
    assert all(line.keys() == FIGURES and line["perplexity"] == pytest.approx(math.exp(line["loss"])) for line in steps)
    assert steps[0]["learning_rate"] == 0.02 and steps[0]["loss_scale"] == 1.0
    assert min(line[name] for line in steps for name in ("gradient_norm", "tokens_per_s", "free_device_memory_bytes")) > 0
    assert [line["step"] for line in text if "eval_loss" in line] == [0, 6]
    assert text[-1]["eval_perplexity"] == pytest.approx(printed[0]["after"], abs=0.01)


def test_file_of_arguments_first_and_flags_win(recipe):
    short = recipe.folder / "short.yaml"
    short.write_text(f"max_steps: 1\nlearning_rate: 1e-3\nseed: 7\nstrategy: ddp\noutput_dir: {recipe.folder / 'nowhere'}\n")
    run_together(recipe.folder, [recipe.job("out", str(short), max_steps=2, learning_rate=None, max_train_samples=16)], processes=1)
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
@needs_shared_data
def test_wikitext_with_the_vocabulary_of_gpt2(recipe):
    """Local text and a ready tokenizer; the stock Trainer starts at the same perplexity."""
    options = dict(
        train_file=SHARED_DATA / "wikitext-2" / "validation.txt",
        validation_file=SHARED_DATA / "wikitext-2" / "test.txt",
        tokenizer_name=SHARED_DATA / "tokenizers" / "gpt2",
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


@needs_shared_data
def test_starts_from_a_saved_model(recipe):
    text = recipe.folder / "story.txt"
    text.write_text("Once upon a time there was a little girl who liked to play in the park with her dog.\n" * 60)
    start = dict(model_name_or_path=SHARED_DATA / "models" / "stories260K", config_overrides=None)
    job = recipe.job("out", train_file=text, max_steps=2, learning_rate=1e-4, **start)
    assert perplexities(run_together(recipe.folder, [job], processes=1)[0])["before"] < 60


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
    "adapters of nothing": (dict(lora_rank=2), "lora_rank=2 trains adapters of a model that was trained; give model_name_or_path"),
    "targets without adapters": (dict(lora_targets="c_attn"), "lora_alpha and lora_targets need lora_rank"),
    "nothing to do": (dict(do_train=None, do_eval=None), "Nothing to do"),
    "fp16 on one CPU process": (dict(fp16=True), "use bf16"),
    "tracker that is not there": (dict(report_to="wandb"), "report_to=wandb is not installed here; install it, or use one of"),
    "stream without an end": (dict(streaming=True, max_steps=None), "streaming=true needs max_steps"),
    "negative buffer": (dict(streaming=True, shuffle_buffer=-1), "shuffle_buffer=-1 must be at least 0"),
    "stream of a missing file": (dict(streaming=True, train_file="none.txt"), "train file none.txt does not exist"),
    "stream of nothing": (dict(streaming=True, do_eval=None, train_file="empty.txt"), "empty.txt: the train text has less than one block"),
    "stream of numbers": (dict(streaming=True, train_file="numbers.jsonl"), "numbers.jsonl needs a column `text` of text; it holds int"),
    "stream of other columns": (dict(streaming=True, train_file="other.csv"), "it is not among name, words"),
    "malformed stream": (dict(streaming=True, train_file="lines.jsonl"), "lines.jsonl cannot be read as a stream: JSON parse error"),
    "stream in another encoding": (dict(streaming=True, train_file="latin.txt"), "latin.txt cannot be read as a stream: 'utf-8' codec"),
    "stream without validation": (
        dict(streaming=True, train_file="line.txt", max_eval_samples=None),
        "This stream has no validation text; give max_eval_samples",
    ),
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
    (recipe.folder / "other.csv").write_text("name,words\nAnna,fine\n")
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
    [
        ("no_such_key: 1\n", "no_such_key"),
        ("- a list\n", "holds a list"),
        ("a: [\n", "is not YAML (line 2"),
        ("max_steps: true\n", "takes a whole number"),
    ],
)
def test_bad_file_of_arguments(recipe, in_process, content, part):
    (recipe.folder / "bad.yaml").write_text(content)
    code, errors = in_process(recipe, "bad.yaml")
    assert code == 2 and part in errors and errors.count("error: ") == 1, errors
    assert not recipe.output.exists()
