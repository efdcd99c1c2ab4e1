"""Every wrong input of docs/data/bad_inputs.csv, which docs/troubleshooting.md shows, is told in the line that stands
there; nothing is written or lost.
"""

from __future__ import annotations

import csv
import hashlib
import re
from pathlib import Path

import pytest

from hf_osdp.errors import OSDPError

from .bad_inputs import SECTIONS

with (Path(__file__).parents[2] / "docs" / "data" / "bad_inputs.csv").open(encoding="utf-8", newline="") as file:
    ROWS = [(row["section"], row["given"], row["said"]) for row in csv.DictReader(file)]
FOLDER = "FOLDER"
"""Stands in a line for the folder in which the case runs."""
BLANK = re.compile(r"‹[^›]*›")
"""Stands for what differs from run to run."""


def content_of(folder: Path) -> dict[str, str]:
    """Every file below a folder, by what is in it."""

    def content(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


def test_rows_are_of_every_kind_and_none_is_there_twice():
    assert len(ROWS) >= 140 and {section for section, *_ in ROWS} == SECTIONS.keys()
    assert len({row[:2] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("section", "given", "line"), ROWS, ids=[f"{row[0]}: {row[1]}"[:80] for row in ROWS])
def test_wrong_input_is_told_in_one_line_and_loses_nothing(section, given, line, tmp_path):
    gives = SECTIONS[section](given, tmp_path)
    before = content_of(tmp_path)
    with pytest.raises((ValueError, OSDPError)) as raised:
        gives()
    said, fixed = str(raised.value), (re.escape(part.replace(FOLDER, str(tmp_path))) for part in BLANK.split(line))
    assert said.isprintable() and re.fullmatch(".+".join(fixed), said), said
    assert content_of(tmp_path) == before
