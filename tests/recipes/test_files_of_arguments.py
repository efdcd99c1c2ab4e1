"""Every file of arguments fits its script, and trains a tiny model on two ranks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import yaml

from tests.recipes.conftest import Recipe, log_of
from tests.recipes.ranks import run_together

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes").glob("*/*.yaml"))
ELSEWHERE = ("dataset_name", "dataset_config_name", "config_name", "tokenizer_name", "model_name_or_path")
"""What is fetched from the hub."""
TRAINED = ("run_clm", "run_mlm", "run_glue")
ALREADY = ("gpt2/demo.yaml",)
"""Trained in test_run_clm.py; those of the other scripts in their own tests."""
SMALL = {
    "max_steps": 2, "logging_steps": 1, "warmup_steps": 0, "do_train": None, "do_eval": None, "learning_rate": 1e-3,
    "gradient_accumulation_steps": 1, "max_train_samples": 24, "save_strategy": None,
}  # fmt: skip


def script_of(file: Path) -> str:
    own = {"no_trainer": "run_clm_no_trainer", "plain": "train_plain"}
    of_folder = {"gpt2": "run_clm", "stories260k": "run_clm", "bert": "run_mlm", "bert_large": "run_mlm"}
    return own.get(file.stem) or of_folder.get(file.parent.name, "run_glue")


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_script_parses_its_file(file):
    script, content = script_of(file), yaml.safe_load(file.read_text())
    module = importlib.import_module(script)
    if script == "train_plain":
        args, osdp = module.parse_arguments((module.PlainArguments,), [str(file)])
    else:
        arguments = module.LoopArguments if script == "run_clm_no_trainer" else module.TrainingArguments
        kinds = (module.ModelArguments, module.DataArguments, arguments)
        _, data_args, args, osdp = module.parse_arguments(kinds, [str(file)])
    assert osdp.get("memory_limit") == content.get("memory_limit")
    assert args.output_dir.startswith("runs/")
    if script == "run_glue":
        module.check(data_args, args)
        assert data_args.task_name is None or content["metric_for_best_model"] == module.TASKS[data_args.task_name][1]
    if script != "train_plain":
        assert script == "run_clm_no_trainer" or (args.do_train and args.do_eval)
        assert not content.get("streaming") or content["max_steps"]


@pytest.mark.slow
def test_each_file_trains_a_tiny_model(tmp_path):
    """What is on the hub is made here; model, text and batch are small."""
    files = [file for file in FILES if script_of(file) in TRAINED and "/".join(file.parts[-2:]) not in ALREADY]
    data = {
        "sentence": [{"sentence": f"word {number}", "label": number % 2} for number in range(24)],
        "pair": [{"sentence1": f"word {number}", "sentence2": "thing", "label": number % 2} for number in range(24)],
    }
    for name, rows in data.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    jobs = []
    for file in files:
        content = {name: value for name, value in yaml.safe_load(file.read_text()).items() if name not in ELSEWHERE}
        kept = tmp_path / f"{file.parent.name}-{file.name}"
        kept.write_text(yaml.safe_dump(content))
        train_file = tmp_path / ("pair.jsonl" if file.stem == "rte" else "sentence.jsonl")
        own = {"train_file": train_file} if file.parent.name == "glue" else {}
        jobs.append(Recipe(script_of(file), tmp_path).job(kept.stem, str(kept), **SMALL, **own))
    run_together(tmp_path, jobs)
    for file in files:
        losses = [line["loss"] for line in log_of(tmp_path / f"{file.parent.name}-{file.stem}") if "loss" in line]
        assert len(losses) == 2 and all(0 < loss < 10 for loss in losses), file
