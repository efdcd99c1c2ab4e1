"""A model is described once on a machine, and again where anything that counts has changed."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from transformers import GPT2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from hf_osdp.modeling.build import build_on_meta, with_lora
from hf_osdp.planner.description import DType
from hf_osdp.preparation import cache
from hf_osdp.preparation.cache import describe_once
from tests.helpers.descriptions import transformer

CONFIG = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 100}


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """An entry for each trace, with a cache of its own."""
    monkeypatch.setenv("OSDP_CACHE", str(tmp_path / "kept"))
    calls: list[int] = []
    stock = cache.describe
    monkeypatch.setattr(cache, "describe", lambda model, **options: (calls.append(1), stock(model, **options))[1])
    return calls


@pytest.fixture
def described(traced, monkeypatch):
    """The same, where a trace takes no time."""
    monkeypatch.setattr(cache, "describe", lambda model, **options: (traced.append(1), transformer())[1])
    return traced


def model(**changes):
    return build_on_meta(GPT2Config(**{**CONFIG, **changes}))


def frozen():
    partly = model()
    partly.transformer.wpe.requires_grad_(False)
    return partly


def test_same_model_is_traced_once_and_found_equal(traced):
    first, again = (
        describe_once(model(), sequence_length=16, device_type="cuda", compute_dtype=DType.BFLOAT16) for _ in range(2)
    )
    assert again == first and len(traced) == 1


@pytest.mark.parametrize(
    "changed",
    [
        lambda: describe_once(model(), sequence_length=24),
        lambda: describe_once(model(), sequence_length=16, device_type="cuda"),
        lambda: describe_once(model(n_embd=64), sequence_length=16),
        lambda: describe_once(model(resid_pdrop=0.0), sequence_length=16),
        lambda: describe_once(model().to(torch.bfloat16), sequence_length=16),
        lambda: describe_once(frozen(), sequence_length=16),
    ],
)
def test_what_differs_is_traced_anew(described, changed):
    describe_once(model(), sequence_length=16)
    changed()
    assert len(described) == 2


def batch(samples, *, filled=False):
    ids = torch.ones(samples, 16, dtype=torch.long) if filled else torch.zeros(samples, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def test_batches_of_the_same_content_are_traced_once(described):
    for _ in range(2):
        describe_once(model(), sequence_length=16, inputs=lambda samples: batch(samples))
    assert len(described) == 1
    describe_once(model(), sequence_length=16, inputs=lambda samples: batch(samples, filled=True))
    describe_once(model(), sequence_length=16, inputs=lambda samples: {**batch(samples), "use_cache": False})
    assert len(described) == 3


def untied():
    apart = model()
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.detach().clone())
    return apart


def with_dropout():
    changed = model()
    changed.transformer.h[1].mlp.dropout.p = 0.5
    return changed


def with_checkpointing():
    changed = model()
    changed.gradient_checkpointing_enable()
    return changed


def with_adapters():
    return with_lora(model(), 4)


def in_evaluation():
    return model().eval()


def with_buffer():
    changed = model()
    changed.register_buffer("ema", torch.zeros(9))
    return changed


@pytest.mark.parametrize(
    "made", [frozen, untied, with_dropout, with_checkpointing, with_adapters, in_evaluation, with_buffer]
)
def test_object_unlike_its_configuration_is_traced_anew_and_once(described, made):
    for make in (model, made, made):
        describe_once(make(), sequence_length=16)
    assert len(described) == 2


def own_forward(self, hidden):
    return hidden


def changed_forward(changed, _):
    changed.transformer.h[0].mlp.forward = types.MethodType(own_forward, changed.transformer.h[0].mlp)


def changed_method(_, monkeypatch):
    monkeypatch.setattr(GPT2MLP, "forward", functools.wraps(GPT2MLP.forward)(own_forward))


def changed_loss(_, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", own_forward)


def changed_attention(_, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", own_forward)


def own_hook(changed, _):
    changed.transformer.h[0].register_forward_hook(lambda module, args, output: output)


def own_module(changed, _):
    class Block(torch.nn.Dropout):
        """Code that no version tells."""

    changed.transformer.drop = Block(0.1)


def own_object(changed, _):
    changed.transformer.h[0].note = Noted()


class Noted:
    """Content that is not known."""


@pytest.mark.parametrize(
    "change", [changed_forward, changed_method, changed_loss, changed_attention, own_hook, own_module, own_object]
)
def test_code_of_others_is_traced_each_time(described, monkeypatch, change):
    for _ in range(2):
        own = model()
        change(own, monkeypatch)
        describe_once(own, sequence_length=16)
    assert len(described) == 2


def test_model_without_a_key_is_described_all_the_same(described):
    in_circle = model()
    in_circle.transformer.h[0].around = around = []
    around.append(around)
    describe_once(in_circle, sequence_length=16)

    def only_two(samples):
        if samples > 2:
            raise ValueError("no more rows")
        return batch(samples)

    describe_once(model(), sequence_length=16, inputs=only_two)
    assert len(described) == 2


def test_own_loss_is_traced_each_time(described):
    for _ in range(2):
        describe_once(model(), sequence_length=16, loss=lambda model, batch: model(**batch).loss)
    assert len(described) == 2


def test_other_code_is_another_description(described, monkeypatch):
    describe_once(model(), sequence_length=16)
    monkeypatch.setattr(cache, "code_hash", lambda: "another")
    describe_once(model(), sequence_length=16)
    assert len(described) == 2


def test_damaged_file_is_made_again_and_old_ones_make_room(described, tmp_path, monkeypatch):
    found = describe_once(model(), sequence_length=16)
    (file,) = (tmp_path / "kept").iterdir()
    file.write_text(file.read_text()[:-9])
    assert describe_once(model(), sequence_length=16) == found == describe_once(model(), sequence_length=16)
    assert len(described) == 2
    monkeypatch.setattr(cache, "_MAX_FILES", 1)
    describe_once(model(), sequence_length=24)
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize("kept", ["0", "/dev/null/nowhere"])
def test_without_a_folder_nothing_is_kept(described, monkeypatch, kept):
    monkeypatch.setenv("OSDP_CACHE", kept)
    for _ in range(2):
        describe_once(model(), sequence_length=16)
    assert len(described) == 2


def test_what_was_warned_of_is_said_again(traced, caplog):
    for _ in range(2):
        caplog.clear()
        describe_once(model(), sequence_length=16, device_type="cuda", capability=(7, 5), compute_dtype=DType.BFLOAT16)
        assert "math kernel" in caplog.text
    assert len(traced) == 1


def test_cache_folder_of_one_is_the_usual_one(monkeypatch):
    monkeypatch.delenv("OSDP_CACHE")
    usual = cache.cache_folder()
    monkeypatch.setenv("OSDP_CACHE", "1")
    assert cache.cache_folder() == usual is not None
