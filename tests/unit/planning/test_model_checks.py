"""Each check of the model fires on a case made for it, and is silent on a sound one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_osdp.errors import PreflightError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.job import Precision
from hf_osdp.planning.preflight.findings import Finding, Severity
from hf_osdp.planning.preflight.model import (
    check_model,
    frozen,
    no_masters,
    nothing_to_train,
    split_ties,
    unused_block_classes,
    whole_in_one_unit,
)
from tests.helpers.models import MODELS, tiny_model


def said(finding: Finding | None, severity: Severity, *parts: str) -> None:
    assert finding is not None and finding.severity is severity
    assert all(part in finding.message for part in parts), finding.message
    assert "\n" not in finding.message and finding.line.startswith(f"{severity.value}: ")


@pytest.mark.parametrize("name", MODELS)
def test_sound_models_say_nothing(name):
    model = tiny_model(name, dtype=torch.float32)
    units = find_units(model)
    assert not any([split_ties(model), nothing_to_train(model), whole_in_one_unit(units), no_masters(units, Precision()), frozen(units)])
    assert unused_block_classes(None, ()) is None and unused_block_classes(["A"], ["A"]) is None
    check_model(model)


def test_a_unit_around_all_blocks_is_named_with_what_repeats_in_it():
    units = find_units(tiny_model("gpt2"), ["GPT2Model"])
    said(whole_in_one_unit(units), Severity.WARNING, "transformer (GPT2Model)", "all 4 of transformer.h", "block_classes")


def test_one_large_block_alone_is_no_model_in_one_unit():
    assert whole_in_one_unit(find_units(tiny_model("gpt2", layers=1), ["GPT2Block"])) is None


def test_classes_that_make_no_unit_are_named():
    said(unused_block_classes(["GPT2Block", "BertLayer"], ["GPT2Block"]), Severity.NOTE, "BertLayer", "units are GPT2Block")


def test_a_head_that_was_replaced_is_no_longer_tied():
    model = tiny_model("gpt2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    said(split_ties(model), Severity.ERROR, "lm_head.weight", "transformer.wte.weight", "tie_weights()")
    with pytest.raises(PreflightError, match=r"ties lm_head\.weight"):
        check_model(model)
    model.config.tie_word_embeddings = False
    assert split_ties(model) is None
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert split_ties(model) is None


def test_adapters_leave_ties_alone():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model("gpt2"), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    assert split_ties(adapted) is None
    assert split_ties(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_half_precision_without_masters(dtype, name):
    model = tiny_model("gpt2", dtype=dtype)
    units = find_units(model)
    said(no_masters(units, Precision()), Severity.WARNING, str(dtype).removeprefix("torch."), f"mixed_precision={name}")
    assert no_masters(units, Precision.named(name)) is None
    assert no_masters(find_units(model.requires_grad_(False)), Precision()) is None


def test_frozen_parameters_are_counted_and_all_of_them_are_an_error():
    model = tiny_model("gpt2")
    model.transformer.wte.requires_grad_(False)
    said(frozen(find_units(model)), Severity.NOTE, "1.2K of", "plan again.")
    said(frozen(find_units(model), in_optimizer=1), Severity.NOTE, "was given 1 of them")
    model.requires_grad_(False)
    assert frozen(find_units(model)) is None
    said(nothing_to_train(model), Severity.ERROR, "parameters are frozen", "requires_grad=True")
    check_model(model, trains=False)
