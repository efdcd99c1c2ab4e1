"""Values of ids, labels and masks beside fake tensors: what models ask for, and models that ask."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planning.simulate import fake_process_group
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.known_values import KnownValues
from hf_osdp.tracing.memory_tracker import MemoryTracker
from tests.helpers.sampling import slow_but

IDS = torch.tensor([[5, 7, 7, 2], [9, 2, 1, 1]])


@pytest.fixture
def ids():
    """The ids as fake tensors whose values are known, inside the modes."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, KnownValues(alone=True) as known:
        yield known.fakes_of(IDS, mode)


@pytest.mark.parametrize(
    "asked",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 4],
        lambda x: x.masked_select(x.eq(2)),
        lambda x: torch.unique(x, return_counts=True)[1],
        lambda x: torch.unique_consecutive(x.flatten()),
        lambda x: torch.repeat_interleave(x[:, 0]),
        lambda x: torch.where(x.eq(1))[1],
        lambda x: x.bincount() if x.dim() == 1 else x.flatten().bincount(),
    ],
)
def test_shapes_that_depend_on_ids_are_the_real_ones(ids, asked):
    assert asked(ids).shape == asked(IDS.clone()).shape


@pytest.mark.parametrize(
    "asked",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x == 7).any()),
        lambda x: int(x.ne(1).sum(-1).max()),
        lambda x: x.float().mean().item(),
        lambda x: torch.equal(x, x.clone()),
        lambda x: [len(row) for row in x.split(x.ne(1).sum(1).tolist(), dim=1)] if x.shape[1] == 6 else x.ne(1).sum(1).tolist(),
        lambda x: torch.zeros_like(x).add_(x).masked_fill_(x == 7, 0).sum().item(),
    ],
)
def test_numbers_that_are_asked_for_are_the_real_ones(ids, asked):
    assert asked(ids) == asked(IDS.clone())


def test_what_is_written_through_a_view_is_known(ids):
    labels = ids.clone()
    labels[:, 1:][ids[:, 1:] == 2] = -100
    assert labels.tolist() == [[5, 7, 7, -100], [9, -100, 1, 1]]


def test_rows_are_chosen_by_a_mask_and_get_gradients(ids):
    hidden = torch.ones(2, 4, 3, requires_grad=True)
    chosen = hidden[ids.eq(2)]
    assert chosen.shape == (2, 3)
    chosen.sum().backward()
    assert hidden.grad.shape == (2, 4, 3)


def test_a_mask_that_activations_decide_counts_as_true(ids):
    scores = torch.rand(2, 4)
    assert scores[scores > 0.5].shape == (8,) and (scores > 0.5).nonzero().shape == (8, 2)
    assert scores.sum().item() == 1.0 and not (scores.sum() > 0)


def test_what_activations_have_been_written_into_is_known_no_more(ids):
    counts = torch.zeros(4, dtype=torch.long)
    assert counts.sum().item() == 0
    counts.copy_(torch.rand(4).topk(4).indices)
    assert (counts > 0).nonzero().shape == (4, 1)


def test_memory_that_nobody_has_written_is_not_known(ids):
    assert (torch.empty(4, dtype=torch.long) > 0).nonzero().shape == (4, 1)


def test_real_values_cost_no_memory_and_no_operator(ids):
    with MemoryTracker(block_bytes=1) as live:
        mask = ids.eq(7)
        assert live.current_bytes == mask.numel()


def test_collectives_are_answered_as_if_alone(ids):
    with fake_process_group(4):
        total, gathered = ids.sum(), ids.new_zeros(8, 4)
        dist.all_reduce(total)
        dist.all_gather_into_tensor(gathered, ids)
        dist.barrier()
        assert total.item() == IDS.sum() and gathered.tolist() == IDS.repeat(4, 1).tolist()


_TEXT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
_BART = {
    "encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 100,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_VISION = {**{name: value for name, value in _TEXT.items() if name != "vocab_size"}, "image_size": 32, "patch_size": 8}
_LONGFORMER = {**_TEXT, "attention_window": 8, "pad_token_id": 1, "max_position_embeddings": 66}
_WAV2VEC2 = {**_TEXT, "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
ASKING = {
    "DebertaForSequenceClassification": (_TEXT, 16),
    "DebertaV2ForSequenceClassification": (_TEXT, 16),
    "BartForSequenceClassification": (_BART, 16),
    "T5ForSequenceClassification": ({"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16, "vocab_size": 100}, 16),
    "LongformerForSequenceClassification": (_LONGFORMER, 32),
    "LongformerForQuestionAnswering": ({**_LONGFORMER, "sep_token_id": 2}, 32),
    "Wav2Vec2ForCTC": (_WAV2VEC2, 4000),
    "Wav2Vec2ForSequenceClassification": (_WAV2VEC2, 4000),
    "CLIPModel": ({"text_config": _TEXT, "vision_config": _VISION}, 16),
}


def on_meta(name: str) -> nn.Module:
    return build_on_meta(getattr(transformers, name).config_class(**ASKING[name][0]), name)


def test_tracing_moves_no_random_state():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    describe(on_meta("Wav2Vec2ForCTC"), sequence_length=4000, recomputation=False)
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]


@pytest.mark.parametrize("name", slow_but(ASKING, daily=["DebertaV2ForSequenceClassification", "Wav2Vec2ForCTC", "CLIPModel"]))
def test_models_that_ask_for_values_are_traced_and_may_be_recomputed(name):
    found = describe(on_meta(name), sequence_length=ASKING[name][1])
    assert found.trace.startswith("fake tensors") and found.recomputable


@pytest.mark.parametrize("name", ["BartForSequenceClassification", "LongformerForQuestionAnswering", "Wav2Vec2ForCTC", "CLIPModel"])
def test_the_batch_that_is_made_up_runs_for_real(name):
    sizes, length = ASKING[name]
    model = getattr(transformers, name)(getattr(transformers, name).config_class(**sizes)).train()
    assert model(**training_batch(model, length)(2)).loss.isfinite()


class Stubborn(nn.Module):
    """Fits no fake tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"hidden_size": 4, "num_attention_heads": 2})()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no memory at {x.data_ptr()}")


def test_where_a_trace_fails_the_line_says_why_and_what_is_not_offered(caplog):
    with caplog.at_level(logging.WARNING):
        found = describe(Stubborn(), sequence_length=4, inputs=lambda samples: {"x": torch.zeros(samples, 4)})
    assert not found.recomputable and "formula" in found.trace
    assert "recomputing blocks in backward is not offered" in caplog.text and "RuntimeError" in caplog.text
