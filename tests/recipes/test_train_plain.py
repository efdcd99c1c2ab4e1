"""The plain PyTorch loop under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.conftest import perplexities

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_train_and_save(plain):
    """With the file of arguments that is there, two micro-batches a step; what is saved loads again."""
    done = plain.run(
        str(ROOT / "recipes" / "gpt2" / "plain.yaml"), processes=2, steps=10, global_batch_size=16, micro_batch_size=4, logging_steps=2
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+), gradient norm [\d.]+, \d+ tokens/s$", done.stdout, re.M)]
    assert len(losses) == 5 and losses[-1] < 0.9 * losses[0]
    perplexity = perplexities(done.stdout)
    assert perplexity["after"] < 0.7 * perplexity["before"]
    assert "2 x 4 samples x 2 micro-steps" in done.stdout

    assert {value.dtype for value in load_file(plain.output / "model.safetensors").values()} == {torch.float32}
    model, report = AutoModelForCausalLM.from_pretrained(plain.output, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert len(AutoTokenizer.from_pretrained(plain.output)) == model.config.vocab_size == 300


BAD_INPUT = {
    "missing training file": (dict(train_file="none.txt"), "train file none.txt does not exist"),
    "less than a step": (dict(max_train_samples=3), "The train text has 3 blocks of 32 tokens; give text for 8 or more"),
    "unknown strategy": (dict(strategy="zero3"), "zero3"),
    "unknown precision": (dict(mixed_precision="fp8"), "fp8"),
    "no steps": (dict(steps=0), "steps=0 must be at least 1"),
    "unknown flag": (dict(max_steps=3), "max_steps"),
    "no streams here": (dict(streaming=True), "streaming"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(plain, in_process, case):
    changes, part = BAD_INPUT[case]
    code, errors = in_process(plain, **changes)
    found = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 2, errors
    assert len(found) == 1 and part in found[0], errors
    assert not plain.output.exists()
