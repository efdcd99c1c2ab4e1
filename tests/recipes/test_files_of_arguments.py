"""Every file of arguments fits its script, and trains a tiny model on two ranks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig, LlamaConfig, PretrainedConfig
from typer.testing import CliRunner

from hf_osdp.cli.app import app
from tests.helpers.sampling import slow_but
from tests.recipes.conftest import RECIPES, Recipe, Written, run_together

OWN = {"no_trainer": "run_clm_no_trainer", "plain": "train_plain"}
OF_FOLDER = {"bert": "run_mlm", "bert_large": "run_mlm", "glue": "run_glue"}
SCRIPTS = {
    file: OWN.get(file.stem) or OF_FOLDER.get(file.parent.name, "run_clm") for file in sorted(RECIPES.glob("*/*.yaml"))
}
ELSEWHERE = ("dataset_name", "dataset_config_name", "config_name", "tokenizer_name", "model_name_or_path")
"""What is fetched from the hub."""
SMALL = {
    "max_steps": 2, "logging_steps": 1, "warmup_steps": 0, "do_train": None, "do_eval": None, "learning_rate": 1e-3,
    "gradient_accumulation_steps": 1, "max_train_samples": 24, "save_strategy": None,
}  # fmt: skip


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_script_parses_its_file(file):
    script, content = SCRIPTS[file], yaml.safe_load(file.read_text())
    module = importlib.import_module(script)
    last = "LoopArguments" if script == "run_clm_no_trainer" else "TrainingArguments"
    names = ["PlainArguments"] if script == "train_plain" else ["ModelArguments", "DataArguments", last]
    *parsed, osdp = module.parse_arguments([getattr(module, name) for name in names], [str(file)])
    assert osdp.get("memory_limit") == content.get("memory_limit")
    assert parsed[-1].output_dir.startswith("runs/")
    if script == "run_glue":
        module.check(*parsed[1:])
    if file.stem not in OWN:
        assert parsed[-1].do_train and parsed[-1].do_eval and (not content.get("streaming") or content["max_steps"])


def made(name: str, vocabulary: int) -> PretrainedConfig:
    content = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    config = AutoConfig.for_model(content["model_type"], vocab_size=vocabulary)
    config.update_from_string(content["config_overrides"])
    return config


LIMITS = {
    "gpt2/demo": (lambda: made("gpt2/demo", 2048), "AutoModelForCausalLM"),
    "gpt2/no_trainer": (lambda: made("gpt2/no_trainer", 2048), "AutoModelForCausalLM"),
    "gpt2/small_wikitext": (lambda: made("gpt2/small_wikitext", 50257), "AutoModelForCausalLM"),
    "bert/small": (lambda: made("bert/small", 30522), "AutoModelForMaskedLM"),
    "glue/sst2_small": (lambda: made("bert/small", 30522), "AutoModelForSequenceClassification"),
    "stories260k/continue": (
        lambda: LlamaConfig(
            hidden_size=64, intermediate_size=172, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=512, max_position_embeddings=512, tie_word_embeddings=True,
        ),
        "AutoModelForCausalLM",
    ),
}  # fmt: skip
"""Files whose limit is for two processes: the model's configuration and class."""


@pytest.mark.parametrize("name", slow_but(LIMITS, daily=("gpt2/small_wikitext",)))
def test_limit_admits_a_plan_and_not_ddp(name, tmp_path):
    content, (config, auto_class) = yaml.safe_load((RECIPES / f"{name}.yaml").read_text()), LIMITS[name]
    config().save_pretrained(tmp_path)
    fixed = {
        "device": "cpu", "devices-per-node": 2, "memory-limit": content["memory_limit"], "auto-class": auto_class,
        "sequence-length": content.get("block_size") or content["max_seq_length"],
        "global-batch-size": 2 * content["per_device_train_batch_size"],
    }  # fmt: skip
    asked = ["plan", str(tmp_path), *(f"--{option}={value}" for option, value in fixed.items())]
    found = CliRunner().invoke(app, [*asked, *["--split-vocabulary"] * ("Sequence" not in auto_class)])
    assert found.exit_code == 0, found.output
    whole = f"--micro-batch-size={content['per_device_train_batch_size']}"
    refused = CliRunner().invoke(app, [*asked, "--strategy=ddp", "--no-recompute", whole])
    assert refused.exit_code == 1 and "No plan fits" in refused.output


@pytest.mark.slow
def test_each_file_trains_a_tiny_model(tmp_path: Path):
    """What is on the hub is made here; model, text and batch are small. The others have tests of their own."""
    files = [file for file in SCRIPTS if file.stem not in OWN and not file.match("gpt2/demo.yaml")]
    texts = {"sentence.jsonl": {"sentence": "word"}, "pair.jsonl": {"sentence1": "word", "sentence2": "thing"}}
    for name, row in texts.items():
        rows = [json.dumps({**row, "label": number % 2}) + "\n" for number in range(24)]
        (tmp_path / name).write_text("".join(rows))
    jobs = []
    for file in files:
        content = {name: value for name, value in yaml.safe_load(file.read_text()).items() if name not in ELSEWHERE}
        kept = tmp_path / f"{file.parent.name}-{file.name}"
        kept.write_text(yaml.safe_dump(content))
        train_file = tmp_path / ("pair.jsonl" if file.stem == "rte" else "sentence.jsonl")
        own = {"train_file": train_file} if file.parent.name == "glue" else {}
        jobs.append(Recipe(SCRIPTS[file], tmp_path).job(kept.stem, str(kept), **SMALL, **own))
    run_together(tmp_path, jobs)
    for file in files:
        losses = [line["loss"] for line in Written(tmp_path / f"{file.parent.name}-{file.stem}").steps]
        assert len(losses) == 2 and all(0 < loss < 10 for loss in losses), file
