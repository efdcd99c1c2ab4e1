"""A model is described once on a machine, and again where anything that counts has changed."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.description import DType
from hf_osdp.planning import cache
from hf_osdp.planning.cache import describe_once
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


def test_modules_of_others_are_traced_each_time(described):
    class Block(torch.nn.Dropout):
        """Code that no version tells."""

    for _ in range(2):
        own = model()
        own.transformer.drop = Block(0.1)
        describe_once(own, sequence_length=16)
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
