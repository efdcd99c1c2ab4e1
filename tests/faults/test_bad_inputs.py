"""Every wrong input of docs/data/bad_inputs.csv is told in the line that stands there; nothing is written or lost."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from .bad_inputs import Row, give, refusal, rows

ROWS = rows()


def content_of(folder: Path) -> dict[str, str]:
    """Every file below a folder, by what is in it."""

    def content(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


def test_rows_are_of_every_kind_and_none_is_there_twice():
    assert len(ROWS) >= 140 and len({row.section for row in ROWS}) == 13
    assert len({(row.section, row.given) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}: {row.given}"[:80])
def test_wrong_input_is_told_in_one_line_and_loses_nothing(row: Row, tmp_path):
    gives = give(row, tmp_path)
    before = content_of(tmp_path)
    said = refusal(gives)
    assert said.isprintable() and "Traceback" not in said
    assert row.matches(said, tmp_path), said
    assert content_of(tmp_path) == before
