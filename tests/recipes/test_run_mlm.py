"""The masked language modelling recipe, and what `grouping` makes of it on two nodes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    DistilBertConfig,
    RobertaConfig,
    TrainingArguments,
)
from transformers.modeling_outputs import MaskedLMOutput

from hf_osdp import OSDPConfig
from tests.recipes.conftest import load_saved, log_of, perplexities
from tests.recipes.ranks import run_together

ROOT = Path(__file__).parents[2]
SCRIPT = "run_mlm"


@pytest.mark.slow
def test_two_processes_train_and_save(pretrained):
    """A WordPiece vocabulary, masks, a plan; what is saved loads again."""
    perplexity = perplexities(pretrained.printed)
    assert perplexity["after"] < 0.7 * perplexity["before"]

    model = load_saved(pretrained.output, AutoModelForMaskedLM)
    tokenizer = AutoTokenizer.from_pretrained(pretrained.output)
    pair = tokenizer("The class", "a statement")
    assert pair["token_type_ids"] == sorted(pair["token_type_ids"]) and set(pair["token_type_ids"]) == {0, 1}
    assert tokenizer.decode(tokenizer("The class statement")["input_ids"]) == "[CLS] the class statement [SEP]"
    assert model.config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.slow
def test_switches_of_a_run_take_effect(pretrained):
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
    assert len({line["loss"] for line in steps}) == 20
    assert any(line["loss"] % 2**-7 for line in steps), "a mean in float32"
    assert bool(list(pretrained.output.glob("runs/*/events.out.tfevents.*"))) == (pretrained.tracker == "tensorboard")


# shard size and stage size of every unit on 2 nodes of 2
LAYOUTS = {"group_sharding": {(2, 1)}, "communication_with_groups": {(4, 2)}, "none": {(4, 1)}}


@pytest.mark.slow
def test_every_grouping_trains_the_same_on_two_nodes(recipe):
    """2 x 2 ranks; float32 sums in another order are all that differs."""
    options = {"nodes": 2, "do_eval": None, "logging_steps": 1, "seed": 3}
    outputs = {name: recipe.folder / name for name in LAYOUTS}
    run_together(recipe.folder, [recipe.job(name, grouping=name, **options) for name in LAYOUTS], processes=4, nodes=2)

    losses = {}
    for name, output in outputs.items():
        units = json.loads((output / "osdp_report.json").read_text())["plan"]["units"]
        assert {(unit["shard_size"], unit.get("stage_size", 1)) for unit in units} == LAYOUTS[name]
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
        losses[name] = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses["none"]) == 6 and min(losses["none"][3:]) < 0.9 * losses["none"][0]
    for name in LAYOUTS:
        assert losses[name] == pytest.approx(losses["none"], rel=1e-5), name


@pytest.mark.parametrize(
    ("grouping", "strategy"),
    [("group_sharding", "hsdp"), ("communication_with_groups", "two_stage"), ("none", "fsdp"), (None, None)],
)
def test_grouping_is_a_strategy(grouping, strategy):
    options = options_of(*([] if grouping is None else ["--grouping", grouping]))
    assert options.get("strategy") == strategy and "grouping" not in options
    assert OSDPConfig(**options).strategy == (strategy or "osdp")


def options_of(*argv: str) -> dict[str, object]:
    import run_mlm

    kinds = (run_mlm.ModelArguments, TrainingArguments)
    model_args, _, osdp = run_mlm.parse_arguments(kinds, ["--output_dir", "out", *argv])
    return run_mlm.with_grouping(model_args.grouping, osdp)


def test_grouping_goes_before_the_strategy_of_the_launcher(monkeypatch):
    from hf_osdp.integrations.trainer_arguments import requested_config

    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "{'osdp': True, 'strategy': 'ddp', 'compare': False}")
    config = requested_config(options_of("--grouping", "group_sharding"), None)
    assert (config.strategy, config.compare) == ("hsdp", False)


def test_the_recipe_for_two_machines_is_bert_large():
    """What bert-large-uncased's configuration on the hub says."""
    from run_mlm import DataArguments, ModelArguments, load_config, load_tokenizer, parse_arguments

    argv = [str(ROOT / "recipes" / "bert_large" / "two_machines.yaml"), "--vocab_size", "290"]
    model_args, data_args, *_ = parse_arguments((ModelArguments, DataArguments, TrainingArguments), argv)
    config = load_config(model_args)
    load_tokenizer(model_args, config, Dataset.from_dict({"text": TEXTS}))
    assert data_args.block_size == config.max_position_embeddings
    shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size)
    assert (*shape, config.vocab_size) == (24, 1024, 16, 4096, 30522)


TEXTS = ["The class statement defines a class object.", "A name — bound to a thing — in a scope."] * 20


@pytest.mark.parametrize("config", [BertConfig, DistilBertConfig, RobertaConfig])
def test_trained_tokenizer_fits_the_model_and_is_reproducible(config):
    import run_mlm

    text, made = Dataset.from_dict({"text": TEXTS}), config()
    tokenizers = [run_mlm.load_tokenizer(run_mlm.ModelArguments(vocab_size=330), made, text) for _ in range(4)]
    assert made.vocab_size == len(tokenizers[0]) and made.pad_token_id == tokenizers[0].pad_token_id
    tokenizer = tokenizers[0]
    assert all(other.get_vocab() == tokenizer.get_vocab() for other in tokenizers)
    words = config is not RobertaConfig
    assert ("token_type_ids" in tokenizer("class")) == words
    assert "class" in tokenizer.tokenize("The class")[-1] and len(tokenizer) <= 330
    assert tokenizer("class")["input_ids"][0] == tokenizer.cls_token_id
    assert tokenizer.mask_token == ("[MASK]" if words else "<mask>")


@pytest.fixture
def tokenizer():
    from run_mlm import wordpiece_vocabulary

    return BertTokenizer(vocab=wordpiece_vocabulary(TEXTS, 290))


def blocks_of(tokenizer, rows: int = 16, length: int = 32) -> Dataset:
    words = torch.randint(5, len(tokenizer), (rows, length), generator=torch.Generator().manual_seed(0))
    words[:, 0], words[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    return Dataset.from_dict({"input_ids": words.tolist()})


def test_masks_for_evaluation_stay_and_those_for_training_change(tokenizer):
    from run_mlm import MaskingCollator, with_fixed_masks

    blocks = blocks_of(tokenizer)
    once = with_fixed_masks(blocks, tokenizer, 0.3, 1)
    assert once[:] == with_fixed_masks(blocks, tokenizer, 0.3, 1)[:]
    hidden = torch.tensor(once["labels"][:]) != -100
    assert 0.2 < hidden.float().mean() < 0.4 and not hidden[:, [0, -1]].any()
    assert torch.equal(torch.tensor(once["labels"][:])[hidden], torch.tensor(blocks["input_ids"][:])[hidden])

    samples = [blocks[i] for i in range(16)]
    collators = [MaskingCollator(tokenizer, mlm_probability=0.3, seed=seed) for seed in (1, 1001, 1)]
    first, other_rank, again = (collator(samples)["labels"] for collator in collators)
    assert torch.equal(first, again) and not torch.equal(first, other_rank)
    assert not torch.equal(first, collators[0](samples)["labels"])
    evaluated = collators[0]([once[i] for i in range(16)])
    assert torch.equal(evaluated["labels"], torch.tensor(once["labels"][:]))


def test_mean_over_labels_weighs_masked_tokens_equally_over_micro_batches():
    from run_mlm import mean_over_labels

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 8, 10, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 10, (4, 8), generator=generator)
    labels[0, 1:] = labels[1:, ::2] = -100  # one masked token in the first micro-batch, twelve in the others
    masked = (labels != -100).sum()
    parts = [mean_over_labels(MaskedLMOutput(logits=logits[i : i + 1]), labels[i : i + 1], masked) for i in range(4)]
    whole = mean_over_labels(MaskedLMOutput(logits=logits), labels).item()
    assert sum(parts).item() == pytest.approx(whole, rel=1e-12)
