"""The classification recipe: data, metrics, early stopping, adapters."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, DatasetDict, Features
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, EvalPrediction
from transformers.modeling_outputs import SequenceClassifierOutput

from tests.recipes.conftest import Recipe, Written, run_together

PAIRS = [
    ("it rains .", "the street is wet .", 0),
    ("it rains .", "the sun shines .", 1),
    ("a dog runs .", "an animal runs .", 0),
] * 24


def encoded(tokenizer, pairs: list[tuple[str, str, int]]):
    firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
    return tokenizer(firsts, seconds, padding="max_length", truncation=True, max_length=16, return_tensors="pt")


def scores(output: str) -> dict[str, float]:
    return {when: float(value) for when, value in re.findall(r"accuracy (before|after) training: (-?[\d.]+)", output)}


@pytest.mark.slow
def test_two_processes_learn_stop_early_and_save(tmp_path, pretrained):
    """From what run_mlm.py saved, pairs learned by heart; training ends once the best accuracy is no longer beaten.

    Adapters too.
    """
    recipe, (base, _), pairs = Recipe("run_glue", tmp_path), pretrained, tmp_path / "pairs.jsonl"
    rows = ({"sentence1": one, "sentence2": other, "label": label} for one, other, label in PAIRS)
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = dict(
        train_file=pairs, validation_file=pairs, max_eval_samples=None, max_train_samples=None, config_overrides=None,
        model_name_or_path=base, logging_steps=1, eval_strategy="steps", eval_steps=6, save_steps=6,
        save_strategy="steps", load_best_model_at_end=True, metric_for_best_model="accuracy",
    )  # fmt: skip
    job = recipe.job(
        "out", max_steps=60, learning_rate=0.005, save_total_limit=1, early_stopping_patience=2, micro_batch_size=2,
        **common,
    )  # fmt: skip
    short = {"max_steps": 18, "learning_rate": 0.02, "pad_to_max_length": False}
    adapters = recipe.job("adapters", lora_rank=4, **short, **common)
    printed, of_adapters = run_together(tmp_path, [job, adapters])
    assert_adapters_are_saved(tmp_path / "adapters", base, scores(of_adapters)["after"])
    assert scores(printed)["after"] == 1.0
    steps = Written(recipe.output).steps
    losses = [line["loss"] for line in steps]
    accuracies = [line["eval_accuracy"] for line in Written(recipe.output).log if "eval_accuracy" in line][1:]
    assert losses[-1] < 0.3 * losses[0] and losses[0] < 1.1  # not the sum over processes or micro-batches
    assert all(line["samples_per_s"] > 0 and not line.keys() & {"perplexity", "tokens_per_s"} for line in steps)
    best = accuracies.index(1.0)
    assert len(losses) < 60 and accuracies[best + 1 : best + 3] == [1.0, 1.0]

    model = AutoModelForSequenceClassification.from_pretrained(recipe.output)
    with torch.no_grad():
        logits = model(**encoded(AutoTokenizer.from_pretrained(recipe.output), PAIRS[:3])).logits
    assert logits.argmax(-1).tolist() == [0, 1, 0]
    assert Written(recipe.output).plan["world_size"] == 2


def assert_adapters_are_saved(folder: Path, base: Path, accuracy: float) -> None:
    """In peft's format, with the head that was trained beside them, and as good as they were."""
    peft = pytest.importorskip("peft")
    assert not list(folder.glob("model*.safetensors"))
    start = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    model, tokenizer = peft.PeftModel.from_pretrained(start, folder).eval(), AutoTokenizer.from_pretrained(folder)
    names = {name for name, parameter in model.named_parameters() if "lora_B" in name and parameter.abs().max() > 0}
    assert len(names) == 12, "two layers with six projections each were trained"
    with torch.no_grad():
        right = model(**encoded(tokenizer, PAIRS)).logits.argmax(-1) == torch.tensor([pair[2] for pair in PAIRS])
    assert right.float().mean().item() == pytest.approx(accuracy, abs=1e-4)


def test_adapters_save_heads_of_several_layers_whole(tmp_path):
    """RoBERTa's has two, and peft would copy the second twice."""
    peft = pytest.importorskip("peft")
    from run_glue import ModelArguments, new_heads
    from shared import with_adapters

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
    config = transformers.RobertaConfig(**sizes, vocab_size=50, num_labels=2)
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / "base")
    load = AutoModelForSequenceClassification.from_pretrained
    start, info = load(tmp_path / "base", output_loading_info=True)
    wanted = ModelArguments(model_name_or_path="base", lora_rank=2)
    model = with_adapters(start, wanted, "SEQ_CLS", new_heads(info["missing_keys"]))
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([1])}
    model(**batch).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapters").eval()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model.eval()(**batch).logits)


def test_mean_over_samples_is_that_of_all_micro_batches():
    from run_glue import mean_over_samples

    logits = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels, number = torch.tensor([0, 1, 1, 0]), torch.tensor(4)
    batches = [(SequenceClassifierOutput(logits=logits[part]), labels[part]) for part in (slice(3), slice(3, 4))]
    whole = torch.nn.functional.cross_entropy(logits, labels).item()
    assert sum(mean_over_samples(*batch, number) for batch in batches).item() == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("predicted", "true", "accuracy", "matthews"),
    [
        # TP 3, TN 2, FP 1, FN 2: (3·2 - 1·2) / sqrt(4 · 5 · 3 · 4)
        ([1, 1, 1, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0], 5 / 8, 4 / math.sqrt(240)),
        # of three classes, s=4, c=3, p=(2,1,1), t=(1,2,1): (12 - 5) / sqrt((16 - 6) (16 - 6))
        ([0, 0, 1, 2], [0, 1, 1, 2], 0.75, 0.7),
    ],
)
def test_metrics_by_hand(predicted, true, accuracy, matthews):
    from run_glue import load_metric

    prediction = EvalPrediction(predictions=np.eye(3)[predicted], label_ids=np.array(true))
    assert load_metric("accuracy")(prediction) == pytest.approx({"accuracy": accuracy})
    assert load_metric("matthews_correlation")(prediction) == pytest.approx({"matthews_correlation": matthews})


def test_made_reviews_agree_with_their_labels():
    from made_reviews import made_reviews

    reviews = made_reviews(5)
    rows = [row for split in reviews.values() for row in split]
    labels = {row["sentence"]: row["label"] for row in rows}
    assert len(labels) == len(rows) == 2 * sum(labels.values()) == 11520 and reviews["validation"].num_rows == 576
    assert labels["the plot was never very dull"] == 1 and labels["the score is not so clever"] == 0


def test_set_class_names_keeps_the_classes_of_a_trained_head():
    from run_glue import set_class_names

    features = Features({"label": ClassLabel(names=["negative", "positive"])})
    rows = DatasetDict(train=Dataset.from_dict({"label": [0, 1]}, features=features))
    with pytest.raises(ValueError, match="model has 3 classes, but the data has 2"):
        set_class_names(BertConfig(num_labels=3, architectures=["BertForSequenceClassification"]), rows)
    set_class_names(config := BertConfig(num_labels=3, architectures=["BertForMaskedLM"]), rows)
    assert config.num_labels == 2 and config.label2id == {"negative": 0, "positive": 1}
