"""Whatever a user gets wrong is told in one line that names it, and nothing is written or lost; the page of them is as they are."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from .bad_inputs import FOLDER, PAGE, BadInput, NotRefused, page, raised, table

CASES = table()
BLANK = re.compile(r"‹[^›]*›")


def content_of(folder: Path) -> dict[str, str]:
    """Every file below a folder, by what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }  # fmt: skip


def pattern(line: str, folder: Path) -> str:
    """A line of the table as a regular expression."""
    fixed = (re.escape(part.replace(FOLDER, str(folder))) for part in BLANK.split(line))
    return ".+".join(fixed)


def test_there_are_many_of_every_kind_and_none_twice():
    assert len(CASES) >= 40 and len({case.place for case in CASES}) >= 10
    assert len({(case.place, case.given) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.place}: {case.given}"[:80])
def test_it_is_told_in_one_line_and_nothing_is_lost(case: BadInput, tmp_path):
    case.prepare(tmp_path)
    before = content_of(tmp_path)
    said = case.said(tmp_path)
    assert said and "\n" not in said and "Traceback" not in said and said.isprintable()
    assert re.fullmatch(pattern(case.line, tmp_path), said), said
    assert case.names.replace(FOLDER, str(tmp_path)) in said
    assert content_of(tmp_path) == before


def test_what_is_taken_or_told_otherwise_fails_the_test(tmp_path):
    with pytest.raises(NotRefused):
        raised(lambda folder: None)(tmp_path)
    with pytest.raises(KeyError):
        raised(lambda folder: {}["x"])(tmp_path)
    assert not re.fullmatch(pattern("It is 3; use ‹n›.", tmp_path), "It is 4; use 5.")


def test_the_page_is_as_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(CASES), "write it again: python -m tests.faults.bad_inputs"
