"""Rows of docs/data/compatibility.csv: what trains under a plan logs what the stock stack logs, or is refused in
one line.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the extra `trainers`")
pytest.importorskip("sentence_transformers", reason="needs the extra `trainers`")

from tests.helpers.sampling import slow_but

from .row import Row, Verdict, read_rows, worst_difference
from .run import PRELOAD, Outcome, judged, run

ROWS = read_rows()
DOCS = Path(__file__).parents[2] / "docs"
TRAINED_ELSEWHERE = {
    "Losses, and weights read without a call: all weights read",
    "Accelerate loops: the loss reads the head's weight", "Models: a plain nn.Module with blocks", "PEFT: LoRA",
    "Models: ViTForImageClassification", "Plain PyTorch loops: a module that is not from transformers",
    "Ranks that run different modules: a block for each task; ranks train and evaluate different ones",
    "PEFT: QLoRA, base in 4 bits", "Trainer: optimizers and schedules: optim=adafactor",
    "TRL: SFT, untied head",
    "Saving and using the model: model.save_pretrained", "Trainer: options: accelerator_config: num_steps=2",
    "Trainer: options: accelerator_config: split_batches", "Trainer: options: auto_find_batch_size",
    "Trainer: optimizers and schedules: optim=adagrad",
}  # fmt: skip
"""Other tests train with these every day."""
DAILY = {row.label for row in ROWS.values() if row.daily} - TRAINED_ELSEWHERE


@pytest.mark.parametrize("label", slow_but(ROWS, daily=DAILY))
def test_row_is_as_expected(label, monkeypatch):
    monkeypatch.setenv("OSDP_TEST_PRELOAD", PRELOAD)
    result = run(ROWS[label])
    assert result.is_good, f"{result.verdict.value}, expected {result.row.expected.value}: {result.detail}"


def documented() -> list[dict[str, str]]:
    with (DOCS / "data" / "compatibility.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_table_has_every_row_and_no_other():
    assert [(row["group"], row["training"]) for row in documented()] == [
        (row.group, row.name) for row in ROWS.values()
    ]
    assert [row["result"] for row in documented()] == [row.expected.value for row in ROWS.values()]


def a_row(**options) -> Row:
    return Row(name="one", group="none", train=lambda side: [], **options)


@pytest.mark.parametrize(
    ("mine", "theirs", "differs"),
    [
        ([{"loss": 1.0, "grad_norm": 2.0}], [{"loss": 1.00001, "grad_norm": 2.0005}], False),
        ([{"loss": 1.0}], [{"loss": 1.001}], True),
        ([{"loss": float("nan")}], [{"loss": 1.0}], True),
        ([{"loss": float("nan")}], [{"loss": float("nan")}], False),
        ([{"loss": 1.0}], [{"loss": 1.0}, {"loss": 1.0}], True),
        ([{"loss": 1.0, "grad_norm": 1.0}], [{"loss": 1.0}], True),
        ([], [], True),
    ],
)
def test_figures_that_differ_are_told_from_rounding(mine, theirs, differs):
    part, text = worst_difference(mine, theirs, a_row())
    assert (part > 1) is differs, text


TRAINED = Outcome(figures=[{"loss": 1.0}], layouts=3)
REFUSED = Outcome(error="Leave it out.", error_type="ValueError", is_refusal=True)
CRASHED = Outcome(error="mixed tensors", error_type="RuntimeError")


@pytest.mark.parametrize(
    ("stock_failure", "ours", "failure", "verdict"),
    [
        ("", [TRAINED, TRAINED], "", Verdict.EQUAL),
        ("", [REFUSED, REFUSED], "rank 0", Verdict.REFUSED),
        ("", [REFUSED, CRASHED], "rank 0", Verdict.CRASHED),
        ("", [], "rank 0 died", Verdict.CRASHED),
        ("", [], "hung", Verdict.HUNG),
        ("rank 0", [TRAINED, TRAINED], "", Verdict.CRASHED),
        ("", [Outcome(figures=[{"loss": 1.0}]), TRAINED], "", Verdict.DIFFERENT),
        ("", [Outcome(figures=[{"loss": 2.0}], layouts=3), TRAINED], "", Verdict.DIFFERENT),
    ],
)
def test_verdict_tells_refusals_crashes_and_trainings_without_a_plan_apart(stock_failure, ours, failure, verdict):
    assert judged(a_row(), [TRAINED, TRAINED], stock_failure, ours, failure)[0] is verdict
