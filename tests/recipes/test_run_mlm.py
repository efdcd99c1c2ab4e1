"""The masked language modelling recipe: masks, loss, tokenizers, groupings."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import AutoTokenizer, BertConfig, TrainingArguments
from transformers.integrations import is_tensorboard_available
from transformers.modeling_outputs import MaskedLMOutput

from hf_osdp import OSDPConfig
from tests.recipes.conftest import Written, perplexities

TEXTS = ["The class statement defines a class object.", "A name — bound to a thing — in a scope."] * 20


@pytest.mark.slow
def test_two_processes_train_and_save_as_their_switches_say(pretrained):
    """A WordPiece vocabulary, masks, bf16, checkpointed blocks, a cosine, a tracker; what is saved loads again."""
    folder, printed = pretrained
    written, perplexity, tokenizer = Written(folder), perplexities(printed), AutoTokenizer.from_pretrained(folder)
    assert perplexity["after"] < 0.7 * perplexity["before"]
    model = written.load(transformers.AutoModelForMaskedLM)
    assert tokenizer("The class", "a statement")["token_type_ids"][-1] == 1
    assert tokenizer.decode(tokenizer("The class statement")["input_ids"]) == "[CLS] the class statement [SEP]"
    assert model.config.pad_token_id == tokenizer.pad_token_id

    assert (written.plan["world_size"], written.plan["accumulation_steps"]) == (2, 2)
    report = json.loads((folder / "osdp_report.json").read_text())
    assert "blocks checkpointed" in report["inputs"]["description"]["trace"]
    rates = [0.0, 0.01, *(0.01 * (1 + math.cos(math.pi * step / 18)) for step in range(18))]
    assert [line["step"] for line in written.steps] == list(range(1, 21))
    assert [line["learning_rate"] for line in written.steps] == pytest.approx(rates, abs=1e-9)
    arguments = torch.load(folder / "training_args.bin", weights_only=False)
    assert arguments.bf16 and arguments.gradient_checkpointing
    losses = {line["loss"] for line in written.steps}
    assert len(losses) == 20 and any(loss % 2**-7 for loss in losses), "a mean in float32"
    assert bool(list(folder.glob("runs/*/events.out.tfevents.*"))) == is_tensorboard_available()


STRATEGIES = {"group_sharding": "hsdp", "communication_with_groups": "two_stage", "none": "fsdp", None: "ddp"}


@pytest.mark.parametrize("grouping", STRATEGIES)
def test_grouping_is_a_strategy_and_goes_before_that_of_the_launcher(monkeypatch, grouping):
    from run_mlm import ModelArguments, parse_arguments, with_grouping

    from hf_osdp.integrations.plugin import OSDPPlugin

    argv = ["--output_dir", "out", *([] if grouping is None else ["--grouping", grouping])]
    model_args, _, osdp = parse_arguments((ModelArguments, TrainingArguments), argv)
    options = with_grouping(model_args.grouping, osdp)
    assert "grouping" not in options and OSDPConfig(**options)
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "{'osdp': True, 'strategy': 'ddp', 'report': False}")
    config = OSDPPlugin(osdp=options).config
    assert (config.strategy, config.report) == (STRATEGIES[grouping], False)


@pytest.mark.parametrize("config", [BertConfig, transformers.DistilBertConfig, transformers.RobertaConfig])
def test_trained_tokenizer_fits_the_model_and_is_reproducible(config):
    from shared import ModelArguments, load_tokenizer

    made, arguments = config(), ModelArguments(vocab_size=330)
    tokenizer, *others = (load_tokenizer(arguments, made, iter(TEXTS), masked=True) for _ in range(4))
    assert made.vocab_size == len(tokenizer) and made.pad_token_id == tokenizer.pad_token_id
    assert all(other.get_vocab() == tokenizer.get_vocab() for other in others)
    words = config is not transformers.RobertaConfig
    assert ("token_type_ids" in tokenizer("class")) == words
    assert "class" in tokenizer.tokenize("The class")[-1] and len(tokenizer) <= 330
    assert tokenizer("class")["input_ids"][0] == tokenizer.cls_token_id
    assert tokenizer.mask_token == ("[MASK]" if words else "<mask>")


def test_masks_for_evaluation_stay_and_those_for_training_change():
    from run_mlm import MaskingCollator, with_fixed_masks
    from shared import wordpiece_vocabulary

    tokenizer = transformers.BertTokenizer(vocab=wordpiece_vocabulary(TEXTS, 290))
    words = torch.randint(5, len(tokenizer), (16, 32), generator=torch.Generator().manual_seed(0))
    words[:, 0], words[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    blocks = Dataset.from_dict({"input_ids": words.tolist()})
    once = with_fixed_masks(blocks, tokenizer, 0.3, 1)
    assert once[:] == with_fixed_masks(blocks, tokenizer, 0.3, 1)[:]
    labels = torch.tensor(once["labels"][:])
    hidden = labels != -100
    assert 0.2 < hidden.float().mean() < 0.4 and not hidden[:, [0, -1]].any()
    assert torch.equal(labels[hidden], words[hidden])

    samples = [blocks[i] for i in range(16)]
    collators = [MaskingCollator(tokenizer, mlm_probability=0.3, seed=seed) for seed in (1, 1001, 1)]
    first, other_rank, again = (collator(samples)["labels"] for collator in collators)
    assert torch.equal(first, again) and not torch.equal(first, other_rank)
    assert not torch.equal(first, collators[0](samples)["labels"])
    assert torch.equal(collators[0]([once[i] for i in range(16)])["labels"], labels)


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
