"""The rows of docs/data/bad_inputs.csv, which docs/troubleshooting.md shows."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_osdp.errors import OSDPError

DATA = Path(__file__).parents[2] / "docs" / "data" / "bad_inputs.csv"
FOLDER = "FOLDER"
"""Stands in a line for the folder in which the case runs."""
BLANK = re.compile(r"‹[^›]*›")

Give = Callable[[], object]
"""Gives the input; raises what the user is told."""


class NotRefused(AssertionError):
    """An input was taken that should not have been, or with other words than one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the user wrote, as the page shows it, and what is said, with FOLDER and ‹...› for what differs."""

    section: str
    given: str
    said: str

    def matches(self, said: str, folder: Path) -> bool:
        """Whether this was said."""
        fixed = (re.escape(part.replace(FOLDER, str(folder))) for part in BLANK.split(self.said))
        return re.fullmatch(".+".join(fixed), said) is not None


def rows() -> tuple[Row, ...]:
    with DATA.open(encoding="utf-8", newline="") as file:
        return tuple(Row(**row) for row in csv.DictReader(file))


def give(row: Row, folder: Path) -> Give:
    """Prepare the folder for a row. Returns what gives the input."""
    from . import bad_commands, bad_files, bad_training

    return {**bad_training.SECTIONS, **bad_files.SECTIONS, **bad_commands.SECTIONS}[row.section](row.given, folder)


def refusal(give: Give) -> str:
    """Return what is raised, where it is a `ValueError` or one of hf_osdp's."""
    try:
        give()
    except (ValueError, OSDPError) as error:
        return str(error)
    raise NotRefused("nothing was raised")
