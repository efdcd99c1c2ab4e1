"""Bad input of every recipe beside that of docs/bad_inputs.md: one clear line on stderr, exit code 2, and nothing
written.
"""

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

CASES: dict[str, dict[str, tuple[dict[str, object], str]]] = {
    "run_clm": {
        "missing training file": (dict(train_file="none.txt"), "Cannot read none.txt: Unable to find"),
        "empty training file": (dict(train_file="empty.txt"), "Cannot read empty.txt: "),
        "too short for a block": (
            dict(train_file="some.txt", validation_file="some.txt"),
            "less than one block of 32",
        ),
        "unknown kind of file": (
            dict(train_file="some.pdf"),
            "Cannot read some.pdf: use files of one kind: .txt, .json, .jsonl, .csv.",
        ),
        "one line, nothing to split": (dict(train_file="line.txt"), "Cannot read line.txt: With n_samples=1"),
        "another encoding": (dict(train_file="latin.txt"), "Cannot read latin.txt: 'utf-8' codec can't decode"),
        "malformed line of JSON": (dict(train_file="lines.jsonl"), "Cannot read lines.jsonl: "),
        "numbers for text": (
            dict(train_file="numbers.jsonl"),
            "numbers.jsonl: it needs a column `text` of text; its first row is {'text': 1}",
        ),
        "upper-case extension of JSON": (dict(train_file="LINES.JSONL"), "Cannot read LINES.JSONL: "),
        "longer than the positions": (dict(block_size=64), "block_size=64 is longer than the model's 32 positions"),
        "unknown override": (
            dict(config_overrides="n_layers=2"),
            "Cannot use config_overrides=n_layers=2: key n_layers isn't in the original config",
        ),
        "unknown model type": (dict(model_type="gpt9", config_overrides=None), "model_type='gpt9'"),
        "no checkpoint": (
            dict(resume_from_checkpoint="nowhere"),
            "Can't find a valid checkpoint at nowhere; give the path of a checkpoint",
        ),
        "adapters of nothing": (
            dict(lora_rank=2),
            "lora_rank=2 trains adapters of a pretrained model; give model_name_or_path",
        ),
        "nothing to do": (dict(do_train=None, do_eval=None), "Nothing to do"),
        "tracker that is not there": (
            dict(report_to="wandb"),
            "report_to=wandb is not installed here; install it, or use one of",
        ),
        "stream without an end": (dict(streaming=True, max_steps=None), "streaming=true needs max_steps"),
        "negative buffer": (dict(streaming=True, shuffle_buffer=-1), "shuffle_buffer=-1 must be at least 0"),
        "stream of nothing": (
            dict(streaming=True, do_eval=None, train_file="empty.txt"),
            "the train text has less than one block",
        ),
        "stream of other columns": (
            dict(streaming=True, train_file="other.csv"),
            "its first row is {'name': 'Anna', 'words': 'fine'}",
        ),
        "malformed stream": (dict(streaming=True, train_file="lines.jsonl"), "Cannot read lines.jsonl: "),
        "stream without validation": (
            dict(streaming=True, train_file="line.txt", max_eval_samples=None),
            "give validation_file, or max_eval_samples",
        ),
    },
    "run_mlm": {
        "grouping and plan": (
            dict(grouping="none", plan="plan.json"),
            "grouping=none is strategy fsdp; leave out strategy, plan and osdp false",
        ),
        "causal model": (
            dict(model_type="gpt2"),
            "Cannot use model_type='gpt2': gpt2 is not a masked language model; use one such as bert or roberta",
        ),
        "unknown model": (dict(model_type="bert9"), "Cannot use model_type='bert9': "),
        "no room for text": (dict(block_size=2), "block_size=2 leaves no room"),
        "fewer embeddings than tokens": (
            dict(config_overrides="vocab_size=299"),
            "vocab_size=299 is less than the 300 entries of the tokenizer",
        ),
    },
    "run_clm_no_trainer": {
        "less than a step": (
            dict(max_train_samples=3),
            "has 3 blocks of 32 tokens, less than the 4 samples of one optimizer step",
        ),
        "switched off": (dict(osdp=False), "osdp"),
        "unknown schedule": (
            dict(lr_scheduler_type="zigzag"),
            "--lr_scheduler_type/--lr-scheduler-type: invalid choice: 'zigzag' (choose from",
        ),
        "no learning": (dict(learning_rate=0), "learning_rate=0.0 must be greater than 0"),
        "no steps": (dict(max_steps=0), "max_steps=0 must be at least 1"),
    },
    "train_plain": {
        "less than a step": (
            dict(max_train_samples=3),
            "The train text has 3 blocks of 32 tokens; give text for 8 or more",
        ),
        "unknown precision": (dict(mixed_precision="fp8"), "fp8"),
        "no steps": (dict(steps=0), "steps=0 must be at least 1"),
    },
    "run_glue": {
        "unknown task": (
            dict(task_name="mnli"),
            "task_name='mnli' is not known; use one of sst2, rte, cola, or train_file",
        ),
        "no labels": (dict(train_file="plain.jsonl"), "it needs sentence, label or sentence1, sentence2, label"),
        "labels of text": (
            dict(train_file="words.jsonl"),
            "Cannot use words.jsonl: its labels are string; they must be integers",
        ),
        "negative labels": (dict(train_file="hidden.jsonl"), "hidden.jsonl: it has rows without a label"),
        "one label only": (dict(train_file="same.jsonl"), "same.jsonl: all training labels are 1"),
        "numbers for text": (
            dict(train_file="sentences.jsonl"),
            "sentences.jsonl: it needs sentence, label or sentence1, sentence2, label, and text in all but `label`",
        ),
        "unknown metric": (dict(metric="no_such_metric"), "Cannot load the metric no_such_metric"),
        "longer than the positions": (
            dict(max_seq_length=64),
            "max_seq_length=64 is longer than the model's 32 positions",
        ),
        "no length": (dict(max_seq_length=0), "max_seq_length=0 must be at least 1"),
        "patience without a best model": (
            dict(early_stopping_patience=2),
            "early_stopping_patience=2 needs load_best_model_at_end: true",
        ),
        "best by what is not computed": (
            dict(metric_for_best_model="f1"),
            "metric_for_best_model=f1 is not computed; use accuracy or loss",
        ),
        "no classifier": (
            dict(model_type="whisper", config_overrides=None),
            "is not a model for sentence classification",
        ),
        "hub without a network": (dict(task_name="rte"), "Cannot use nyu-mll/glue, rte: "),
    },
}
"""Script → case → changes of its arguments, and a part of the line."""


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
    changes, part = CASES[script][case]
    line = refused(script, **changes)
    assert part in line, line


@pytest.mark.parametrize(
    ("script", "content", "part"),
    [
        ("run_clm", "a: [\n", 'bad.yaml", line 2'),
        (
            "run_clm",
            "memory_limit: 1GiB\nmax_steps: 1\nmemory_limit: 2GiB\n",
            "the key 'memory_limit' appears twice; keep one in \"bad.yaml\", line 3",
        ),
        ("run_clm", "max_steps: true\n", "--max_steps/--max-steps: invalid int value: 'True'"),
        ("run_clm_no_trainer", "do_train: true\n", "['--do_train=True']"),
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
