"""A sample of the sweep over transformers' classes: each trains under a plan as under the stock Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.loss_sweep import KEPT, LIMIT, TOLERANCE, tried

SAMPLE = {
    "GemmaForSequenceClassification": KEPT, "LukeForSequenceClassification": KEPT, "Mistral4ForCausalLM": LIMIT,
    "FalconMambaForCausalLM": LIMIT, "FSMTForConditionalGeneration": KEPT, "GteForTokenClassification": KEPT,
    "HunYuanDenseV1ForSequenceClassification": KEPT, "SeedOssForTokenClassification": KEPT,
    "HyperCLOVAXForCausalLM": LIMIT, "ParakeetForCTC": KEPT, "MusicFlamingoForConditionalGeneration": LIMIT,
    "Olmo2ForSequenceClassification": KEPT, "T5Gemma2ForConditionalGeneration": LIMIT,
}  # fmt: skip
"""The first classes of the sweep's order of which a small model is made, and one with masks by vmap → the outcome."""


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "outcome"), SAMPLE.items())
def test_class_under_a_smaller_limit_trains_as_stock(name: str, outcome: str, tmp_path: Path) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"This version of transformers has no {name}.")
    result = tried(name, str(tmp_path))
    assert (result.outcome, result.worst <= TOLERANCE) == (outcome, True), result
