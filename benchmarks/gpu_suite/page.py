"""The page of results, in Markdown."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from .runner import RESULTS
from .step import PARTS, STEPS, Status

WIDTH = 100
_TAIL_LINES = 15


def records_of(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the last record of each step, in order. If a step was not run, its earlier record is used."""
    found: dict[str, dict[str, Any]] = {}
    lines = [
        line
        for folder in folders
        if (folder / RESULTS).exists()
        for line in (folder / RESULTS).read_text("utf-8").splitlines()
    ]
    for record in sorted(map(json.loads, lines), key=lambda record: record["date"]):
        if record["status"] != Status.NOT_RUN.value or record["step"] not in found:
            found[record["step"]] = record
    return [found[name] for name in STEPS if name in found]


def page(records: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]]) -> str:
    """Return the whole page.

    Args:
        records: one per step, see `records_of`.
        heads: of each call: `versions`, `hardware`, `commit`, `command`.
    """
    rehearsed = all(record["rehearsal"] for record in records)
    lines = ["# Results of the GPU suite", ""]
    if rehearsed:
        lines += _wrapped(
            "**Rehearsal on a CUDA device, in small sizes.** It shows that the steps run there, and nothing of times."
            if all(record["rehearsal"] == "cuda" for record in records)
            else "**Rehearsal on the CPU; no GPU yet.** Small sizes on gloo: it shows that the steps run, and claims"
            " nothing of CUDA."
        )
    lines += [
        "",
        *_head(records, heads),
        "",
        "## Steps",
        "",
        "| step | status | seconds | what went wrong |",
        "| --- | --- | ---: | --- |",
    ]
    for record in records:
        wrong = (record["misses"] or record["tail"][-1:] or [""])[0]
        lines.append(_row([record["step"], _bold(record["status"]), f"{record['seconds']:.0f}", wrong]))
    for part, members in groupby(records, key=lambda record: record["part"]):
        lines += ["", f"## {part}. {PARTS[part]}"]
        for record in members:
            lines += _section(record)
    return "\n".join(lines) + "\n"


def _head(records: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]]) -> list[str]:
    dates = sorted(record["date"] for record in records if record["status"] != Status.NOT_RUN.value)
    lines = [f"- date: {dates[0]} to {dates[-1]}"] if dates else []
    for name in ("hardware", "versions", "commit"):
        texts = dict.fromkeys(_text(head[name]) for head in heads)
        for text in texts:
            lines += _wrapped(f"- {name}: {text}", "  ")
    commands = dict.fromkeys(re.sub(r"(--out|--merge) \S+", r"\1 DIR", head["command"]) for head in heads)
    lines += ["", "```bash", *commands, "```"]
    return lines


def _section(record: dict[str, Any]) -> list[str]:
    """Return a step's table, remarks and missed aims; if it failed, also its last lines."""
    if record["status"] in (Status.NEEDS_GPU.value, Status.NOT_RUN.value) and not record["rows"]:
        reason = "".join(f" ({note})" for note in record["notes"])
        return ["", *_wrapped(f"**{record['step']}**: {record['status']}{reason}. {STEPS[record['step']].proves}")]
    lines = ["", f"### {record['step']}: {record['status']}", "", *_wrapped(STEPS[record["step"]].proves), ""]
    lines += _table(record["rows"])
    for kind, texts in (("", record["notes"]), ("**Missed:** ", record["misses"])):
        for text in texts:
            lines += _wrapped(f"- {kind}{_plain(text)}", "  ")
    if record["status"] == Status.TIMED_OUT.value:
        lines += _wrapped(f"- It was ended after {record.get('limit_s', record['seconds'])} s.")
    if record["tail"]:
        lines += ["", "```text", *(line[:WIDTH] for line in record["tail"][-_TAIL_LINES:]), "```"]
    return lines


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return tables of the rows; a new table begins when the columns change."""
    lines: list[str] = []
    for names, members in groupby(rows, key=lambda row: tuple(row)):
        lines += [
            _row(names),
            "| " + " | ".join("---" for _ in names) + " |",
            *(_row(tuple(row.values())) for row in members),
            "",
        ]
    return lines


def _row(cells: Sequence[str]) -> str:
    """Return a line of at most `WIDTH` columns; if it is longer, its longest cell is shortened."""
    texts = [_plain(cell).replace("|", "/") for cell in cells]
    while (over := sum(map(len, texts)) + 3 * len(texts) + 1 - WIDTH) > 0:
        longest = max(range(len(texts)), key=lambda index: len(texts[index]))
        texts[longest] = texts[longest][: max(1, len(texts[longest]) - over - 1)].rstrip() + "…"
    return f"| {' | '.join(texts)} |"


def _bold(status: str) -> str:
    return f"**{status}**" if Status(status).is_bad else status


def _text(value: Any) -> str:
    return ", ".join(f"{name} {text}" for name, text in value.items()) if isinstance(value, dict) else str(value)


def _plain(text: str) -> str:
    """Return the text as one line, without characters that Markdown would read as HTML."""
    return " ".join(str(text).split()).replace("<", "&lt;")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
