"""Descriptions of models and configurations."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hf_osdp.errors import DescriptionError
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.description import DType, GatherSpan
from hf_osdp.tracing.describe import describe
from tests.helpers.sampling import slow_but

DEFAULT_CLASS = {
    "GPT2LMHeadModel": "GPT2LMHeadModel",
    "BertForMaskedLM": "BertForMaskedLM",
    "T5ForConditionalGeneration": "T5ForConditionalGeneration",
    "BartForConditionalGeneration": "BartForConditionalGeneration",
    "LlamaForCausalLM": "LlamaForCausalLM",
    "ViTForImageClassification": "ViTForImageClassification",
    "WhisperForConditionalGeneration": "WhisperForConditionalGeneration",
}
TRACED = [
    *DEFAULT_CLASS,
    "BertForSequenceClassification",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "OPTForCausalLM",
    "DistilBertForMaskedLM",
]

TRACED_AS_CUDA = ["GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "MixtralForCausalLM"]


@pytest.mark.parametrize(("name", "expected"), DEFAULT_CLASS.items())
def test_the_class_that_a_configuration_stands_for(configuration, name, expected):
    assert type(build_on_meta(configuration(name))).__name__ == expected


def test_architectures_of_the_configuration_decide(configuration):
    config = configuration("BertForMaskedLM", architectures=["BertForTokenClassification"])
    assert type(build_on_meta(config)).__name__ == "BertForTokenClassification"
    assert type(build_on_meta(config, "BertForMaskedLM")).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("name", "device_type"),
    slow_but(
        [*((name, "cpu") for name in TRACED), *((name, "cuda") for name in TRACED_AS_CUDA)],
        daily=[
            ("MixtralForCausalLM", "cuda"),
            ("BertForMaskedLM", "cuda"),
            *((name, "cpu") for name in TRACED if name not in TRACED_AS_CUDA),
        ],
    ),
)
def test_architectures_are_traced(meta_model, name, device_type):
    description = describe(meta_model(name), sequence_length=16, device_type=device_type)
    assert description.trace.startswith(f"fake tensors, device {device_type}")
    assert ("(compute capability 8.6 assumed)" in description.trace) == (device_type == "cuda")
    blocks = [i for i, unit in enumerate(description.units) if unit.class_name in description.block_classes]
    assert [s.unit for s in description.segments if s.unit in blocks] == blocks
    assert all(s.saved_bytes(2) > 0 and s.forward.matmul_flops(2) > 0 for s in description.segments if s.unit in blocks)


def test_a_model_and_its_configuration_give_one_description(configuration, real_model):
    of_model = describe(real_model("GPT2LMHeadModel"), sequence_length=16)
    of_configuration = describe(configuration("GPT2LMHeadModel"), sequence_length=16)
    assert of_model == of_configuration
    assert of_model.fingerprint == of_configuration.fingerprint


def test_facts_of_a_description(configuration):
    description = describe(configuration("BertForMaskedLM"), sequence_length=16, compute_dtype=DType.BFLOAT16)
    assert (description.model_class, description.compute_dtype, description.block_classes) == (
        "BertForMaskedLM",
        DType.BFLOAT16,
        ("BertLayer",),
    )
    assert {p.dtype for u in description.units for p in u.parameters} == {DType.FLOAT32}
    assert description.input_bytes(3) == 3 * 3 * 16 * 8  # ids, mask and labels in int64
    assert description.buffer_bytes == 2 * 512 * 8  # position and token type ids


def test_use_units_own_the_segments_in_which_they_run(configuration):
    description = describe(configuration("LlamaForCausalLM"), sequence_length=16)
    order = [description.units[s.unit].fqn for s in description.segments]
    assert order == ["model.embed_tokens", "", "model.layers.0", "model.layers.1", "", "lm_head", ""]
    assert description.units[1].span is GatherSpan.USE


@pytest.mark.parametrize(
    ("name", "tokens", "limit"),
    slow_but(
        [("GPT2LMHeadModel", 65, 64), ("BertForMaskedLM", 513, 512), ("RobertaForMaskedLM", 65, 64)], daily=[("RobertaForMaskedLM", 65, 64)]
    ),
)
def test_more_tokens_than_positions_are_refused(configuration, name, tokens, limit):
    with pytest.raises(ValueError, match=f"sequence_length={tokens} is more than the {limit} positions.*use at most {limit}"):
        describe(configuration(name), sequence_length=tokens)
    describe(configuration(name), sequence_length=limit)


def test_rotary_models_have_no_such_limit(configuration):
    describe(configuration("LlamaForCausalLM", max_position_embeddings=8), sequence_length=16)


def test_bad_arguments_are_refused(configuration):
    with pytest.raises(ValueError, match="sequence_length=0 must be at least 1"):
        describe(configuration("GPT2LMHeadModel"), sequence_length=0)
    with pytest.raises(ValueError, match="device_type='tpu' is not known; use cpu or cuda"):
        describe(configuration("GPT2LMHeadModel"), sequence_length=8, device_type="tpu")
    with pytest.raises(DescriptionError, match="transformers has no class 'AutoModelForNothing'"):
        describe(configuration("GPT2LMHeadModel"), sequence_length=8, auto_class="AutoModelForNothing")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, target)


def test_plain_modules_need_inputs():
    with pytest.raises(DescriptionError, match=r"Plain is not a transformers model.*pass inputs"):
        describe(Plain(), sequence_length=1)
    description = describe(Plain(), sequence_length=1, inputs=lambda n: {"x": torch.zeros(n, 8), "target": torch.zeros(n, 8)})
    assert [s.unit for s in description.segments] == [1, 2, 3, 0]
    assert description.segments[1].saved_bytes(5) == 2 * 5 * 8 * 4  # the product and its GELU
    assert description.input_bytes(5) == 2 * 5 * 8 * 4


def test_a_failing_trace_without_a_configuration_says_why():
    with pytest.raises(DescriptionError, match=r"Plain could not be traced .TypeError.*pass inputs that its forward accepts"):
        describe(Plain(), sequence_length=1, inputs=lambda n: {"y": torch.zeros(n, 8)})


def test_a_failing_trace_falls_back_to_the_formula(real_model, caplog):
    model = real_model("LlamaForCausalLM")
    inputs = {"input_ids": torch.zeros(1, 16, dtype=torch.long), "no_such_argument": 1}
    model.forward = lambda input_ids: None
    with caplog.at_level(logging.WARNING, logger="hf_osdp.tracing.describe"):
        description = describe(model, sequence_length=16, inputs=lambda n: inputs)
    assert description.trace == "formula (arXiv 2205.05198, equation 2); the trace failed with TypeError"
    assert "LlamaForCausalLM could not be traced (TypeError" in caplog.text
    block = next(s for s in description.segments if description.units[s.unit].class_name == "LlamaDecoderLayer")
    assert block.saved_bytes(1) == 16 * 32 * (34 + 5 * 2 * 16 / 32) * 4 / 2
