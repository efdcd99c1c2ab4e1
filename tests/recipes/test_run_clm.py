"""The causal language modelling recipe, from its command line to the model it saves."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from transformers import AutoTokenizer, TrainingArguments

from hf_osdp import OSDPConfig
from hf_osdp.integrations.arguments import parse_arguments
from tests.recipes.conftest import RECIPES, Recipe, Written, perplexities, run_together

DEMO = str(RECIPES / "gpt2" / "demo.yaml")
POSITIVE = ("grad_norm", "tokens_per_s", "free_device_memory_bytes")
FIGURES = {"step", "epoch", "loss", "perplexity", "learning_rate", "loss_scale", *POSITIVE}


def test_two_processes_train_and_save_what_the_stock_trainer_loads(tmp_path):
    """With the file of the demo; then its model in the stock Trainer, and a file whose arguments flags change."""
    recipe = Recipe("run_clm", tmp_path)
    short, nowhere, ended = tmp_path / "short.yaml", tmp_path / "nowhere", Written(tmp_path / "ended")
    short.write_text(f"max_steps: 1\nlearning_rate: 1e-3\nseed: 7\nstrategy: ddp\noutput_dir: {nowhere}\n")
    start = {"model_name_or_path": recipe.output, "config_overrides": None, "hardware": None}
    jobs = [
        recipe.job("out", DEMO, warmup_steps=0),
        recipe.job("stock", **start, do_train=None, osdp=False),
        recipe.job("ended", str(short), max_steps=2, learning_rate=None, max_train_samples=16),
    ]
    printed = run_together(tmp_path, jobs)
    perplexity = perplexities(printed[0])
    assert perplexity["after"] < 0.7 * perplexity["before"]
    model, tokenizer = Written(recipe.output).load(), AutoTokenizer.from_pretrained(recipe.output)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert tokenizer.decode(tokenizer("The class statement")["input_ids"]) == "The class statement"
    assert Written(recipe.output).plan["world_size"] == 2

    stock = float(re.search(r"perplexity: ([\d.]+)", printed[1]).group(1))
    assert stock == pytest.approx(perplexity["after"], abs=0.02)
    assert not (tmp_path / "stock" / "osdp_report.json").exists() and not nowhere.exists()

    assert json.loads((ended.folder / "trainer_state.json").read_text())["global_step"] == 2
    assert torch.load(ended.folder / "training_args.bin", weights_only=False).learning_rate == 1e-3
    assert ended.plan["strategy"] == "ddp"


@pytest.mark.slow
def test_stream_trains_as_its_text_does_and_resumes(tmp_path):
    """Two micro-batches a step on two ranks: every sample once, in the same order, also from a checkpoint.

    In fp16 the loss scale is logged, and weights stay in float32.
    """
    recipe = Recipe("run_clm", tmp_path)
    options = dict(micro_batch_size=2, logging_steps=1)
    streaming = dict(**options, streaming=True, shuffle_buffer=0, max_train_samples=None)
    fp16 = dict(fp16=True, do_eval=False, max_steps=4, max_train_samples=32, hardware=None, logging_steps=2)
    jobs = [
        recipe.job("text", train_sampling_strategy="sequential", **options),
        recipe.job("stream", save_strategy="steps", save_steps=3, **streaming),
        recipe.job("stream", resume_from_checkpoint=tmp_path / "stream" / "checkpoint-3", **streaming),
        recipe.job("half", **fp16),
    ]
    printed = [perplexities(text) for text in run_together(tmp_path, jobs)]
    assert printed[0]["after"] == printed[1]["after"] == printed[2]["after"] < 0.7 * printed[0]["before"]
    text, stream, half = (Written(tmp_path / name) for name in ("text", "stream", "half"))
    steps, streamed = text.steps, stream.steps
    assert [line["step"] for line in streamed] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    for line in streamed:
        same = steps[line["step"] - 1]
        assert (line["loss"], line["grad_norm"]) == (same["loss"], same["grad_norm"])
    for line in steps:
        assert line.keys() == FIGURES and line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    assert steps[0]["learning_rate"] == 0.02 and steps[0]["loss_scale"] == 1.0
    assert min(line[name] for line in steps for name in POSITIVE) > 0
    assert [line["step"] for line in text.log if "eval_loss" in line] == [0, 6]
    assert text.log[-1]["eval_perplexity"] == pytest.approx(printed[0]["after"], abs=0.01)
    assert all(line["loss_scale"] > 1 for line in half.log)
    half.load()


@pytest.mark.parametrize("launched", [None, True, False])
@pytest.mark.parametrize("flag", [None, "true", "false"])
def test_launcher_decides_unless_a_flag_does(monkeypatch, launched, flag):
    if launched is not None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
        monkeypatch.setenv("FSDP_SHARDING_STRATEGY", str({"osdp": launched}))
    argv = ["--memory_limit", "1GiB", "--output_dir", "out", *(["--osdp", flag] if flag else [])]
    stock = flag == "false" or (flag is None and launched is False)
    assert parse_arguments((TrainingArguments,), argv)[-1] == (False if stock else {"memory_limit": "1GiB"})


def test_every_option_of_osdp_is_a_flag_with_its_type():
    flags = "--output_dir out --memory_limit 6.3MiB --micro_batch_size 2 --recompute true --block_classes A,B"
    *_, osdp = parse_arguments((TrainingArguments,), [*flags.split(), "--nodes", "2", "--memory_margin", "0.1"])
    config = OSDPConfig.from_options(osdp)
    assert (config.memory_limit, config.micro_batch_size, config.recompute, config.nodes) == ("6.3MiB", 2, True, 2)
    assert config.block_classes == ("A", "B") and config.memory_margin == 0.1
