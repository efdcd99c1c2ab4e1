"""The rows of docs/bad_inputs.md and bad_inputs_files.md.

`python -m tests.faults.bad_inputs` writes lines that differ anew.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_osdp.errors import OSDPError

PAGES = tuple(Path(__file__).parents[2] / "docs" / name for name in ("bad_inputs.md", "bad_inputs_files.md"))
FOLDER = "FOLDER"
"""Stands in a line for the folder in which the case runs."""
BLANK = re.compile(r"‹[^›]*›")
_ROW = re.compile(r"^\| (`+) ?(?P<given>.*?) ?\1 \| (?P<cell>(`+) ?(?P<line>.*?) ?\4) \|$")

Give = Callable[[], object]
"""Gives the input; raises what the user is told."""


class NotRefused(AssertionError):
    """An input was taken that should not have been, or with other words than one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the user wrote, as a page shows it, and what is said, with FOLDER and ‹...› for what differs."""

    section: str
    given: str
    line: str

    def matches(self, said: str, folder: Path) -> bool:
        """Whether this was said."""
        fixed = (re.escape(part.replace(FOLDER, str(folder))) for part in BLANK.split(self.line))
        return re.fullmatch(".+".join(fixed), said) is not None


def rows(page: str) -> Iterator[Row]:
    """Every row of a page, in its order."""
    section = ""
    for line in page.splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if found := _ROW.match(line):
            given, said = (found[name].replace("\\|", "|") for name in ("given", "line"))
            yield Row(section=section, given=given, line=said)


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


def main() -> None:
    """Write lines of the pages that differ from what is said; blanks in them are to be put in again."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for row in rows(text):
            with tempfile.TemporaryDirectory() as name:
                said = refusal(give(row, Path(name)))
                if not row.matches(said, Path(name)):
                    text = text.replace(row.line.replace("|", "\\|"), said.replace(name, FOLDER).replace("|", "\\|"))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
