"""Reserved memory of an estimated plan against the simulated step's, both by the model of the allocator."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, GPT2Config, LlamaConfig

from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.cost.step_events import estimate_reserved
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.description import Activations, ModelDescription
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.plan import Plan
from hf_osdp.planning.simulate import Simulation, simulate
from hf_osdp.tracing.describe import describe
from tests.helpers.sampling import slow_but
from tests.helpers.simulation import LAYOUTS, choices_of_layout

WORLD, LENGTH = 8, 128
MOST_ERROR, MOST_ERROR_ALLOCATED = 0.03, 0.01
HOLD, REDUCE, HOST = {"reduce_every_micro_step": False}, {"reduce_every_micro_step": True}, {"on_host": True}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt2": (GPT2Config(n_layer=6, n_embd=256, n_head=4, n_positions=256), AutoModelForCausalLM),
    "bert": (
        BertConfig(num_hidden_layers=6, hidden_size=256, intermediate_size=1024, num_attention_heads=4, **NO_DROPOUT), AutoModelForMaskedLM,
    ),
    "llama": (
        LlamaConfig(
            num_hidden_layers=8, hidden_size=512, intermediate_size=1376, num_attention_heads=8, num_key_value_heads=2,
            vocab_size=16000, max_position_embeddings=256, tie_word_embeddings=False,
        ),
        AutoModelForCausalLM,
    ),
}  # fmt: skip


@lru_cache
def described(name: str, precision: str) -> ModelDescription:
    config, auto = MODELS[name]
    return describe(config, sequence_length=LENGTH, compute_dtype=Precision.named(precision).compute, auto_class=auto, device_type="cuda")


def compare(
    name: str,
    layout: str,
    *,
    precision: str = "bf16",
    activations: Activations = Activations.SAVE,
    steps: int = 1,
    **options,
) -> Simulation:
    """Check both peaks of a plan, with segments that expand or not; `options` go to every choice."""
    description, (config, auto) = described(name, precision), MODELS[name]
    batch = Batch(micro_batch_size=4, accumulation_steps=steps)
    job = TrainingJob(global_batch_size=WORLD * 4 * steps, precision=Precision.named(precision))
    choices = [
        replace(choice, activations=activations if index in description.recomputable else Activations.SAVE, **options)
        for index, choice in enumerate(choices_of_layout(layout, description, WORLD))
    ]
    plan = Plan.of(description, choices, batch, world_size=WORLD)
    simulated = simulate(config, plan, description=description, job=job, auto_class=auto, device_type="cuda")
    reserved = estimate_reserved(description, choices, WORLD, job, batch)
    estimate = estimate_memory(description, choices, WORLD, job, batch).peak_bytes
    assert reserved.traced
    assert reserved.peak_allocated_bytes == pytest.approx(simulated.peak_bytes, rel=MOST_ERROR_ALLOCATED)
    assert reserved.peak_allocated_bytes == pytest.approx(estimate, rel=MOST_ERROR_ALLOCATED)
    assert reserved.peak_reserved_bytes == pytest.approx(simulated.reserved_bytes, rel=MOST_ERROR)
    return simulated


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_but(product(MODELS, LAYOUTS), daily=[("gpt2", "mixed"), ("llama", "hsdp")]),
)
def test_reserved_of_each_layout(name, layout):
    assert compare(name, layout).reserved_bytes > 0


@pytest.mark.parametrize(
    ("name", "layout", "activations"),
    slow_but(
        product(MODELS, ("zero2", "mixed"), list(Activations)[1:]),
        daily=[("llama", "zero2", Activations.RECOMPUTE), ("gpt2", "mixed", Activations.OFFLOAD)],
    ),
)
def test_reserved_where_activations_are_recomputed_or_offloaded(name, layout, activations):
    compare(name, layout, activations=activations)


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    slow_but(
        product(MODELS, ("zero3", "mixed"), [HOLD, REDUCE, HOST]),
        daily=[("gpt2", "zero3", HOLD), ("bert", "zero3", HOST)],
    ),
)
def test_reserved_over_three_micro_steps_and_with_states_on_the_host(name, layout, options):
    compare(name, layout, steps=3, **options)


@pytest.mark.parametrize("layout", slow_but(["ddp", "hsdp"], daily=["ddp"]))
def test_reserved_in_float32(layout):
    compare("llama", layout, precision="no")


def test_the_cpu_has_no_allocator_that_reserves():
    config, auto = MODELS["gpt2"]
    description = describe(config, sequence_length=32, auto_class=auto, recomputation=False)
    choices, batch = choices_of_layout("zero3", description, WORLD), Batch(micro_batch_size=1, accumulation_steps=1)
    plan = Plan.of(description, choices, batch, world_size=WORLD)
    assert simulate(config, plan, description=description, job=TrainingJob(global_batch_size=WORLD), auto_class=auto).reserved_bytes is None


def test_streams_hold_more_than_tensors_do_and_slivers_more_still():
    expanding = compare("gpt2", "zero3")
    config, auto = MODELS["gpt2"]
    description = described("gpt2", "bf16")
    job = TrainingJob(global_batch_size=4 * WORLD, precision=Precision.named("bf16"), expandable_segments=False)
    batch = Batch(micro_batch_size=4, accumulation_steps=1)
    choices = choices_of_layout("zero3", description, WORLD)
    plan = Plan.of(description, choices, batch, world_size=WORLD)
    fixed = simulate(config, plan, description=description, job=job, auto_class=auto, device_type="cuda")
    assert fixed.peak_bytes == expanding.peak_bytes < expanding.reserved_bytes
    assert fixed.reserved_bytes == pytest.approx(
        estimate_reserved(description, choices, WORLD, job, batch).peak_reserved_bytes, rel=MOST_ERROR
    )
