"""Bad input of every recipe beside docs/bad_inputs.md: one clear line on stderr, exit code 2, nothing written."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import datasets.config
import pytest

from hf_osdp.integrations.launch import run_script
from tests.helpers.shared_data import SHARED_DATA, needs_shared_data
from tests.recipes.conftest import Recipe

CASES: dict[str, dict[str, dict[str, object]]] = {
    "run_clm": {
        "missing training file": dict(train_file="none.txt"),
        "empty training file": dict(train_file="empty.txt"),
        "too short for a block": dict(train_file="some.txt", validation_file="some.txt"),
        "unknown kind of file": dict(train_file="some.pdf"),
        "one line, nothing to split": dict(train_file="line.txt"),
        "another encoding": dict(train_file="latin.txt"),
        "malformed line of JSON": dict(train_file="lines.jsonl"),
        "numbers for text": dict(train_file="numbers.jsonl"),
        "upper-case extension of JSON": dict(train_file="LINES.JSONL"),
        "longer than the positions": dict(block_size=64),
        "unknown override": dict(config_overrides="n_layers=2"),
        "unknown model type": dict(model_type="gpt9", config_overrides=None),
        "no checkpoint": dict(resume_from_checkpoint="nowhere"),
        "adapters of nothing": dict(lora_rank=2),
        "nothing to do": dict(do_train=None, do_eval=None),
        "tracker that is not there": dict(report_to="wandb"),
        "stream without an end": dict(streaming=True, max_steps=None),
        "negative buffer": dict(streaming=True, shuffle_buffer=-1),
        "stream of nothing": dict(streaming=True, do_eval=None, train_file="empty.txt"),
        "stream of other columns": dict(streaming=True, train_file="other.csv"),
        "malformed stream": dict(streaming=True, train_file="lines.jsonl"),
        "stream without validation": dict(streaming=True, train_file="line.txt", max_eval_samples=None),
    },
    "run_mlm": {
        "grouping and plan": dict(grouping="none", plan="plan.json"),
        "causal model": dict(model_type="gpt2"),
        "unknown model": dict(model_type="bert9"),
        "no room for text": dict(block_size=2),
        "fewer embeddings than tokens": dict(config_overrides="vocab_size=299"),
    },
    "run_clm_no_trainer": {
        "less than a step": dict(max_train_samples=3),
        "switched off": dict(osdp=False),
        "unknown schedule": dict(lr_scheduler_type="zigzag"),
        "no learning": dict(learning_rate=0),
        "no steps": dict(max_steps=0),
    },
    "train_plain": {
        "less than a step": dict(max_train_samples=3),
        "unknown precision": dict(mixed_precision="fp8"),
        "no steps": dict(steps=0),
    },
    "run_glue": {
        "unknown task": dict(task_name="mnli"),
        "no labels": dict(train_file="plain.jsonl"),
        "labels of text": dict(train_file="words.jsonl"),
        "negative labels": dict(train_file="hidden.jsonl"),
        "one label only": dict(train_file="same.jsonl"),
        "numbers for text": dict(train_file="sentences.jsonl"),
        "unknown metric": dict(metric="no_such_metric"),
        "longer than the positions": dict(max_seq_length=64),
        "no length": dict(max_seq_length=0),
        "patience without a best model": dict(early_stopping_patience=2),
        "best by what is not computed": dict(metric_for_best_model="f1"),
        "no classifier": dict(model_type="whisper", config_overrides=None),
        "hub without a network": dict(task_name="rte"),
    },
}
"""Script → case → changes of its arguments."""
THE_MATTER = {
    "too short for a block": "block", "nothing to do": "Nothing to do", "less than a step": "3 blocks",
    "stream of nothing": "block", "stream of other columns": "first row", "no labels": "sentence",
    "no classifier": "classification",
}  # fmt: skip
"""What the line of a case says where no argument is at fault by its name."""


@pytest.fixture
def bad_files(tmp_path: Path) -> None:
    """Every file that a case names and that exists."""
    texts = {
        "empty.txt": " \n", "some.txt": "A few words only.\n", "some.pdf": "A few words only.\n",
        "line.txt": "A few words only. " * 200, "numbers.jsonl": '{"text": 1}\n{"text": 2}\n',
        "other.csv": "name,words\nAnna,fine\n",
        **dict.fromkeys(("lines.jsonl", "LINES.JSONL"), '{"text": "fine"}\n{"text": \n'),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.txt").write_bytes("Été à la mer.\n".encode("latin-1") * 50)

    sentences = [{"sentence": f"word {number}", "label": number % 2} for number in range(20)]
    changes = {"words": {"label": "good"}, "hidden": {"label": -1}, "same": {"label": 1}, "sentences": {"sentence": 1}}
    tables = {name: [{**row, **change} for row in sentences] for name, change in changes.items()}
    tables["plain"] = [{"sentence": row["sentence"]} for row in sentences]
    for name, rows in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Run a script in this process, which must end with one line, exit code 2 and nothing written: the line."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def run(script: str, *positional: str, **changes: object) -> str:
        recipe, module = Recipe(script, tmp_path), importlib.import_module(script)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", recipe.command(*positional, **changes))
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_script(module.main)
        errors = capfd.readouterr().err
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert stop.value.code == 2 and len(lines) == 1, errors
        assert not recipe.output.exists()
        return lines[0]

    return run


@pytest.mark.parametrize(("script", "case"), [(script, case) for script, cases in CASES.items() for case in cases])
def test_bad_input_is_one_clear_line(bad_files, refused, script, case):
    changes = CASES[script][case]
    line = refused(script, **changes)
    names = [part for item in changes.items() for part in item if isinstance(part, str)]
    assert any(part in line for part in ([THE_MATTER[case]] if case in THE_MATTER else names)), line


@pytest.mark.parametrize(
    ("script", "content", "part"),
    [
        ("run_clm", "a: [\n", 'bad.yaml", line 2'),
        ("run_clm", "memory_limit: 1GiB\nmax_steps: 1\nmemory_limit: 2GiB\n", 'keep one in "bad.yaml", line 3'),
        ("run_clm", "max_steps: true\n", "--max_steps"),
        ("run_clm_no_trainer", "do_train: true\n", "--do_train"),
    ],
)
def test_bad_file_of_arguments_is_one_clear_line(tmp_path, refused, script, content, part):
    (tmp_path / "bad.yaml").write_text(content)
    line = refused(script, "bad.yaml")
    assert part in line


@needs_shared_data
def test_masked_model_refuses_the_tokenizer_of_a_causal_model(refused):
    line = refused("run_mlm", tokenizer_name=SHARED_DATA / "tokenizers" / "gpt2")
    assert "The tokenizer has no cls_token; name one of a masked language model" in line
