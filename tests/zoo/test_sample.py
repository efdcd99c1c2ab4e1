"""A sample of the zoo: each model trains two steps under a mixed plan as in one process, and is described alone."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.sampling import slow_but

from .__main__ import read, types
from .ranks import EQUAL, Row, try_all

DAILY = ("DetrForObjectDetection",)
"""What the other tests of architectures do not have: pictures, boxes."""
SAMPLE = (
    *DAILY, "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "InternVLForConditionalGeneration", "Idefics3ForConditionalGeneration",
    "PaliGemmaForConditionalGeneration", "Mistral3ForConditionalGeneration", "Llama4ForConditionalGeneration",
    "DeformableDetrForObjectDetection", "RTDetrV2ForObjectDetection", "SegformerForSemanticSegmentation",
    "CLIPForImageClassification", "SiglipForImageClassification", "Wav2Vec2ForCTC",
    "Speech2TextForConditionalGeneration", "JetMoeForCausalLM", "SwitchTransformersForConditionalGeneration",
    "MiniMaxForCausalLM",
)  # fmt: skip


@functools.cache
def results(daily: bool) -> dict[str, Row]:
    rows = [row for name, row in types().items() if name in SAMPLE and (name in DAILY) == daily]
    with TemporaryDirectory() as folder:
        run_ranks(try_all, 2, rows, f"{folder}/rows.jsonl", timeout_s=60 + 30 * len(rows))
        return {row.name: row for row in read([Path(folder) / "rows.jsonl"])}


@pytest.mark.parametrize("name", slow_but(SAMPLE, daily=DAILY))
def test_small_model_is_described_and_trains_as_in_one_process(name):
    if name not in types():
        pytest.skip(f"This version of transformers has no {name}.")
    row = results(name in DAILY)[name]
    assert (row.outcome, row.is_described) == (EQUAL, True), row
