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
    books, layers = (nn.ModuleList(kind(9, 4) for _ in range(3)) for kind in (nn.Embedding, nn.Linear))
    model = nn.ModuleDict({"embed_tokens": books, "layers": layers})
    model.get_input_embeddings = lambda: books
    assert "embed_tokens" not in {unit.fqn for unit in find_units(model)}


def test_tied_parameters_are_listed_with_all_their_names(meta_model):
    tied = next(u for u in find_units(meta_model("BertForMaskedLM")) if u.shared)
    assert tied.module_names == ("bert.embeddings.word_embeddings", "cls.predictions")
    assert set(tied.shared) == {
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    }
    assert "cls.predictions.transform.dense.weight" in [p.name for p in tied.parameters]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)


class Inner(nn.Linear):
    pass


def test_plain_modules_split_at_lists_and_nested_count_once():
    names = ["", "blocks.0", "blocks.1", "blocks.2"]
    assert [u.fqn for u in find_units(Stack())] == names
    assert [u.fqn for u in find_units(Stack(), ["Block", "Linear"])] == [*names, "head"]
    parts = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(Inner(2, 2), nn.Linear(2, 2)) for _ in range(3))})
    parts._no_split_modules = ("Inner",)
    assert [u.fqn for u in find_units(parts)] == names
    stages = nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)) for _ in range(2))
    found = find_units(nn.ModuleDict({"stages": stages}))  # a list has no forward, which FSDP2 needs
    assert [u.fqn for u in found if u.fqn] == [f"stages.{stage}.{layer}" for stage in (0, 1) for layer in (0, 1)]


def test_names_are_canonical_through_checkpoint_wrappers():
    wrapped = Stack()
    wrapped.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in wrapped.blocks)
    assert find_units(wrapped) == find_units(Stack())
    assert canonical_name("blocks.0._checkpoint_wrapped_module.inner.weight") == "blocks.0.inner.weight"


def share_module(model: Stack) -> None:
    model.blocks[1].inner = model.blocks[0].inner
    model.other, model.activation = model.blocks, nn.ReLU()


def share_weight(model: Stack) -> None:
    model.blocks[1].outer.weight = model.blocks[0].inner.weight


@pytest.mark.parametrize(("share", "fqn", "held", "left"), [
    (share_module, "blocks.0.inner", ["0.inner.weight", "0.inner.bias"], ["1.outer.weight", "1.outer.bias"]),
    (share_weight, "blocks.0.inner+blocks.1.outer", ["0.inner.weight", "0.inner.bias", "1.outer.bias"],
     ["1.inner.weight", "1.inner.bias"]),
])  # fmt: skip
def test_what_two_blocks_share_is_a_unit_for_the_whole_step(share, fqn, held, left):
    share(model := Stack())
    units = {unit.fqn: unit for unit in find_units(model, ["Block"])}
    assert [name for name, unit in units.items() if unit.span is GatherSpan.STEP] == ["", fqn]
    for name, wanted in ((fqn, held), ("blocks.1", left)):
        assert [p.name.removeprefix("blocks.") for p in units[name].parameters] == wanted
