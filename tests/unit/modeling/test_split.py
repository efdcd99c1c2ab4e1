"""What can be split, under which names it is saved, and what is refused in one line."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2LMHeadModel

from hf_osdp.errors import OSDPError
from hf_osdp.modeling.split.apply_split import split_operators
from hf_osdp.modeling.split.names import is_split, slice_names, split_names
from hf_osdp.planner.split import OperatorSplit
from tests.helpers.models import VOCABULARY, tiny_batch, tiny_model

NAMES = ("lm_head", "transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_attn", "transformer.h.2.mlp.c_proj")


def split(model: nn.Module, slices: int, *names: str) -> nn.Module:
    split_operators(model, [OperatorSplit(fqn=name, slices=slices) for name in names])
    return model


@pytest.mark.parametrize("slices", [2, 3, 20])
def test_outputs_and_state_dict_are_the_whole_models(slices):
    whole, inputs = tiny_model("gpt2"), tiny_batch(0)["input_ids"]
    model = split(tiny_model("gpt2"), slices, *NAMES)
    assert is_split(model) and not is_split(whole)
    assert (model(inputs).logits - whole(inputs).logits).abs().max().item() < 1e-14
    state, want = model.state_dict(), whole.state_dict()
    assert set(state) == set(want)
    assert all(torch.equal(state[name], value) for name, value in want.items())
    assert state["lm_head.weight"] is state["transformer.wte.weight"]


def test_pretrained_weights_load_and_are_saved(tmp_path):
    whole = tiny_model("gpt2", seed=5)
    model = split(tiny_model("gpt2"), 4, *NAMES)
    assert str(model.load_state_dict(whole.state_dict())) == "<All keys matched successfully>"
    model.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_loading_tells_what_does_not_fit():
    model, state = split(tiny_model("gpt2"), 4, *NAMES), tiny_model("gpt2").state_dict()
    with pytest.raises(RuntimeError, match=r"transformer.h.0.mlp.c_fc.weight: shape \(20, 79\) was given, but the model's is \(20, 80\)"):
        model.load_state_dict({**state, "transformer.h.0.mlp.c_fc.weight": torch.zeros(20, 79)})
    del state["transformer.h.0.mlp.c_fc.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*transformer.h.0.mlp.c_fc.slices.0.bias"):
        model.load_state_dict(state)


def test_names_of_slices():
    names = split_names(split(tiny_model("gpt2"), 4, *NAMES))
    fc = names["transformer.h.0.mlp.c_fc.weight"]
    assert fc.parts == tuple(f"transformer.h.0.mlp.c_fc.slices.{index}.weight" for index in range(4))
    assert (fc.dim, fc.sizes, fc.shape, fc.starts) == (1, (20,) * 4, (20, 80), (0, 20, 40, 60))
    assert names["lm_head.weight"].parts == names["transformer.wte.weight"].parts
    assert names["lm_head.weight"].sizes == (16, 15, 15, 15)


def test_slices_are_listed_once():
    names = slice_names(split(tiny_model("gpt2"), 2, "transformer.h.0.mlp.c_fc", "lm_head"))
    assert names == tuple(f"transformer.{owner}.slices.{index}" for owner in ("wte", "h.0.mlp.c_fc") for index in (0, 1))
    assert slice_names(split(tiny_model("llama"), 2, "lm_head")) == ("lm_head.slices.0", "lm_head.slices.1")
    assert slice_names(tiny_model("gpt2")) == ()


def test_blocks_in_a_checkpoint_wrapper_keep_their_names():
    model = tiny_model("gpt2")
    model.transformer.h[0] = checkpoint_wrapper(model.transformer.h[0])
    want = set(model.state_dict())
    split(model, 2, "transformer.h.0.mlp.c_fc")
    assert set(split_names(model)) == {"transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.bias"}
    assert set(model.state_dict()) == want


def test_a_second_call_splits_others():
    model = split(split(tiny_model("gpt2"), 2, NAMES[0]), 3, NAMES[1])
    assert set(model.state_dict()) == set(tiny_model("gpt2").state_dict())
    assert not split(tiny_model("gpt2"), 2)._state_dict_hooks


def test_an_operator_in_two_places_is_split_in_both():
    model = nn.ModuleDict({"a": nn.Sequential(shared := nn.Linear(4, 6)), "b": nn.Sequential(shared, nn.Linear(6, 4))})
    split(model, 2, "b.0")
    assert model["a"][0] is model["b"][0] and is_split(model["a"])


# ---------------------------------------------------------------------------------------------------------------- refusals


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.down.weight = self.up.weight


GPT2 = functools.partial(tiny_model, "gpt2")
REFUSED = {
    "absent": (GPT2, "transformer.mlp.c_fc", 2, ValueError, "no module of GPT2LMHeadModel; did you mean 'transformer.h.0.mlp.c_fc'?"),
    "absent, nothing alike": (GPT2, "nothing", 2, ValueError, "take a name from named_modules"),
    "too many slices": (GPT2, "lm_head", 62, ValueError, f"has {VOCABULARY} output features, but is to have 62 slices; use 61"),
    "another class": (GPT2, "transformer.h.0.ln_1", 2, OSDPError, "is a LayerNorm, but only nn.Linear and GPT-2's Conv1D"),
    "a subclass": (lambda: nn.MultiheadAttention(4, 2), "out_proj", 2, OSDPError, "is a NonDynamicallyQuantizableLinear"),
    "the embedding": (GPT2, "transformer.wte", 2, OSDPError, "name the head"),
    "tied": (Tied, "up", 2, OSDPError, "shares its weight or bias with 'down', which is not split with it; leave it whole"),
    "split already": (lambda: split(tiny_model("gpt2"), 2, "lm_head"), "lm_head", 2, OSDPError, "in 2 slices already"),
    "a slice": (lambda: split(tiny_model("gpt2"), 2, "lm_head"), "transformer.wte.slices.0", 2, OSDPError, "is a VocabularySlice"),
}


@pytest.mark.parametrize(("model", "fqn", "slices", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_split_says_so(model, fqn, slices, error, says):
    with pytest.raises(error) as caught:
        split(model(), slices, fqn)
    assert says in str(caught.value) and repr(fqn) in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_is_changed_where_one_cannot_be_split():
    model = tiny_model("gpt2")
    with pytest.raises(ValueError, match="no module"):
        split(model, 2, "lm_head", "nothing")
    assert not is_split(model) and "_loss_function" not in model.__dict__


def test_hooks_are_not_lost_silently():
    model = tiny_model("gpt2")
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *args: None)
    with pytest.raises(OSDPError, match="has hooks"):
        split(model, 2, "transformer.h.0.mlp.c_fc")


def test_an_operator_is_named_once():
    model = tiny_model("gpt2")
    with pytest.raises(ValueError, match="'lm_head' is to be split twice; name each operator once"):
        split(model, 2, "lm_head", "lm_head")
    assert not is_split(model)
