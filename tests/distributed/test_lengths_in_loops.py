"""Loops of one's own, plain and on Accelerate, train a step that is cut by length as one process trains it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from hf_osdp import OptimalShardedDataParallel, OSDPAccelerator, OSDPConfig
from hf_osdp.errors import OSDPError
from tests.helpers.distributed import run_ranks

RANKS, SAMPLES, LONGEST, STEPS = 2, 12, 32, 3


def classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=20, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, vocab_size=61, num_labels=3,
        max_position_embeddings=LONGEST, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(3, LONGEST + 1, (SAMPLES, 1), generator=dice)
    ids = torch.randint(3, 61, (SAMPLES, LONGEST), generator=dice)
    mask = torch.arange(LONGEST) < lengths
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": lengths[:, 0] % 3}


def train(parts: Callable[[Any], Iterator[Any]], rank: int, optimizer: Any, backward: Any, model: Any) -> list[int]:
    sizes = []
    for step in range(STEPS):
        for part, share in parts(batch(step, rank)):
            backward(model(**part).loss * share)
            sizes.append(len(part["labels"]))
        optimizer.step()
        optimizer.zero_grad()
    return sizes


def of_ranks(kind: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    config = OSDPConfig(
        batch_by_tokens=True, sequence_length=LONGEST, global_batch_size=RANKS * SAMPLES, micro_batch_size=3,
        hardware="cpu", strategy="fsdp", compare=False, report=False,
    )  # fmt: skip
    if kind == "plain":
        model = OptimalShardedDataParallel(classifier(), config, optimizer="sgd")
        rank, optimizer = torch.distributed.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
        sizes = train(model.micro_batches, rank, optimizer, torch.Tensor.backward, model)
        return model.full_state_dict(), sizes
    accelerator, model = OSDPAccelerator(osdp=config, cpu=True), classifier()
    loader: Any = DataLoader(range(96), batch_size=accelerator.plan(model).samples_per_rank)
    model, optimizer, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    def parts(step: Any) -> Iterator[Any]:
        return accelerator.micro_batches(model, step)

    with pytest.raises(OSDPError, match=r"a batch is a whole step, which accelerator\.micro_batches"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    sizes = train(parts, accelerator.process_index, optimizer, accelerator.backward, model)
    return accelerator.get_state_dict(model), sizes


@pytest.mark.parametrize("kind", ["plain", "Accelerate"])
def test_step_that_is_cut_by_length_is_that_of_one_process(kind: str) -> None:
    found = run_ranks(of_ranks, RANKS, kind, timeout_s=120, shared=True)
    want = classifier()
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    for step in range(STEPS):
        every = [batch(step, rank) for rank in range(RANKS)]
        want(**{name: torch.cat([one[name] for one in every]) for name in every[0]}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, sizes = found[0]
    torch.testing.assert_close(weights, want.state_dict(), rtol=1e-10, atol=1e-12)
    assert len(set(sizes)) > 1 and [sum(own) for _, own in found] == [STEPS * SAMPLES] * RANKS
