"""Descriptions that are extended from short samples: equal to those of the whole length, or not used."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import hf_osdp.tracing.describe as describing
import hf_osdp.tracing.lengths as lengths
from hf_osdp.errors import DescriptionTimeoutError
from hf_osdp.planner.affine import Affine, Envelope
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.lengths import _envelope, _OtherFormError, _same
from tests.helpers.models import tiny_model
from tests.helpers.sampling import slow_but


class LoopLayer(nn.Module):
    """A recurrence over tokens, in chunks."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.into, self.out, self.chunk = nn.Linear(16, 32), nn.Linear(16, 16), chunk

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rest = -hidden.shape[1] % self.chunk
        gate, value = nn.functional.pad(self.into(hidden), (0, 0, 0, rest)).chunk(2, -1)
        state, states = torch.zeros_like(value[:, 0]), []
        for token in range(value.shape[1]):
            state = state * gate[:, token] + value[:, token]
            states.append(state)
        return hidden + self.out(torch.stack(states, 1)[:, : hidden.shape[1]])


class ScoreLayer(nn.Module):
    """Scores of all pairs of tokens, which need most memory among many tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 300), nn.Linear(300, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = (hidden @ hidden.mT).softmax(-1) @ hidden
        return hidden + self.down(self.up(mixed).relu())


class LoopModel(nn.Module):
    def __init__(self, chunk: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList((LoopLayer(chunk), ScoreLayer()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


TOKENS = 50


def inputs(samples: int) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("input_ids", "labels"), torch.ones(samples, TOKENS, dtype=torch.long))


def described(model: nn.Module, **options):
    options = {"block_classes": ("LoopLayer", "ScoreLayer"), "partial_recomputation": False, **options}
    return describe(model, sequence_length=TOKENS, inputs=inputs, **options)


@pytest.fixture
def extends(monkeypatch):
    """Extend descriptions of fewer tokens than usual."""
    monkeypatch.setattr(describing, "SHORTEST", 45)
    monkeypatch.setattr(describing, "_USUAL_OPERATORS", 100)
    monkeypatch.setattr(lengths, "_STEPS", (4, 8))
    monkeypatch.setattr(lengths, "_CHECKED", 32)


@pytest.mark.usefixtures("extends")
@pytest.mark.parametrize("chunk, shortest", slow_but([(1, 6), (8, 10)], daily=()))
def test_looping_model_is_described_from_short_samples_to_the_byte(chunk, shortest, monkeypatch):
    found = described(LoopModel(chunk))
    assert f"extended from {shortest}, " in found.trace
    monkeypatch.setattr(describing, "SHORTEST", 1000)
    whole = described(LoopModel(chunk))
    assert all(segment.recomputed for segment in whole.segments if whole.units[segment.unit].fqn.startswith("layers"))
    assert _same(replace(found, trace=whole.trace), whole)


@pytest.mark.slow
@pytest.mark.usefixtures("extends")
def test_model_of_long_chunks_is_traced_whole():
    assert "extended" not in described(LoopModel(32), recomputation=False).trace


@pytest.mark.usefixtures("extends")
def test_model_that_takes_too_long_ends_with_the_remedy():
    with pytest.raises(DescriptionTimeoutError, match="as a loop over tokens runs them"):
        described(LoopModel(32), recomputation=False, seconds=0.1)


@pytest.mark.usefixtures("extends")
def test_model_without_a_loop_is_described_as_before(monkeypatch):
    monkeypatch.setattr(describing, "_USUAL_OPERATORS", 1)
    model = tiny_model("llama", layers=1)
    found = describe(model, sequence_length=TOKENS, recomputation=False)
    monkeypatch.setattr(describing, "SHORTEST", 1000)
    assert found == describe(model, sequence_length=TOKENS, recomputation=False)


def peak(tokens: int) -> Envelope:
    return Envelope.above([Affine(constant=1000), Affine(constant=8, per_sample=10 * tokens)])


def test_moment_of_few_samples_and_tokens_is_left_out():
    assert [len(peak(tokens).pieces) for tokens in (32, 64, 112, 960)] == [2, 2, 1, 1]
    assert _envelope([peak(48), peak(80), peak(112)], 27) == peak(48 + 27 * 32)


def test_moments_of_a_loop_out_of_proportion_are_refused():
    def squared(tokens: int) -> Envelope:
        return replace(peak(tokens), pieces=(*peak(tokens).pieces, Affine(per_sample=5 * tokens**2)))

    with pytest.raises(_OtherFormError):
        _envelope([squared(48), squared(80), squared(112)], 27)
