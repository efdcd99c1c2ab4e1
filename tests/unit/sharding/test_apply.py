"""What becomes of a model before it is described or sharded."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp.planner.description import DType
from hf_osdp.planner.training_job import Precision
from hf_osdp.sharding.environment import prepare_model, prepare_precision
from tests.helpers.architectures import tiny_vision


def test_model_is_prepared_with_float32_masters_and_without_cache(caplog):
    layer = nn.Linear(2, 2, dtype=torch.bfloat16)
    layer.bias.requires_grad_(False)
    prepare_precision(layer, Precision())
    assert layer.weight.dtype is torch.bfloat16 and not caplog.text
    for _ in range(2):
        prepare_precision(layer, Precision(compute=DType.BFLOAT16))
        assert [record.getMessage() for record in caplog.records] == [
            "1 trained parameters of the model in bfloat16 will be in float32, twice their memory, as mixed precision"
            " needs; to train them as they are, leave mixed precision (bf16, fp16) out."
        ]
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.float32, torch.bfloat16)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    assert model.config.use_cache
    prepare_model(model, Precision())
    assert not model.config.use_cache
    assert model(input_ids=torch.zeros(1, 2, dtype=torch.long)).past_key_values is None
    prepare_model(nn.Linear(2, 2), Precision())  # has no configuration
    model = tiny_vision("LlavaForConditionalGeneration")  # its text part has the switch
    prepare_model(model, Precision())
    assert model(input_ids=torch.zeros(1, 2, dtype=torch.long)).past_key_values is None
