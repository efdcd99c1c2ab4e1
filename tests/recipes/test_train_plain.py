"""The plain PyTorch loop under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.recipes.conftest import load_saved, perplexities

ROOT = Path(__file__).parents[2]
SCRIPT = "train_plain"


@pytest.mark.slow
def test_two_processes_train_and_save(recipe):
    """With the file of arguments that is there, two micro-batches a step; what is saved loads again."""
    done = recipe.run(
        str(ROOT / "recipes" / "gpt2" / "plain.yaml"), processes=2, steps=10, global_batch_size=16, micro_batch_size=4, logging_steps=2
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+), gradient norm [\d.]+, \d+ tokens/s$", done.stdout, re.M)]
    assert len(losses) == 5 and losses[-1] < 0.9 * losses[0]
    perplexity = perplexities(done.stdout)
    assert perplexity["after"] < 0.7 * perplexity["before"]
    assert "2 x 4 samples x 2 micro-steps" in done.stdout

    load_saved(recipe.output)
