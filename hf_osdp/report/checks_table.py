"""What was looked at before a start, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from .tables import bare_table


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One thing that was looked at."""

    name: str
    result: str
    """`ok`, `note`, `warning` or `error`; `later` and `not done` where it could not be looked at."""
    text: str
    """What is there, or what is wrong with the remedy."""


def checks_table(title: str, rows: Sequence[CheckRow]) -> Table:
    """A line for each check.

    Args:
        title: what was examined.
        rows: in the order in which they are read.
    """
    table = bare_table(title)
    for name in ("check", "result"):
        table.add_column(name, no_wrap=True)
    table.add_column("what is there, what to do", overflow="fold")
    for row in rows:
        table.add_row(row.name, row.result, row.text)
    return table
