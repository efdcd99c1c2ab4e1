"""Train the same thing with the stock stack and with this package, row by row, and compare what they log.

    python -m tests.compatibility [--only PATTERN] [--sample TEXT] [--write docs/compatibility.md]

On this package's side, each row runs on two gloo processes of the CPU, under a plan in which neighbouring units have
different layouts (replicated, ZeRO-2, ZeRO-3), with the stock side's micro-batch. Loss, gradient norm, learning rate
and metrics of every step are compared. The exit code is 1 if a row is silently different, crashes or hangs, or differs
from its expected verdict.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import io
import os
import sys
import textwrap
import zlib
from collections import Counter
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from hf_osdp.versions import package_versions

from .row import Result, Verdict, read_rows
from .run import PRELOAD, one_line, run

_WIDTH = 136
PAGE = Path(__file__).with_name("page.md")


def page(results: list[Result]) -> str:
    """Return the page: a summary by group, and the table, which is read from a CSV file."""
    counts = Counter(result.verdict for result in results)
    text = f"{len(results)} rows: " + ", ".join(
        f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]
    )
    found = {**package_versions(), **{name: version(name) for name in ("trl", "sentence-transformers", "peft")}}
    counted = textwrap.fill(f"{text}; {', '.join(f'{name} {text}' for name, text in found.items())}.", _WIDTH)
    verdicts = [verdict for verdict in Verdict if verdict.may_stand]
    lines = [("trainings", "rows", *(verdict.value for verdict in verdicts)), ("---", *["---:"] * (1 + len(verdicts)))]
    for name, members in groupby(results, key=lambda result: result.row.group):
        of_group = Counter(result.verdict for result in members)
        lines.append((name, of_group.total(), *(of_group[verdict] for verdict in verdicts)))
    summary = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    command = f"python -m {__package__} --write docs/compatibility.md"
    return PAGE.read_text(encoding="utf-8").format(command=command, counts=counted, summary=summary)


def table(results: list[Result]) -> str:
    lines, names = io.StringIO(), ("group", "training", "result", "compared with, or why not")
    rows = [(result.row.group, result.row.name, result.verdict.value, _oracle(result)) for result in results]
    csv.writer(lines, lineterminator="\n").writerows([names, *rows])
    return lines.getvalue()


def _oracle(result: Result) -> str:
    row = result.row
    if result.verdict is not Verdict.EQUAL:
        return " ".join(result.detail.split())
    is_usual = (row.loss_tolerance, row.norm_tolerance) == (1e-4, 1e-3)
    loose = "" if is_usual else f"; within {row.loss_tolerance:g} and {row.norm_tolerance:g}"
    return row.oracle.value + loose


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = "rows whose `group: name` contains this; * and ? as in a shell"
    parser.add_argument("--only", metavar="PATTERN", help=only)
    sample = "run about one row of ten, drawn by this text, such as the name of a commit"
    parser.add_argument("--sample", metavar="TEXT", help=sample)
    write = "write the page here, and its rows to data/ next to it; needs all rows"
    parser.add_argument("--write", type=Path, metavar="FILE", help=write)
    options = parser.parse_args(arguments)
    if options.write is not None and (options.only or options.sample):
        parser.error("--write needs all rows; leave out --only and --sample")
    os.environ["OSDP_TEST_PRELOAD"] = PRELOAD
    chosen = [row for row in read_rows().values() if fnmatch.fnmatch(row.label, f"*{options.only or ''}*")]
    if options.sample:
        chosen = [row for row in chosen if zlib.crc32(f"{options.sample} {row.label}".encode()) % 10 == 0]
    if not chosen:
        parser.error(f"no row has {options.only!r} in its name; docs/data/compatibility.csv lists them")
    results = []
    for number, row in enumerate(chosen, start=1):
        result = run(row)
        results.append(result)
        told = f"{result.verdict.value} ({result.seconds:.0f} s) {one_line(result.detail)}"
        print(f"{number}/{len(chosen)} {row.label}: {told}{'' if result.is_good else '  <-- !'}", flush=True)
    bad = [result for result in results if not result.is_good]
    if options.write is not None:
        options.write.write_text(page(results), encoding="utf-8")
        rows = options.write.parent / "data" / f"{options.write.stem}.csv"
        rows.parent.mkdir(exist_ok=True)
        rows.write_text(table(results), encoding="utf-8")
    seconds = sum(result.seconds for result in results)
    print(f"{len(results) - len(bad)} rows of {len(results)} are as expected, in {seconds:.0f} s.")
    for result in bad:
        row = result.row
        told = f"{row.label}: {result.verdict.value}, expected {row.expected.value}. {result.detail}"
        print(told, file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
