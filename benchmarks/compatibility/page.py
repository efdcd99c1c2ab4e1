"""The page of the documentation: a summary, the refused rows, and a table of all rows."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from itertools import groupby

from hf_osdp.versions import package_versions

from .row import Result, Verdict

_WIDTH = 136
_HEAD = """\
# Compatibility

Which trainings give the same results under a plan as in the stock stack, and which are refused. Each row is one small training that runs
twice on the CPU: with transformers, TRL, sentence-transformers or Accelerate alone, and with this package, on two gloo processes, under a
plan in which neighbouring units have different layouts (replicated, ZeRO-2, ZeRO-3). Loss, gradient norm, learning rate and metrics of
every step are compared.

- **equal to stock**: no figure differs by more than float32 rounding (1e-4 of a loss, 1e-3 of a gradient norm, unless the row says
  otherwise). Stock is DDP on two processes, unless the row names another run.
- **refused**: a one-line error on every process, before the first step (or after training, for saving). The line is quoted below.
- **not applicable**: the stock stack does not run it either; its reason is quoted below.

In one case stock DDP itself is wrong, and one process is the reference: DDP does not reduce gradients if an evaluation came before
training. The stock Trainer multiplies the loss of models that ignore the number of items by the number of processes
(`average_tokens_across_devices`), and so does a plan; rows of such models switch that off, but for one.

If a row differs in silence, crashes or hangs, the command fails. The page is written by

```bash
{command}
```

{counts}; {versions}.
"""  # noqa: E501

_EVERY_ROW = """\
## Every row

As a file: [compatibility.csv](data/compatibility.csv).

```{csv-table}
:file: data/compatibility.csv
:header-rows: 1
:widths: 20 40 15 25
```
"""


def page(results: list[Result]) -> str:
    """Return the page: a summary by group, the messages of refused rows, and the table, which is read from a CSV
    file.
    """
    counts = Counter(result.verdict for result in results)
    text = f"{len(results)} rows: " + ", ".join(
        f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]
    )
    head = _HEAD.format(
        command="python -m benchmarks.compatibility --write docs/compatibility.md", counts=text, versions=_versions()
    )
    groups = {name: list(members) for name, members in groupby(results, key=lambda result: result.row.group)}
    return "\n".join([_wrapped(head), *_summary(groups), *_reasons(groups), _EVERY_ROW])


def table(results: list[Result]) -> str:
    """Return every row as lines of CSV."""
    lines = io.StringIO()
    rows = [(result.row.group, result.row.name, result.verdict.value, _oracle(result)) for result in results]
    csv.writer(lines, lineterminator="\n").writerows([("group", "training", "result", "compared with"), *rows])
    return lines.getvalue()


def _summary(groups: Mapping[str, list[Result]]) -> list[str]:
    """Return the number of rows per group and verdict."""
    verdicts = [verdict for verdict in Verdict if verdict.may_stand]
    lines = [
        f"| trainings | rows | {' | '.join(verdict.value for verdict in verdicts)} |",
        "| --- |" + " ---: |" * (1 + len(verdicts)),
    ]
    for name, members in groups.items():
        counts = Counter(result.verdict for result in members)
        lines.append(f"| {name} | {len(members)} | {' | '.join(str(counts[verdict]) for verdict in verdicts)} |")
    return [*lines, ""]


def _reasons(groups: Mapping[str, list[Result]]) -> list[str]:
    """Return the rows that are not equal, with their messages."""
    lines = ["## What is refused", ""]
    for name, members in groups.items():
        others = [result for result in members if result.verdict is not Verdict.EQUAL]
        lines += [f"### {name}", ""] if others else []
        for result in others:
            text = f"- {result.row.name}, {result.verdict.value}: {_plain(result.detail)}"
            lines += [*textwrap.wrap(text, _WIDTH, subsequent_indent="  "), ""]
    return lines


def _versions() -> str:
    found = {**package_versions(), **{name: version(name) for name in ("trl", "sentence-transformers", "peft")}}
    return ", ".join(f"{name} {text}" for name, text in found.items())


def _oracle(result: Result) -> str:
    row = result.row
    if result.verdict is not Verdict.EQUAL:
        return ""
    loose = (
        f"; within {row.loss_tolerance:g} and {row.norm_tolerance:g}"
        if (row.loss_tolerance, row.norm_tolerance) != (1e-4, 1e-3)
        else ""
    )
    return row.oracle.value + loose


def _plain(text: str) -> str:
    """Return the text without characters that Markdown would read as markup."""
    return re.sub(r"(?<!\w)_|_(?!\w)|[*<]", lambda found: "\\" + found[0], " ".join(text.split()))


def _wrapped(text: str) -> str:
    """Wrap the last paragraph, whose list of versions may be long."""
    return "\n".join(part for line in text.splitlines() for part in (textwrap.wrap(line, _WIDTH) or [""])) + "\n"
