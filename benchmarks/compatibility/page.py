"""The page of the documentation."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from importlib.metadata import version
from itertools import groupby

from hf_osdp.report.content import package_versions

from .row import Result, Verdict

_WIDTH = 136
_HEAD = """\
# Compatibility

Does training under a plan log what the stock stack logs? Each row below is one small training that is run twice on the CPU: by
transformers, TRL, sentence-transformers or Accelerate as they are, and by this package, on two gloo processes, under a plan in which
neighbouring units have different layouts (replicated, ZeRO-2, ZeRO-3). Loss, gradient norm, learning rate and metrics of every step are
compared.

- **equal to stock**: no figure differs by more than float32 rounding (1e-4 of a loss, 1e-3 of a gradient norm, unless the row says
  otherwise). Stock is DDP on two processes, or what the row names.
- **refused**: an error of one line, on every process, before the first step (or when it is asked for, after training). The line stands
  below the table.
- **not applicable**: the stock stack does not run it either; its reason stands below the table.

Where stock DDP itself is off, one process is the measure: it multiplies the loss of models that ignore the number of items by the
number of processes (`average_tokens_across_devices`; rows of such models switch that off), and does not reduce gradients where an
evaluation came before training.

A row that is silently different, crashes or hangs makes the command fail, and has no place here. Made by

```bash
{command}
```

{counts}; {versions}.
"""


def page(results: list[Result]) -> str:
    """All groups, each with its table and the lines of what is refused."""
    counts = Counter(result.verdict for result in results)
    text = f"{len(results)} rows: " + ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
    head = _HEAD.format(command="python -m benchmarks.compatibility --write docs/compatibility.md", counts=text, versions=_versions())
    groups = [_group(name, list(members)) for name, members in groupby(results, key=lambda result: result.row.group)]
    return "\n".join([_wrapped(head), *groups])


def _versions() -> str:
    found = {**package_versions(), **{name: version(name) for name in ("trl", "sentence-transformers", "peft")}}
    return ", ".join(f"{name} {text}" for name, text in found.items())


def _group(name: str, results: list[Result]) -> str:
    lines = [f"## {name}", "", "| training | result | compared with |", "| --- | --- | --- |"]
    lines += [f"| {result.row.name} | {result.verdict.value} | {_oracle(result)} |" for result in results]
    for result in results:
        if result.verdict is not Verdict.EQUAL:
            lines += [
                "",
                *textwrap.wrap(f"- {result.row.name}, {result.verdict.value}: {_plain(result.detail)}", _WIDTH, subsequent_indent="  "),
            ]
    return "\n".join([*lines, ""])


def _oracle(result: Result) -> str:
    row = result.row
    if result.verdict is not Verdict.EQUAL:
        return ""
    loose = (
        f"; within {row.loss_tolerance:g} and {row.norm_tolerance:g}" if (row.loss_tolerance, row.norm_tolerance) != (1e-4, 1e-3) else ""
    )
    return row.oracle.value + loose


def _plain(text: str) -> str:
    """Without what Markdown would read as markup."""
    return re.sub(r"(?<!\w)_|_(?!\w)|[*<]", lambda found: "\\" + found[0], " ".join(text.split()))


def _wrapped(text: str) -> str:
    """The last paragraph holds versions, and may be long."""
    return "\n".join(part for line in text.splitlines() for part in (textwrap.wrap(line, _WIDTH) or [""])) + "\n"
