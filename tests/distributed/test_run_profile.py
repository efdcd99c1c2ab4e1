"""Timing blocks before a training of two ranks leaves it as it was, to the bit."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.planner.presets import preset
from hf_osdp.preparation import find_plan, run_profile
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.run_profile import times_of_run
from tests.helpers.checkpointed import whole

LENGTH, VOCABULARY = 16, 61


def trained(*, time_blocks: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Train with dropout, so that a generator that was moved shows; return losses and weights."""
    set_seed(torch.distributed.get_rank())
    config = GPT2Config(n_layer=4, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=LENGTH)
    options = OSDPConfig(
        strategy="fsdp", sequence_length=LENGTH, global_batch_size=8, micro_batch_size=4, time_blocks=time_blocks
    )
    model = OptimalShardedDataParallel(GPT2LMHeadModel(config).double(), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        rows = torch.randint(0, VOCABULARY, (4, LENGTH))
        loss = cross_entropy(model(input_ids=rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [whole(parameter).detach().clone() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.on_ranks(2)
def test_training_with_timed_blocks_equals_one_without():
    run_profile.measure_hardware = lambda **_: preset("cpu", devices_per_node=2)
    run_profile.BLOCKS_S = 0.05
    with patch.object(find_plan, "times_of_run", side_effect=times_of_run) as timing:
        losses, weights = trained(time_blocks=True)
        assert timing.call_count == 1
        plain_losses, plain_weights = trained(time_blocks=False)
        assert timing.call_count == 1
    assert losses == plain_losses
    assert all(torch.equal(one, other) for one, other in zip(weights, plain_weights, strict=True))
