"""Bad input of every recipe beside docs/data/bad_inputs.csv: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import datasets.config
import pytest

from hf_osdp.integrations.launch import run_script
from tests.recipes.conftest import Recipe

CASES: list[tuple[str, dict[str, object], str]] = [
    ("run_clm", dict(train_file="none.txt"), "none.txt"),
    ("run_clm", dict(train_file="empty.txt"), "empty.txt"),
    ("run_clm", dict(train_file="some.txt", validation_file="some.txt"), "block"),
    ("run_clm", dict(train_file="some.pdf"), "some.pdf"),
    ("run_clm", dict(train_file="line.txt"), "line.txt"),
    ("run_clm", dict(train_file="latin.txt"), "latin.txt"),
    ("run_clm", dict(train_file="LINES.JSONL"), "LINES.JSONL"),
    ("run_clm", dict(train_file="numbers.jsonl"), "numbers.jsonl"),
    ("run_clm", dict(block_size=64), "block_size"),
    ("run_clm", dict(config_overrides="n_layers=2"), "n_layers=2"),
    ("run_clm", dict(model_type="gpt9", config_overrides=None), "gpt9"),
    ("run_clm", dict(resume_from_checkpoint="nowhere"), "nowhere"),
    ("run_clm", dict(lora_rank=2), "lora_rank"),
    ("run_clm", dict(do_train=None, do_eval=None), "Nothing to do"),
    ("run_clm", dict(report_to="wandb"), "wandb"),
    ("run_clm", dict(streaming=True, max_steps=None), "max_steps"),
    ("run_clm", dict(streaming=True, shuffle_buffer=-1), "shuffle_buffer"),
    ("run_clm", dict(streaming=True, do_eval=None, train_file="empty.txt"), "block"),
    ("run_clm", dict(streaming=True, train_file="other.csv"), "first row"),
    ("run_clm", dict(streaming=True, train_file="lines.jsonl"), "lines.jsonl"),
    ("run_clm", dict(streaming=True, train_file="line.txt", max_eval_samples=None), "max_eval_samples"),
    ("run_clm", dict(file="memory_limit: 1GiB\nmax_steps: 1\nmemory_limit: 2GiB\n"), 'keep one in "bad.yaml", line 3'),
    ("run_mlm", dict(grouping="none", plan="plan.json"), "grouping"),
    ("run_mlm", dict(model_type="gpt2"), "gpt2"),
    ("run_mlm", dict(block_size=2), "block_size"),
    ("run_mlm", dict(config_overrides="vocab_size=299"), "vocab_size=299"),
    ("run_mlm", dict(tokenizer_name="causal"), "no cls_token; name one of a masked language model"),
    ("run_clm_no_trainer", dict(max_train_samples=3), "3 blocks"),
    ("run_clm_no_trainer", dict(osdp=False), "osdp"),
    ("run_clm_no_trainer", dict(lr_scheduler_type="zigzag"), "zigzag"),
    ("run_clm_no_trainer", dict(learning_rate=0), "learning_rate"),
    ("run_clm_no_trainer", dict(file="do_train: true\n"), "--do_train"),
    ("train_plain", dict(max_train_samples=3), "3 blocks"),
    ("train_plain", dict(mixed_precision="fp8"), "mixed_precision"),
    ("run_glue", dict(task_name="mnli"), "mnli"),
    ("run_glue", dict(train_file="plain.jsonl"), "sentence"),
    ("run_glue", dict(train_file="words.jsonl"), "words.jsonl"),
    ("run_glue", dict(train_file="hidden.jsonl"), "hidden.jsonl"),
    ("run_glue", dict(train_file="same.jsonl"), "same.jsonl"),
    ("run_glue", dict(train_file="sentences.jsonl"), "sentences.jsonl"),
    ("run_glue", dict(metric="no_such_metric"), "no_such_metric"),
    ("run_glue", dict(max_seq_length=64), "max_seq_length"),
    ("run_glue", dict(early_stopping_patience=2), "early_stopping_patience"),
    ("run_glue", dict(metric_for_best_model="f1"), "metric_for_best_model"),
    ("run_glue", dict(model_type="whisper", config_overrides=None), "classification"),
    ("run_glue", dict(task_name="rte"), "rte"),
]
"""A script, changes of its arguments (`file`: the content of a file of them), and a part of the line."""
TEXTS = {
    "empty.txt": " \n", "some.txt": "A few words only.\n", "some.pdf": "A few words only.\n",
    "line.txt": "A few words only. " * 200, "numbers.jsonl": '{"text": 1}\n{"text": 2}\n',
    "other.csv": "name,words\nAnna,fine\n",
    **dict.fromkeys(("lines.jsonl", "LINES.JSONL"), '{"text": "fine"}\n{"text": \n'),
}  # fmt: skip
TABLES = {
    "words": {"label": "good"}, "hidden": {"label": -1}, "same": {"label": 1}, "sentences": {"sentence": 1},
    "plain": {"label": None},
}  # fmt: skip
"""What stands in each row in place of what should."""


@pytest.fixture
def bad_files(tmp_path: Path) -> None:
    """Every file that a case names and that exists."""
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.txt").write_bytes("Été à la mer.\n".encode("latin-1") * 50)
    for name, change in TABLES.items():
        rows = [{"sentence": f"word {number}", "label": number % 2, **change} for number in range(20)]
        kept = [{key: value for key, value in row.items() if value is not None} for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


@pytest.mark.parametrize(("script", "changes", "part"), CASES, ids=lambda value: str(value)[:60])
def test_bad_input_is_one_clear_line(bad_files, monkeypatch, capfd, tmp_path, script, changes, part):
    from transformers import GPT2Tokenizer

    if changes.get("tokenizer_name"):
        made = GPT2Tokenizer().train_new_from_iterator(["A few words only."], 300, show_progress=False)
        made.save_pretrained(tmp_path / "causal")
    (tmp_path / "bad.yaml").write_text(changes.get("file", ""))
    file = ["bad.yaml"] if "file" in changes else []
    recipe, module = Recipe(script, tmp_path), importlib.import_module(script)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", recipe.command(*file, **{**changes, "file": None}))
    with pytest.raises(SystemExit) as stop:
        run_script(module.main)
    errors = capfd.readouterr().err
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 2 and len(lines) == 1 and part in lines[0], errors
    assert not recipe.output.exists()
