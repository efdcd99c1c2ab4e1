"""The page of the documentation: a summary, the refused rows, and a table of all rows."""

from __future__ import annotations

import csv
import io
import textwrap
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from hf_osdp.versions import package_versions

from .row import Result, Verdict

_WIDTH = 136
PAGE = Path(__file__).with_name("page.md")


def page(results: list[Result]) -> str:
    """Return the page: a summary by group, and the table, which is read from a CSV file."""
    counts = Counter(result.verdict for result in results)
    text = f"{len(results)} rows: " + ", ".join(
        f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]
    )
    groups = {name: list(members) for name, members in groupby(results, key=lambda result: result.row.group)}
    found = {**package_versions(), **{name: version(name) for name in ("trl", "sentence-transformers", "peft")}}
    versions = ", ".join(f"{name} {text}" for name, text in found.items())
    counted = textwrap.fill(f"{text}; {versions}.", _WIDTH)
    command = f"python -m {__package__} --write docs/compatibility.md"
    return PAGE.read_text(encoding="utf-8").format(command=command, counts=counted, summary=_summary(groups))


def table(results: list[Result]) -> str:
    lines, names = io.StringIO(), ("group", "training", "result", "compared with, or why not")
    rows = [(result.row.group, result.row.name, result.verdict.value, _oracle(result)) for result in results]
    csv.writer(lines, lineterminator="\n").writerows([names, *rows])
    return lines.getvalue()


def _summary(groups: Mapping[str, list[Result]]) -> str:
    """Return the number of rows per group and verdict."""
    verdicts = [verdict for verdict in Verdict if verdict.may_stand]
    lines = [("trainings", "rows", *(verdict.value for verdict in verdicts)), ("---", *["---:"] * (1 + len(verdicts)))]
    for name, members in groups.items():
        counts = Counter(result.verdict for result in members)
        lines.append((name, len(members), *(counts[verdict] for verdict in verdicts)))
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _oracle(result: Result) -> str:
    row = result.row
    if result.verdict is not Verdict.EQUAL:
        return " ".join(result.detail.split())
    is_usual = (row.loss_tolerance, row.norm_tolerance) == (1e-4, 1e-3)
    loose = "" if is_usual else f"; within {row.loss_tolerance:g} and {row.norm_tolerance:g}"
    return row.oracle.value + loose
