"""A model that leaves the meta device, or goes there."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.sharding.environment import apply_tied, move_to_device
from tests.helpers.models import tiny_model


@pytest.mark.parametrize(
    "model", [build_on_meta(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11)), tiny_model("gpt2")]
)
def test_tied_parameters_stay_tied_between_meta_and_device(model):
    assert model.transformer.wte.weight is model.lm_head.weight
    move_to_device(model, torch.device("cpu"), empty=True)
    assert model.transformer.wte.weight is model.lm_head.weight and model.lm_head.weight.device.type == "cpu"
    apply_tied(model, lambda tensor: tensor.to("meta"))
    assert model.transformer.wte.weight is model.lm_head.weight and model.lm_head.weight.is_meta
