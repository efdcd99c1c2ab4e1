"""Few experts, large parameters of the root, states that modules keep: what they take is in the estimate."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, MixtralConfig, T5Config

from hf_osdp.planner.decision import Batch
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.tracing.describe import describe
from tests.helpers.sampling import slow_but
from tests.helpers.simulation import choices_of_layout, estimate_and_simulation

WORLD, TOKENS = 8, 32


def check(model, layout: str, precision: str, *, held: bool = False, **options) -> ModelDescription:
    """Hold the estimate within 1 % of the simulation, of two micro-steps where gradients are held."""
    batch = Batch(micro_batch_size=1, accumulation_steps=1 + held)
    job = TrainingJob(global_batch_size=WORLD * batch.accumulation_steps, precision=Precision.named(precision))
    description = describe(
        model, sequence_length=TOKENS, compute_dtype=job.precision.compute, device_type="cuda", recomputation=False,
        **options,
    )  # fmt: skip
    layouts = [replace(one, reduce_every_micro_step=not held) for one in choices_of_layout(layout, description, WORLD)]
    estimate, simulated = estimate_and_simulation(
        model, description, layouts, job=job, batch=batch, world=WORLD, device_type="cuda", **options
    )
    assert estimate.peak_bytes == pytest.approx(simulated.peak_bytes, rel=0.01)
    return description


EXPERTS = [
    ("zero2", "bf16", 4, 1024), ("hsdp", "bf16", 4, 256), ("two_stage", "bf16", 4, 256), ("mixed", "bf16", 4, 256),
    ("zero3", "bf16", 5, 1024), ("zero3", "no", 4, 252),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "precision", "count", "width"), slow_but(EXPERTS, EXPERTS[:1]))
def test_copies_and_padding_of_fewer_experts_than_ranks_are_counted(layout, precision, count, width):
    """Up to 5 experts on 8 ranks are sharded along their width; widths of 252 do not divide, so the hidden size is."""
    experts = MixtralConfig(
        hidden_size=128, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=count, vocab_size=500, max_position_embeddings=64,
    )  # fmt: skip
    check(experts, layout, precision, auto_class=AutoModelForCausalLM)


class LargeEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8_000, 128), nn.Linear(128, 10)  # larger tables are units
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)) for _ in range(4)
        )

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden.mean(1)), labels)}


def tokens_and_labels(samples: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.zeros(samples, TOKENS, dtype=torch.long), "labels": torch.zeros(samples, dtype=torch.long)}


@pytest.mark.parametrize(
    ("layout", "precision"), slow_but(product(["zero3", "ddp"], ["no", "bf16"]), [("ddp", "no"), ("zero3", "bf16")])
)
def test_gradient_of_a_large_root_embedding_counts_once(layout, precision):
    with torch.device("meta"):
        model = LargeEmbedding()
    check(model, layout, precision, inputs=tokens_and_labels)


class TwoTowers(nn.Module):
    """The blocks of one tower, then an embedding, a unit of its own, and the other tower's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2**14, 128)
        self.pictures, self.texts = (nn.ModuleList(nn.Linear(128, 128) for _ in range(2)) for _ in range(2))

    def forward(self, pixels, tokens, labels):
        hidden = pixels
        for block in self.pictures:
            hidden = block(hidden).relu()
        words = self.embedding(tokens).mean(1)
        for block in self.texts:
            words = block(words).relu()
        return {"loss": nn.functional.cross_entropy(hidden * words, labels)}


def pairs(samples: int) -> dict[str, torch.Tensor]:
    return {"pixels": torch.zeros(samples, 128), **tokens_and_labels(samples)}


HOLDING = list(product(("zero3", "zero2", "hsdp"), ("no", "bf16"), (False, True)))


@pytest.mark.parametrize(("layout", "precision", "held"), slow_but(HOLDING, (HOLDING[0], HOLDING[11])))
def test_units_without_inputs_that_need_gradients_stay_whole_in_backward(layout, precision, held):
    with torch.device("meta"):
        model = TwoTowers()
    description = check(model, layout, precision, inputs=pairs, held=held)
    assert [unit.fqn for unit in description.units if unit.ends_late] == ["embedding", "pictures.0"]


@pytest.mark.parametrize("layout", slow_but(["zero3", "mixed"], daily=["zero3"]))
def test_sum_of_gradients_counts_in_each_call_but_the_last(layout):
    """In T5 also where the decoder's embedding ends, while more is saved than at the end of backward."""
    config = T5Config(vocab_size=10_000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
    check(config, layout, "no", auto_class=AutoModelForSeq2SeqLM)


# ---- small modules

WIDTH, ROWS = 64, 128
BATCH = Batch(micro_batch_size=4, accumulation_steps=1)
JOB = TrainingJob(global_batch_size=4 * WORLD, micro_batch_size=4)


class Block(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.keeps, self.state = keeps, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh().exp()
        if self.keeps:
            self.state = y.square().sum(-1).sqrt()
        return x + self.outer(y)


def rows(samples: int) -> dict[str, torch.Tensor]:
    return {"input": torch.zeros(samples, ROWS, WIDTH)}


@pytest.mark.parametrize(("keeps", "saving"), [(False, 0), (True, 0), (True, 4)])
def test_state_that_keeps_the_recomputed_graph_is_in_the_estimate(keeps, saving):
    """Also in the backward of the first blocks, which save everything."""
    model = nn.Sequential(*(Block(keeps) for _ in range(5)))
    description = describe(model, sequence_length=ROWS, inputs=rows, partial_recomputation=False)
    choices = choices_of_layout("zero3", description, WORLD)
    for index in sorted(description.recomputable)[saving:]:
        choices[index] = replace(choices[index], activations=Activations.RECOMPUTE)
    again = [segment.recomputed[0].costs for segment in description.segments if segment.recomputed]
    assert all((segment.kept_bytes(4) > ROWS * WIDTH * 4) is keeps for segment in again)
    more = {"job": JOB, "batch": BATCH, "world": WORLD, "inputs": rows}
    estimate, simulated = estimate_and_simulation(model, description, choices, **more)
    assert -0.01 <= estimate.peak_bytes / simulated.peak_bytes - 1 <= 0.03
