"""Splits of a model share the traces of what they do not change, and are described as if they shared none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_osdp.modeling.split.candidates import possible_splits
from hf_osdp.planner.presets import preset
from hf_osdp.planner.split import ModelSplit
from hf_osdp.planner.training_job import Precision
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.find_plan import Describer, find_plan
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
def test_split_of_head_is_described_as_by_own_traces(name, runs):
    model = MODELS[name]()
    describer = Describer(model, job(OSDPConfig(sequence_length=16, global_batch_size=8)))
    whole = describer.describe()
    heads = [split for split in possible_splits(model, whole) if split.loss_chunks > 1 or len(split.sliced) == 1]
    assert len(heads) == 4  # each alone, and with operator units
    for split in heads:
        describer.describe(ModelSplit(operators=split.operators))
        runs.clear()
        shared = describer.describe(split)
        assert len(runs) == 1
        assert shared == describe(model, sequence_length=16, split=split) and shared.recomputable


@pytest.mark.slow
def test_bytes_held_at_step_end_are_shared_by_splits(runs):
    """In bfloat16 this model frees the last block's output after the loss."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    text = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2}
    text |= {"vocab_size": 120, "pad_token_id": 0}
    sight = {"image_size": 32, "patch_size": 8, "vision_output_dim": 32, "projector_input_dim": 32}
    sight |= {**sizes, "projector_output_dim": 32}
    config = Llama4Config(text_config={**sizes, **text}, vision_config=sight, image_token_index=9)
    model = Llama4ForConditionalGeneration._from_config(config)
    precision = Precision.named("bf16")
    asked = job(OSDPConfig(sequence_length=16, global_batch_size=8))
    describer = Describer(model, replace(asked, precision=precision))
    whole = describer.describe()
    assert whole.segments[-1].held_bytes.bytes(1) > 0
    runs.clear()
    shared, split = describer.describe(ModelSplit(loss_chunks=8)), ModelSplit(loss_chunks=8)
    assert len(runs) == 1
    assert shared == describe(model, sequence_length=16, split=split, compute_dtype=precision.compute)


@pytest.mark.slow
def test_plan_with_splits_takes_few_traces(runs):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 2048, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    config = OSDPConfig(sequence_length=32, global_batch_size=8, memory_limit="5MiB")
    plan = find_plan(model, job(config), hardware=preset("cpu", devices_per_node=2)).plan
    assert not plan.split.is_none and plan.proven_optimal
    assert len(runs) <= 12 and sum(runs) <= 31  # 22 and 51 if no split shared a trace
