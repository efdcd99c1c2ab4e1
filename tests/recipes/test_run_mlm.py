"""The masked language modelling recipe, and what `grouping` makes of it on two nodes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, DistilBertConfig, RobertaConfig
from transformers.modeling_outputs import MaskedLMOutput

from tests.helpers.shared_data import SHARED_DATA, needs_shared_data
from tests.recipes.conftest import log_of, perplexities
from tests.recipes.ranks import run_together

ROOT = Path(__file__).parents[2]


def test_two_processes_train_and_save(pretrained):
    """A WordPiece vocabulary, masks, a plan; what is saved loads again."""
    perplexity = perplexities(pretrained.printed)
    assert perplexity["after"] < 0.7 * perplexity["before"]

    saved = load_file(pretrained.output / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    model, report = AutoModelForMaskedLM.from_pretrained(pretrained.output, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(pretrained.output)
    pair = tokenizer("The class", "a statement")
    assert pair["token_type_ids"] == sorted(pair["token_type_ids"]) and set(pair["token_type_ids"]) == {0, 1}
    assert tokenizer.decode(tokenizer("The class statement")["input_ids"]) == "[CLS] the class statement [SEP]"
    assert len(tokenizer) == model.config.vocab_size == 300
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_its_switches_do_what_they_say(pretrained):
    """bf16, checkpointed blocks, two micro-batches, a cosine, a tracker: read from what the run left."""
    report = json.loads((pretrained.output / "osdp_report.json").read_text())
    assert (report["plan"]["world_size"], report["plan"]["accumulation_steps"]) == (2, 2)
    assert "blocks checkpointed" in " ".join(pretrained.printed.split())
    steps = [line for line in log_of(pretrained.output) if "loss" in line]
    rates = [0.0, 0.01, *(0.01 * (1 + math.cos(math.pi * step / 18)) for step in range(18))]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert [line["learning_rate"] for line in steps] == pytest.approx(rates, abs=1e-9)
    arguments = torch.load(pretrained.output / "training_args.bin", weights_only=False)
    assert arguments.bf16 and arguments.gradient_checkpointing
    assert len({line["loss"] for line in steps}) == 20 and any(line["loss"] % 2**-7 for line in steps)  # a mean in float32
    assert bool(list(pretrained.output.glob("runs/*/events.out.tfevents.*"))) == (pretrained.tracker == "tensorboard")


# ------------------------------------------------------------------------------------------------------------- groupings

LAYOUTS = {"group_sharding": {(2, 1)}, "communication_with_groups": {(4, 2)}, "none": {(4, 1)}}
"""Shard size and stage size of every unit on 2 nodes of 2."""


@pytest.mark.slow
def test_every_grouping_trains_the_same_on_two_nodes(masked):
    """2 x 2 ranks; float32 sums in another order are all that differs."""
    options = {"nodes": 2, "do_eval": None, "logging_steps": 1, "seed": 3}
    outputs = {name: masked.folder / name for name in LAYOUTS}
    run_together(masked.folder, [masked.job(name, grouping=name, **options) for name in LAYOUTS], processes=4, nodes=2)

    losses = {}
    for name, output in outputs.items():
        units = json.loads((output / "osdp_report.json").read_text())["plan"]["units"]
        assert {(unit["shard_size"], unit.get("stage_size", 1)) for unit in units} == LAYOUTS[name]
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
        losses[name] = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses["none"]) == 6 and min(losses["none"][3:]) < 0.9 * losses["none"][0]
    for name in LAYOUTS:
        assert losses[name] == pytest.approx(losses["none"], rel=1e-5), name


@pytest.fixture
def recipes(monkeypatch):
    """The modules of the recipes can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))


@pytest.mark.parametrize(
    ("grouping", "strategy"), [("group_sharding", "hsdp"), ("communication_with_groups", "two_stage"), ("none", "fsdp"), (None, None)]
)
def test_a_grouping_is_a_strategy(recipes, monkeypatch, grouping, strategy):
    from recipe_arguments import OSDPArguments

    from hf_osdp import OSDPConfig

    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    options = OSDPArguments(grouping=grouping).options(32)
    assert options.get("strategy") == strategy and "grouping" not in options
    assert OSDPConfig(**options).strategy == (strategy or "osdp")


def test_a_grouping_goes_before_the_strategy_of_the_launcher(recipes, monkeypatch):
    from recipe_arguments import OSDPArguments

    from hf_osdp.integrations.trainer_options import asked_config

    for name, value in {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "{'osdp': True, 'strategy': 'ddp', 'compare': False}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    config = asked_config(OSDPArguments(grouping="group_sharding").options(32), None)
    assert (config.strategy, config.compare) == ("hsdp", False)


def test_the_recipe_for_two_machines_is_bert_large(recipes):
    """What bert-large-uncased's configuration on the hub says; the vocabulary that is trained on the text may be smaller."""
    from model_loading import fit_config, load_config
    from recipe_arguments import DataArguments, MaskedModelArguments, OSDPArguments, parse_arguments
    from run_mlm import TASK
    from trained_tokenizers import train_masked_tokenizer
    from transformers import TrainingArguments

    types = (MaskedModelArguments, DataArguments, OSDPArguments, TrainingArguments)
    for name in ("two_machines", "demo"):
        argv = [str(ROOT / "recipes" / "bert_large" / f"{name}.yaml"), "--grouping", "group_sharding"]
        model_args, data_args, osdp_args, args = parse_arguments(types, argv)
        config = load_config(model_args, TASK)
        fit_config(config, model_args, train_masked_tokenizer(TEXTS, 290, config))
        assert (osdp_args.grouping, args.do_train, args.do_eval) == ("group_sharding", True, True)
        assert data_args.block_size == config.max_position_embeddings
        if name == "two_machines":
            shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size, config.vocab_size)
            assert shape == (24, 1024, 16, 4096, 30522)


BAD_INPUT = {
    "unknown grouping": (
        dict(grouping="hsdp"),
        "grouping='hsdp' is not known; use one of group_sharding, communication_with_groups, none.",
    ),
    "grouping and strategy": (dict(grouping="none", strategy="ddp"), "strategy=ddp cannot stand beside it"),
    "grouping and plan": (dict(grouping="none", plan="plan.json"), "plan=plan.json cannot stand beside it"),
    "grouping for the stock Trainer": (dict(grouping="none", osdp=False), "grouping=none has no effect with osdp false"),
    "groups of one process": (dict(grouping="group_sharding"), "strategy=hsdp needs a group size"),
    "stages on one machine": (dict(grouping="communication_with_groups"), "strategy=two_stage needs several nodes"),
    "causal model": (dict(model_type="gpt2"), "model_type='gpt2' is no masked language model; use one such as bert or roberta"),
    "unknown model": (dict(model_type="bert9"), "model_type='bert9' is not known to transformers; use one such as bert or roberta"),
    "nothing to guess": (dict(mlm_probability=0), "mlm_probability=0.0 must lie between 0 and 1"),
    "no room for text": (dict(block_size=2), "block_size=2 leaves no room"),
    "longer than the positions": (dict(block_size=64), "block_size=64 is longer than the model's 32 positions"),
    "fewer embeddings than tokens": (dict(config_overrides="vocab_size=299"), "less than the 300 entries of the tokenizer"),
    "missing file": (dict(train_file="none.txt"), "train file none.txt does not exist"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(masked, in_process, case):
    changes, part = BAD_INPUT[case]
    code, errors = in_process(masked, **changes)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 2, errors
    assert len(lines) == 1 and part in lines[0], errors
    assert not masked.output.exists()


@needs_shared_data
def test_the_tokenizer_of_a_causal_model_is_refused(masked, in_process):
    code, errors = in_process(masked, tokenizer_name=SHARED_DATA / "tokenizers" / "gpt2")
    assert code == 2 and "gpt2 has no cls_token; name one of a masked language model" in errors, errors


# ---------------------------------------------------------------------------------------------------- tokenizers and masks

TEXTS = ["The class statement defines a class object.", "A name — bound to a thing — in a scope."] * 20


@pytest.mark.parametrize("config", [BertConfig, DistilBertConfig, RobertaConfig])
def test_a_trained_tokenizer_is_that_of_the_model_and_always_the_same(recipes, config):
    from trained_tokenizers import train_masked_tokenizer

    tokenizers = [train_masked_tokenizer(TEXTS, 330, config()) for _ in range(4)]
    tokenizer = tokenizers[0]
    assert all(other.get_vocab() == tokenizer.get_vocab() for other in tokenizers)
    words = config is not RobertaConfig
    assert ("token_type_ids" in tokenizer("class")) == words
    assert "class" in tokenizer.tokenize("The class")[-1] and len(tokenizer) <= 330
    assert tokenizer("class")["input_ids"][0] == tokenizer.cls_token_id and tokenizer.mask_token == ("[MASK]" if words else "<mask>")


@pytest.fixture
def masking(recipes):
    from masking import Masking
    from trained_tokenizers import train_masked_tokenizer

    return Masking(tokenizer=train_masked_tokenizer(TEXTS, 290, BertConfig()), probability=0.3, seed=1)


def blocks_of(tokenizer, rows: int = 16, length: int = 32) -> Dataset:
    words = torch.randint(5, len(tokenizer), (rows, length), generator=torch.Generator().manual_seed(0))
    words[:, 0], words[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    return Dataset.from_dict({"input_ids": words.tolist()})


def test_masks_for_evaluation_stay_and_those_for_training_change(masking):
    blocks = blocks_of(masking.tokenizer)
    once = masking.once(blocks)
    assert once[:] == masking.once(blocks)[:]
    hidden = torch.tensor(once["labels"][:]) != -100
    assert 0.2 < hidden.float().mean() < 0.4 and not hidden[:, [0, -1]].any()
    assert torch.equal(torch.tensor(once["labels"][:])[hidden], torch.tensor(blocks["input_ids"][:])[hidden])

    samples, collators = [blocks[i] for i in range(16)], [masking.collator(rank) for rank in (0, 1, 0)]
    first, other_rank, again = (collator(samples)["labels"] for collator in collators)
    assert torch.equal(first, again) and not torch.equal(first, other_rank)
    assert not torch.equal(first, collators[0](samples)["labels"])
    evaluated = collators[0]([once[i] for i in range(16)])
    assert torch.equal(evaluated["labels"], torch.tensor(once["labels"][:]))


def test_a_masked_token_counts_the_same_in_every_micro_batch(recipes):
    from losses import mean_over_labels

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 8, 10, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 10, (4, 8), generator=generator)
    labels[0, 1:] = labels[1:, ::2] = -100  # one masked token in the first micro-batch, twelve in the others
    masked = (labels != -100).sum()
    parts = [mean_over_labels(MaskedLMOutput(logits=logits[i : i + 1]), labels[i : i + 1], masked) for i in range(4)]
    assert sum(parts).item() == pytest.approx(mean_over_labels(MaskedLMOutput(logits=logits), labels).item(), rel=1e-12)
