"""Splits of a model share the traces of what they do not change, and are described as if they shared none."""

from __future__ import annotations

import pytest
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_osdp.modeling.split.candidates import possible_splits
from hf_osdp.planner.split import ModelSplit
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.find_plan import Describer
from hf_osdp.preparation.job import Job
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.tracer import Tracer
from tests.helpers.problems import run_job
from tests.helpers.sampling import slow_but

SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 512, "n_positions": 32}
MODELS = {
    "tied head": lambda: GPT2LMHeadModel(GPT2Config(**SIZES)),
    "rotary positions": lambda: LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=512)
    ),
}


@pytest.fixture
def runs(monkeypatch):
    """The number of batches of each run of a model on fake tensors."""
    found: list[int] = []
    stock = Tracer.run

    def counted(self, samples, *args, **options):
        found.append(len(samples))
        return stock(self, samples, *args, **options)

    monkeypatch.setattr(Tracer, "run", counted)
    return found


def job(config: OSDPConfig) -> Job:
    return run_job(config, world_size=2, reads_loss_alone=True)


@pytest.mark.parametrize("name", slow_but(MODELS, daily=("tied head",)))
def test_loss_in_chunks_is_described_as_by_own_traces(name, runs):
    model = MODELS[name]()
    describer = Describer(model, job(OSDPConfig(sequence_length=16, global_batch_size=8)))
    whole = describer.describe()
    splits = [split for split in possible_splits(model, whole) if split.loss_chunks > 1]
    assert len(splits) == 2  # alone, and with operator units
    for split in splits:
        describer.describe(ModelSplit(operators=split.operators))
        runs.clear()
        shared = describer.describe(split)
        assert len(runs) == 1
        assert shared == describe(model, sequence_length=16, split=split) and shared.recomputable
