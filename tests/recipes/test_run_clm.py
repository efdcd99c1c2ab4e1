"""The causal language modelling recipe, from its command line to the model it saves."""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_osdp import OSDPConfig
from tests.helpers.output import ends_of
from tests.helpers.shared_data import SHARED_DATA, needs_shared_data
from tests.recipes.conftest import Recipe, load_saved, log_of, perplexities
from tests.recipes.ranks import run_together

ROOT = Path(__file__).parents[2]
SCRIPT = "run_clm"
POSITIVE = ("grad_norm", "tokens_per_s", "free_device_memory_bytes")
FIGURES = {"step", "epoch", "loss", "perplexity", "learning_rate", "loss_scale", *POSITIVE}


@pytest.mark.parametrize("is_launched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_train_and_save(recipe, is_launched):
    """With the file of the demo: plan, train, evaluate, save; what is saved loads again. A person launches it."""
    demo = str(ROOT / "recipes" / "gpt2" / "demo.yaml")
    if is_launched:
        printed = recipe.run(demo, processes=2, warmup_steps=0)
    else:
        (printed,) = run_together(recipe.folder, [recipe.job("out", demo, warmup_steps=0)])
    perplexity = perplexities(printed)
    assert perplexity["after"] < 0.7 * perplexity["before"]

    model, tokenizer = load_saved(recipe.output), AutoTokenizer.from_pretrained(recipe.output)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert tokenizer.decode(tokenizer("The class statement")["input_ids"]) == "The class statement"
    report = json.loads((recipe.output / "osdp_report.json").read_text())
    assert report["plan"]["world_size"] == 2


@pytest.mark.slow
def test_stream_trains_as_its_text_does_and_resumes(recipe):
    """Two micro-batches a step on two ranks: every sample once, in the same order, also from a checkpoint."""
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
        same = steps[line["step"] - 1]
        assert (line["loss"], line["grad_norm"]) == (same["loss"], same["grad_norm"])
    for line in steps:
        assert line.keys() == FIGURES and line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    assert steps[0]["learning_rate"] == 0.02 and steps[0]["loss_scale"] == 1.0
    assert min(line[name] for line in steps for name in POSITIVE) > 0
    assert [line["step"] for line in text if "eval_loss" in line] == [0, 6]
    assert text[-1]["eval_perplexity"] == pytest.approx(printed[0]["after"], abs=0.01)


def test_file_of_arguments_first_and_flags_win(recipe):
    short = recipe.folder / "short.yaml"
    nowhere = recipe.folder / "nowhere"
    short.write_text(f"max_steps: 1\nlearning_rate: 1e-3\nseed: 7\nstrategy: ddp\noutput_dir: {nowhere}\n")
    job = recipe.job("out", str(short), max_steps=2, learning_rate=None, max_train_samples=16)
    run_together(recipe.folder, [job], processes=1)
    state = json.loads((recipe.output / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert not nowhere.exists()
    assert torch.load(recipe.output / "training_args.bin", weights_only=False).learning_rate == 1e-3
    assert json.loads((recipe.output / "osdp_report.json").read_text())["plan"]["strategy"] == "ddp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [("run_clm", {"do_eval": False, "fp16": True}), ("run_clm_no_trainer", {"mixed_precision": "fp16"})],
)
def test_fp16_logs_its_loss_scale_and_keeps_float32_weights(tmp_path, script, options):
    recipe = Recipe(script, tmp_path)
    recipe.run(processes=2, max_steps=4, max_train_samples=32, hardware=None, logging_steps=2, **options)
    assert all(line["loss_scale"] > 1 for line in log_of(recipe.output))
    load_saved(recipe.output)


@pytest.mark.slow
@needs_shared_data
def test_wikitext_with_the_vocabulary_of_gpt2(recipe):
    options = dict(
        train_file=SHARED_DATA / "wikitext-2" / "validation.txt",
        validation_file=SHARED_DATA / "wikitext-2" / "test.txt", tokenizer_name=SHARED_DATA / "tokenizers" / "gpt2",
        max_train_samples=24, max_steps=3, per_device_eval_batch_size=4,
    )  # fmt: skip
    printed = recipe.run(**options)
    perplexity = perplexities(printed)
    assert perplexity["after"] < perplexity["before"]
    options |= {"do_train": None, "osdp": False, "hardware": None, "output_dir": recipe.folder / "stock"}
    stock = recipe.run(**options)
    assert float(re.search(r"perplexity: ([\d.]+)", stock).group(1)) == pytest.approx(perplexity["before"], rel=1e-6)
    assert not (recipe.folder / "stock" / "osdp_report.json").exists()


@pytest.mark.slow
@needs_shared_data
def test_starts_from_a_saved_model(recipe):
    text = recipe.folder / "story.txt"
    text.write_text("Once upon a time there was a little girl who liked to play in the park with her dog.\n" * 60)
    start = dict(model_name_or_path=SHARED_DATA / "models" / "stories260K", config_overrides=None)
    job = recipe.job("out", train_file=text, max_steps=2, learning_rate=1e-4, **start)
    assert perplexities(run_together(recipe.folder, [job], processes=1)[0])["before"] < 60


@pytest.mark.slow
def test_infeasible_limit_ends_two_processes_with_one_line(recipe):
    printed = recipe.run(processes=2, fails=True, memory_limit="100KiB")
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "No plan fits 100.0 KiB" in lines[0], ends_of(printed)
    assert not recipe.output.exists()


@pytest.mark.parametrize("script", ["run_clm", "run_mlm", "run_glue"])
@pytest.mark.parametrize(
    ("launched", "flag", "want"),
    [
        (None, None, {"memory_limit": "1GiB"}),
        (None, "false", False),
        ("{'osdp': True}", None, {"memory_limit": "1GiB"}),
        ("{'osdp': True}", "false", False),
        ("{'osdp': False}", None, False),
        ("{'osdp': False}", "true", {"memory_limit": "1GiB"}),
    ],
)
def test_launcher_decides_unless_a_flag_does(monkeypatch, tmp_path, script, launched, flag, want):
    module = importlib.import_module(script)
    if launched is not None:
        launcher = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": launched}
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
    argv = ["--memory_limit", "1GiB", "--output_dir", str(tmp_path), *(["--osdp", flag] if flag else [])]
    assert module.parse_arguments((module.ModelArguments, module.TrainingArguments), argv)[-1] == want


def test_every_option_of_osdp_is_a_flag_with_its_type(tmp_path):
    import run_clm

    flags = "--memory_limit 6.3MiB --micro_batch_size 2 --recompute true --block_classes A,B --nodes 2"
    argv = ["--output_dir", str(tmp_path), *flags.split(), "--memory_margin", "0.1"]
    *_, osdp = run_clm.parse_arguments((run_clm.TrainingArguments,), argv)
    config = OSDPConfig.from_options(osdp)
    assert (config.memory_limit, config.micro_batch_size, config.recompute, config.nodes) == ("6.3MiB", 2, True, 2)
    assert config.block_classes == ("A", "B") and config.memory_margin == 0.1


@pytest.mark.parametrize("script", ["run_clm", "run_clm_no_trainer", "run_glue", "run_mlm", "sft", "train_plain"])
def test_recipe_is_a_single_file(script):
    """It imports libraries alone; run_glue.py takes its made sentences, and only those, from beside it."""
    tree = ast.parse((ROOT / "recipes" / f"{script}.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    beside = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert imported & beside == ({"made_reviews"} if script == "run_glue" else set())
