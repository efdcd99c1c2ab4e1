"""Which units are found in models of many architectures."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import Gemma3nTextConfig

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.units import canonical_name, find_units
from hf_osdp.planner.description import GatherSpan

BLOCKS = {
    "GPT2LMHeadModel": {"GPT2Block": 3}, "BertForMaskedLM": {"BertLayer": 2},
    "BertForSequenceClassification": {"BertLayer": 2}, "T5ForConditionalGeneration": {"T5Block": 4},
    "BartForConditionalGeneration": {"BartEncoderLayer": 2, "BartDecoderLayer": 2},
    "LlamaForCausalLM": {"LlamaDecoderLayer": 2}, "GemmaForCausalLM": {"GemmaDecoderLayer": 2},
    "ViTForImageClassification": {"ViTLayer": 2}, "MixtralForCausalLM": {"MixtralDecoderLayer": 2},
    "WhisperForConditionalGeneration": {"WhisperEncoderLayer": 2, "WhisperDecoderLayer": 2},
}  # fmt: skip
EMBEDDING_AND_HEAD = {
    "GPT2LMHeadModel": {"transformer.wte+lm_head": GatherSpan.STEP},
    "BertForMaskedLM": {"bert.embeddings.word_embeddings+cls.predictions": GatherSpan.STEP},
    "BertForSequenceClassification": {"bert.embeddings.word_embeddings": GatherSpan.USE},
    "LlamaForCausalLM": {"model.embed_tokens": GatherSpan.USE, "lm_head": GatherSpan.USE},
    "GemmaForCausalLM": {"model.embed_tokens+lm_head": GatherSpan.STEP},
    "WhisperForConditionalGeneration": {"model.decoder.embed_tokens+proj_out": GatherSpan.STEP},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_units_are_root_blocks_embedding_head_each_parameter_once(meta_model, name):
    model = meta_model(name)
    root, *units = find_units(model)
    assert (root.fqn, root.module_names, root.span) == ("", ("",), GatherSpan.STEP)
    listed = [parameter.name for unit in (root, *units) for parameter in unit.parameters]
    assert sorted(listed) == sorted(dict(model.named_parameters()))
    assert sum(unit.numel for unit in (root, *units)) == sum(p.numel() for p in model.parameters())
    blocks = [unit for unit in units if unit.class_name in BLOCKS[name] and unit.span is GatherSpan.USE]
    assert Counter(unit.class_name for unit in blocks) == BLOCKS[name]
    others = {unit.fqn: unit.span for unit in units if unit.class_name not in BLOCKS[name]}
    assert others == EMBEDDING_AND_HEAD.get(name, others)


def test_large_tables_outside_of_blocks_are_units():
    """Gemma 3n's embeddings for each layer have a third of its parameters."""
    units = find_units(build_on_meta(Gemma3nTextConfig()))
    table = next(unit for unit in units if unit.fqn == "model.embed_tokens_per_layer")
    assert table.span is GatherSpan.USE and table.numel > 0.3 * sum(unit.numel for unit in units)
    assert sum(unit.class_name == "Gemma3nTextDecoderLayer" for unit in units) == Gemma3nTextConfig().num_hidden_layers
    with torch.device("meta"):
        model = nn.ModuleDict({
            "blocks": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)),
            "table": nn.Embedding(2**18, 8), "small": nn.Embedding(8, 8), "tied": nn.Linear(8, 2**18),
        })  # fmt: skip
    model.weight = model["tied"].weight
    assert [unit.fqn for unit in find_units(model)] == ["", "blocks.0", "blocks.1", "table"]


def test_input_embedding_that_is_a_list_is_no_unit():
    class OfCodebooks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.ModuleList(nn.Embedding(9, 4) for _ in range(3))
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def get_input_embeddings(self) -> nn.Module:
            return self.embed_tokens

    assert "embed_tokens" not in {unit.fqn for unit in find_units(OfCodebooks())}


def test_tied_parameters_are_listed_with_all_their_names(meta_model):
    tied = next(u for u in find_units(meta_model("BertForMaskedLM")) if u.shared)
    assert tied.module_names == ("bert.embeddings.word_embeddings", "cls.predictions")
    assert set(tied.shared) == {
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    }
    assert "cls.predictions.transform.dense.weight" in [p.name for p in tied.parameters]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)


class Inner(nn.Linear):
    pass


class PartsNamed(nn.Module):
    _no_split_modules = ("Inner",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Inner(2, 2), nn.Linear(2, 2)) for _ in range(3))


def test_plain_modules_split_at_lists_and_nested_count_once():
    names = ["", "blocks.0", "blocks.1", "blocks.2"]
    assert [u.fqn for u in find_units(Stack())] == names
    assert [u.fqn for u in find_units(Stack(), ["Block", "Linear"])] == [*names, "head"]
    assert [u.fqn for u in find_units(PartsNamed())] == ["", "layers.0", "layers.1", "layers.2"]
    stages = nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)) for _ in range(2))
    found = find_units(nn.ModuleDict({"stages": stages}))  # a list has no forward, which FSDP2 needs
    assert [u.fqn for u in found if u.fqn] == [f"stages.{stage}.{layer}" for stage in (0, 1) for layer in (0, 1)]


def test_names_are_canonical_through_checkpoint_wrappers():
    wrapped = Stack()
    wrapped.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in wrapped.blocks)
    assert find_units(wrapped) == find_units(Stack())
    assert canonical_name("blocks.0._checkpoint_wrapped_module.inner.weight") == "blocks.0.inner.weight"


def test_module_in_two_blocks_is_a_unit_for_the_whole_step():
    model = Stack()
    model.blocks[1].inner = model.blocks[0].inner
    model.other, model.activation = model.blocks, nn.ReLU()
    units = {u.fqn: u for u in find_units(model, ["Block"])}
    assert {fqn: unit.span for fqn, unit in units.items() if "inner" in fqn} == {"blocks.0.inner": GatherSpan.STEP}
    assert [p.name for p in units["blocks.0.inner"].parameters] == ["blocks.0.inner.weight", "blocks.0.inner.bias"]
    assert [p.name for p in units["blocks.1"].parameters] == ["blocks.1.outer.weight", "blocks.1.outer.bias"]


def test_tie_between_blocks_is_a_unit_for_the_whole_step():
    model = Stack()
    model.blocks[2].outer.weight = model.blocks[0].inner.weight
    units = {u.fqn: u for u in find_units(model, ["Block"])}
    tied = units["blocks.0.inner+blocks.2.outer"]
    assert tied.span is GatherSpan.STEP
    assert {p.name for p in tied.parameters} == {"blocks.0.inner.weight", "blocks.0.inner.bias", "blocks.2.outer.bias"}
    assert {p.name for p in units["blocks.2"].parameters} == {"blocks.2.inner.weight", "blocks.2.inner.bias"}
