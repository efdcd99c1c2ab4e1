"""The table of what a user can get wrong, with the line that each gets: `python -m tests.faults.bad_inputs` writes docs/bad_inputs.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "bad_inputs.md"
FOLDER = "FOLDER"
"""Stands in a line for the folder in which the case runs."""
_HEAD = """# What a wrong input is told

Each line below is what is raised, or printed, for the input beside it; ‹...› stands for what differs from machine to machine or is long. It
names the value, the limit and the remedy; nothing is written or lost. A test gives every one of these inputs and compares the line
(`tests/faults/test_bad_inputs.py`); `python -m tests.faults.bad_inputs` writes this page.
"""


class NotRefused(AssertionError):
    """An input was taken that should not have been, or with other words than one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadInput:
    """One thing that is wrong."""

    place: str
    """Section of the page."""
    given: str
    """What the user wrote, as the page shows it."""
    names: str
    """The value that is at fault, or what holds it, as the line must have it."""
    line: str
    """The whole line, with FOLDER and ‹...› for what differs."""
    said: Callable[[Path], str]
    """Gives the input, in a folder, and returns what is said."""
    prepare: Callable[[Path], object] = lambda folder: None
    """Puts into the folder what the case needs."""


def raised(do: Callable[[Path], object]) -> Callable[[Path], str]:
    """What is raised, where it is a `ValueError` or one of hf_osdp's."""
    from hf_osdp.errors import OSDPError

    def said(folder: Path) -> str:
        try:
            do(folder)
        except (ValueError, OSDPError) as error:
            return str(error)
        raise NotRefused("nothing was raised")

    return said


def table() -> tuple[BadInput, ...]:
    """All cases, in the order of the page."""
    from . import bad_checkpoints, bad_commands, bad_files, bad_options, bad_training

    return (*bad_options.CASES, *bad_training.CASES, *bad_files.CASES, *bad_checkpoints.CASES, *bad_commands.CASES)


def page(cases: Iterable[BadInput]) -> str:
    """The table as a page of the docs."""
    return "\n".join([_HEAD, *_sections(cases)])


def _sections(cases: Iterable[BadInput]) -> Iterator[str]:
    for place, inside in groupby(cases, key=lambda case: case.place):
        yield f"## {place}\n"
        yield "| given | said |\n| --- | --- |"
        yield from (f"| {_code(case.given)} | {_code(case.line)} |" for case in inside)
        yield ""


def _code(text: str) -> str:
    """As code inside a table's cell."""
    return (f"`` {text} ``" if "`" in text else f"`{text}`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(table()), encoding="utf-8")
    print(f"{PAGE.name}: {len(table())} inputs")
