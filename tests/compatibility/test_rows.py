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
DAILY = {label for label, row in ROWS.items() if row.daily}


@pytest.mark.parametrize("label", slow_but(ROWS, daily=DAILY))
def test_row_is_as_expected(label, monkeypatch):
    monkeypatch.setenv("OSDP_TEST_PRELOAD", PRELOAD)
    result = run(ROWS[label])
    assert result.is_good, f"{result.verdict.value}, expected {result.row.expected.value}: {result.detail}"


def test_table_has_every_row_and_no_other():
    with (DOCS / "data" / "compatibility.csv").open(encoding="utf-8", newline="") as file:
        documented = [(row["group"], row["training"], row["result"]) for row in csv.DictReader(file)]
    assert documented == [(row.group, row.name, row.expected.value) for row in ROWS.values()]


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
