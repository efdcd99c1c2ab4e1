"""Loops without the Trainer, Accelerate's and a plain one: learn, log, resume to the bit, evaluate samples once."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.conftest import GPT2, RECIPES, Recipe, Written, perplexities, run_together

OPTIONS = {
    "config_overrides": GPT2.replace("pdrop=0.0", "pdrop=0.1"), "micro_batch_size": 2, "max_steps": 10,
    "max_eval_samples": 19, "logging_steps": 1, "strategy": "fsdp", "seed": 1,
}  # fmt: skip


def plain_perplexity(folder: Path, samples: int) -> float:
    from shared import TextArguments, load_text_evenly_split, make_blocks, packing

    data, tokenizer = TextArguments(max_eval_samples=samples), AutoTokenizer.from_pretrained(folder)
    _, validation = make_blocks(load_text_evenly_split(data), packing(tokenizer, 32), 32, data)
    blocks = torch.tensor(validation["input_ids"][:])
    with torch.no_grad():
        return math.exp(AutoModelForCausalLM.from_pretrained(folder)(input_ids=blocks, labels=blocks).loss)


@pytest.mark.slow
def test_two_processes_train_log_save_and_resume_to_the_bit(tmp_path):
    """Two ranks, dropout, two micro-batches a step: two epochs; from a checkpoint amid the first one step by the file
    of arguments, and to the end, into the same folder; then fp16.
    """
    loop, file = Recipe("run_clm_no_trainer", tmp_path), str(RECIPES / "gpt2" / "no_trainer.yaml")
    resumed = {**OPTIONS, "resume_from_checkpoint": tmp_path / "text" / "checkpoint-5"}
    fp16 = {"mixed_precision": "fp16", "max_steps": 4, "max_train_samples": 32, "hardware": None, "logging_steps": 2}
    jobs = [
        loop.job("text", eval_steps=5, save_steps=5, **OPTIONS),
        loop.job("again", file, **{**resumed, "max_steps": 6, "warmup_steps": 0}),
        loop.job("again", **resumed),
        loop.job("half", **fp16),
    ]
    printed = [perplexities(text) for text in run_together(tmp_path, jobs)]
    text, again, half = (Written(tmp_path / name) for name in ("text", "again", "half"))
    perplexity = printed[0]
    assert perplexity["after"] < 0.7 * perplexity["before"]

    steps = text.steps
    assert [line["step"] for line in steps] == list(range(1, 11)) and steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    for line in steps:
        assert min(line[name] for name in ("perplexity", "grad_norm", "tokens_per_s", "free_device_memory_bytes")) > 0
        assert line["loss_scale"] == 1.0 and line["epoch"] == line["step"] / 8
    assert steps[0]["learning_rate"] == 0.02 and steps[-1]["learning_rate"] == pytest.approx(0.002)
    evaluated = {line["step"]: line["eval_perplexity"] for line in text.log if "eval_perplexity" in line}
    # 19 samples: one batch is not full
    assert list(evaluated) == [5, 10] and evaluated[10] == pytest.approx(perplexity["after"], abs=0.01)
    assert evaluated[10] == pytest.approx(plain_perplexity(text.folder, 19), rel=1e-5)
    assert text.load().config.architectures == ["GPT2LMHeadModel"]
    assert text.plan["accumulation_steps"] == 2

    saved, resaved = (load_file(run.folder / "model.safetensors") for run in (text, again))
    assert all(torch.equal(resaved[name], value) for name, value in saved.items())
    assert perplexity["after"] == printed[2]["after"]
    losses, continued = ([(line["step"], line["loss"]) for line in run.steps] for run in (text, again))
    assert continued == [losses[5], *losses[5:]], "the last run writes below the line of the one before"

    assert all(line["loss_scale"] > 1 for line in half.steps)
    half.load()


@pytest.mark.slow
def test_plain_loop_trains_and_saves(tmp_path):
    """With the file of arguments that is there, two micro-batches a step; what is saved loads again."""
    plain, file = Recipe("train_plain", tmp_path), str(RECIPES / "gpt2" / "plain.yaml")
    job = plain.job("out", file, steps=10, global_batch_size=16, micro_batch_size=4, logging_steps=2)
    (printed,) = run_together(tmp_path, [job])
    line = r"^step \d+: loss ([\d.]+), gradient norm [\d.]+, \d+ tokens/s$"
    losses = [float(value) for value in re.findall(line, printed, re.M)]
    assert len(losses) == 5 and losses[-1] < 0.9 * losses[0]
    perplexity = perplexities(printed)
    assert perplexity["after"] < 0.7 * perplexity["before"]
    assert "2 devices x 4 samples x 2 micro-steps" in printed
    Written(plain.output).load()


def test_only_matrices_decay():
    from run_clm_no_trainer import parameter_groups

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    groups = [(len(group["params"]), group["weight_decay"]) for group in parameter_groups(model, 0.1)]
    assert groups == [(1, 0.1), (3, 0.0)]
