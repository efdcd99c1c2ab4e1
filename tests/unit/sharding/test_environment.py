"""What training changes in a model before it is described."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp.planner.description import DType
from hf_osdp.planner.job import Precision
from hf_osdp.sharding.environment import hold_master_weights, prepare_model


def test_master_weights_are_float32():
    layer = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    layer.bias.requires_grad_(False)
    hold_master_weights(layer, Precision())
    assert layer.weight.dtype is torch.bfloat16
    hold_master_weights(layer, Precision(compute=DType.BFLOAT16))
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.float32, torch.bfloat16)


def test_the_cache_of_keys_and_values_is_switched_off():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    assert model.config.use_cache
    prepare_model(model, Precision())
    assert not model.config.use_cache
    assert model(input_ids=torch.zeros(1, 2, dtype=torch.long)).past_key_values is None


def test_a_module_without_a_configuration_is_left_alone():
    layer = nn.Linear(2, 2)
    prepare_model(layer, Precision())
    assert not hasattr(layer, "config")
