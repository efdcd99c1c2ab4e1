"""Loops without the Trainer, Accelerate's and a plain one: learn, log, resume to the bit, evaluate samples once."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.conftest import Recipe, load_saved, log_of, perplexities
from tests.recipes.ranks import run_together

ROOT = Path(__file__).parents[2]
SCRIPT = "run_clm_no_trainer"
DROPOUT = "n_layer=2,n_head=2,n_embd=32,n_positions=32,resid_pdrop=0.1,embd_pdrop=0.1,attn_pdrop=0.1"
OPTIONS = {
    "config_overrides": DROPOUT, "micro_batch_size": 2, "max_steps": 10, "max_eval_samples": 19, "logging_steps": 1,
    "strategy": "fsdp", "seed": 1,
}  # fmt: skip


def plain_perplexity(folder: Path, samples: int) -> float:
    from run_clm_no_trainer import DataArguments, load_text, make_blocks

    data = DataArguments(max_eval_samples=samples)
    _, validation = make_blocks(load_text(data), AutoTokenizer.from_pretrained(folder), 32, data)
    blocks = torch.tensor(validation["input_ids"][:])
    with torch.no_grad():
        return math.exp(AutoModelForCausalLM.from_pretrained(folder)(input_ids=blocks, labels=blocks).loss)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, list[str]]:
    """Three on two ranks, with dropout and two micro-batches a step: two epochs; from a checkpoint amid the first one
    step by the file of arguments, and to the end, into the same folder."""
    loop = Recipe(SCRIPT, tmp_path_factory.mktemp("loop"))
    file = str(ROOT / "recipes" / "gpt2" / "no_trainer.yaml")
    resumed = {**OPTIONS, "resume_from_checkpoint": loop.folder / "text" / "checkpoint-5"}
    jobs = [
        loop.job("text", eval_steps=5, save_steps=5, **OPTIONS),
        loop.job("again", file, **{**resumed, "max_steps": 6, "warmup_steps": 0}),
        loop.job("again", **resumed),
    ]
    return loop.folder, run_together(loop.folder, jobs)


@pytest.mark.slow
def test_two_processes_train_log_and_save(runs):
    folder, printed = runs
    output, perplexity = folder / "text", perplexities(printed[0])
    assert perplexity["after"] < 0.7 * perplexity["before"]

    log = log_of(output)
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 11)) and steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    for line in steps:
        assert min(line[name] for name in ("perplexity", "grad_norm", "tokens_per_s", "free_device_memory_bytes")) > 0
        assert line["loss_scale"] == 1.0 and line["epoch"] == line["step"] / 8
    assert steps[0]["learning_rate"] == 0.02 and steps[-1]["learning_rate"] == pytest.approx(0.002)
    evaluated = {line["step"]: line["eval_perplexity"] for line in log if "eval_perplexity" in line}
    assert list(evaluated) == [5, 10] and evaluated[10] == pytest.approx(perplexity["after"], abs=0.01)
    assert evaluated[10] == pytest.approx(plain_perplexity(output, 19), rel=1e-5)  # 19 samples: one batch is not full

    assert load_saved(output).config.architectures == ["GPT2LMHeadModel"]
    assert json.loads((output / "osdp_report.json").read_text())["plan"]["accumulation_steps"] == 2


@pytest.mark.slow
def test_run_resumes_to_the_bit_and_keeps_its_log(runs):
    folder, printed = runs
    saved, resumed = (load_file(folder / name / "model.safetensors") for name in ("text", "again"))
    assert all(torch.equal(resumed[name], value) for name, value in saved.items())
    assert perplexities(printed[0])["after"] == perplexities(printed[2])["after"]
    logs = [[line for line in log_of(folder / name) if "loss" in line] for name in ("text", "again")]
    losses, again = ([(line["step"], line["loss"]) for line in log] for log in logs)
    assert again == [losses[5], *losses[5:]], "the last run writes below the line of the one before"


@pytest.mark.slow
def test_plain_loop_trains_and_saves_under_torchrun(tmp_path):
    """With the file of arguments that is there, two micro-batches a step; what is saved loads again."""
    plain = Recipe("train_plain", tmp_path)
    file = str(ROOT / "recipes" / "gpt2" / "plain.yaml")
    printed = plain.run(file, processes=2, steps=10, global_batch_size=16, micro_batch_size=4, logging_steps=2)
    line = r"^step \d+: loss ([\d.]+), gradient norm [\d.]+, \d+ tokens/s$"
    losses = [float(value) for value in re.findall(line, printed, re.M)]
    assert len(losses) == 5 and losses[-1] < 0.9 * losses[0]
    perplexity = perplexities(printed)
    assert perplexity["after"] < 0.7 * perplexity["before"]
    assert "2 x 4 samples x 2 micro-steps" in printed
    load_saved(plain.output)


def test_only_matrices_decay():
    from run_clm_no_trainer import parameter_groups

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    groups = [(len(group["params"]), group["weight_decay"]) for group in parameter_groups(model, 0.1)]
    assert groups == [(1, 0.1), (3, 0.0)]
