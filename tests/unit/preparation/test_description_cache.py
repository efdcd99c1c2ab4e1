"""A model is described once on a machine, and again where anything that counts has changed."""

from __future__ import annotations

import copy
import functools
import os
import re
import types

import pytest
import torch
from torch import nn
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


def batch(samples, *, filled=False):
    ids = torch.full((samples, 16), int(filled))
    return {"input_ids": ids, "labels": ids}


def test_same_model_is_traced_once_and_its_warning_repeated(traced, caplog):
    options = {"device_type": "cuda", "capability": (7, 5), "compute_dtype": DType.BFLOAT16}
    found = []
    for _ in range(2):
        caplog.clear()
        found.append(describe_once(model(), sequence_length=16, **options))
        assert "math kernel" in caplog.text
    assert found[0] == found[1] and len(traced) == 1


def eager(config):
    other = copy.deepcopy(config)
    other._attn_implementation = "eager"
    return other


SAME = {"sequence_length": 16, "inputs": batch}
OTHER_OPTIONS = {
    "length": {"sequence_length": 24},
    "device": {"device_type": "cuda"},
    "content": {"inputs": lambda samples: batch(samples, filled=True)},
    "setting in the batch": {"inputs": lambda samples: {**batch(samples), "use_cache": False}},
}
OTHER_CONFIGURATIONS = {"size": {"n_embd": 64}, "dropout of all": {"resid_pdrop": 0.0}}
OTHER_OBJECTS = {  # unlike their configuration
    "dtype": lambda own: own.to(torch.bfloat16),
    "frozen": lambda own: own.transformer.wpe.requires_grad_(False),
    "untied": lambda own: setattr(own.lm_head, "weight", nn.Parameter(own.lm_head.weight.detach().clone())),
    "dropout of one": lambda own: setattr(own.transformer.h[1].mlp.dropout, "p", 0.5),
    "checkpointing": lambda own: own.gradient_checkpointing_enable(),
    "evaluation": lambda own: own.eval(),
    "attention of a part": lambda own: setattr(own.transformer.h[0].attn, "config", eager(own.config)),
    "setting in a tuple": lambda own: setattr(own.transformer.h[0], "window", (1, 2)),
    "buffer": lambda own: own.register_buffer("ema", torch.zeros(9)),
}


@pytest.mark.parametrize("change", [*OTHER_OPTIONS, *OTHER_CONFIGURATIONS, *OTHER_OBJECTS])
def test_what_differs_is_traced_anew_and_once(described, change):
    describe_once(model(), **SAME)
    for _ in range(2):
        changed = model(**OTHER_CONFIGURATIONS.get(change, {}))
        OTHER_OBJECTS.get(change, id)(changed)
        describe_once(changed, **{**SAME, **OTHER_OPTIONS.get(change, {})})
    assert len(described) == 2


def test_other_code_is_another_description_and_own_loss_none(described, monkeypatch):
    describe_once(model(), sequence_length=16)
    monkeypatch.setattr(cache, "code_hash", lambda: "another")
    for _ in range(2):
        describe_once(model(), sequence_length=16)
    assert len(described) == 2
    for _ in range(2):
        describe_once(model(), sequence_length=16, loss=lambda model, batch: model(**batch).loss)
    assert len(described) == 4


def own_forward(self, hidden):
    return hidden


class Block(nn.Dropout):
    """Code that no version tells."""


FOREIGN = {
    "partial": lambda own, _: setattr(own.h[0].mlp, "forward", functools.partial(own_forward, own.h[0].mlp)),
    "callable object": lambda own, _: setattr(own.h[0].mlp, "scale", torch.Generator.manual_seed),
    "wrapped by torch": lambda _, patch: patch.setattr(GPT2MLP, "forward", torch.no_grad()(own_forward)),
    "property": lambda _, patch: patch.setattr(GPT2MLP, "width", property(lambda self: 1), raising=False),
    "forward": lambda own, _: setattr(own.h[0].mlp, "forward", types.MethodType(own_forward, own.h[0].mlp)),
    "method": lambda _, patch: patch.setattr(
        GPT2MLP, "forward", functools.wraps(GPT2MLP.forward)(lambda self, hidden: own_forward(self, hidden))
    ),
    "loss": lambda _, patch: patch.setattr(torch.nn.functional, "cross_entropy", own_forward),
    "attention": lambda _, patch: patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", own_forward),
    "hook": lambda own, _: own.h[0].register_forward_hook(lambda module, args, output: output),
    "module": lambda own, _: setattr(own, "drop", Block(0.1)),
    "adapters": lambda own, _: with_lora(own, 4),
}


@pytest.mark.parametrize("change", FOREIGN)
def test_code_of_others_is_traced_each_time(described, monkeypatch, change):
    for _ in range(2):
        own = model()
        changed = FOREIGN[change](own if change == "adapters" else own.transformer, monkeypatch)
        describe_once(changed if change == "adapters" else own, sequence_length=16)
    assert len(described) == 2


def test_model_without_a_key_is_described_all_the_same(described):
    def only_two(samples):
        if samples > 2:
            raise ValueError("no more rows")
        return batch(samples)

    describe_once(model(), sequence_length=16, inputs=only_two)
    assert len(described) == 1


def test_damaged_file_is_made_again_and_old_ones_make_room(described, tmp_path, monkeypatch):
    found = describe_once(model(), sequence_length=16)
    (file,) = (tmp_path / "kept").iterdir()
    file.write_text(file.read_text()[:-9])
    assert describe_once(model(), sequence_length=16) == found == describe_once(model(), sequence_length=16)
    assert len(described) == 2
    digits = max(re.findall(r"\d+", file.read_text().partition('"value"')[2]), key=len)
    file.write_text(file.read_text().replace(digits, f"{int(digits) + 1}"))  # JSON still, of another model
    left = file.with_name(f"{file.name}.12345.partial")
    left.write_text("of a process that was killed")
    os.utime(left, (1, 1))
    assert describe_once(model(), sequence_length=16) == found
    assert len(described) == 3 and not left.exists()
    monkeypatch.setattr(cache, "_MAX_FILES", 1)
    describe_once(model(), sequence_length=24)
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_user_without_a_home_has_no_cache(monkeypatch):
    for name in ("OSDP_CACHE", "HF_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # no entry, as for a container's user
    assert cache.cache_folder() is None


@pytest.mark.parametrize("kept", ["0", "/dev/null/nowhere"])
def test_without_a_folder_nothing_is_kept(described, monkeypatch, kept):
    monkeypatch.delenv("OSDP_CACHE")
    usual = cache.cache_folder()
    monkeypatch.setenv("OSDP_CACHE", "1")
    assert cache.cache_folder() == usual is not None
    monkeypatch.setenv("OSDP_CACHE", kept)
    for _ in range(2):
        describe_once(model(), sequence_length=16)
    assert len(described) == 2
