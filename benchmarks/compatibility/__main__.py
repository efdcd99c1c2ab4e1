"""Train the same thing with the stock stack and with this package, row by row, and compare what they log.

    python -m benchmarks.compatibility [--only PATTERN] [--sample TEXT] [--write docs/compatibility.md]

On this package's side, each row runs on two gloo processes of the CPU, under a plan in which neighbouring units have
different layouts (replicated, ZeRO-2, ZeRO-3), with the stock side's micro-batch. Loss, gradient norm, learning rate
and metrics of every step are compared. The exit code is 1 if a row is silently different, crashes or hangs, or differs
from its expected verdict.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import zlib
from pathlib import Path

from .page import page, table
from .row import ROWS, Result
from .run import PRELOAD, one_line, run


def main(arguments: list[str] | None = None) -> int:
    """Run rows, print the verdict of each, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="PATTERN", help="rows whose `group: name` contains this; * and ? as in a shell"
    )
    parser.add_argument("--daily", action="store_true", help="run only the rows of the daily tests")
    parser.add_argument(
        "--sample", metavar="TEXT", help="run about one row of ten, drawn by this text, such as the name of a commit"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and run none")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the page here, and its rows to data/ next to it; needs all rows",
    )
    options = parser.parse_args(arguments)
    if options.write is not None and (options.only or options.daily or options.sample):
        parser.error("--write needs all rows; leave out --only, --daily and --sample")
    from . import catalogue  # noqa: F401

    os.environ["OSDP_TEST_PRELOAD"] = PRELOAD
    pattern = f"*{options.only or ''}*"
    chosen = [row for row in ROWS.values() if fnmatch.fnmatch(row.label, pattern) and (row.daily or not options.daily)]
    if options.sample:
        chosen = [row for row in chosen if zlib.crc32(f"{options.sample} {row.label}".encode()) % 10 == 0]
    if not chosen:
        parser.error(f"no row has {options.only!r} in its name; --list prints them")
    if options.list:
        print("\n".join(row.label for row in chosen))
        return 0
    results = []
    for number, row in enumerate(chosen, start=1):
        results.append(run(row))
        _print_result(results[-1], f"{number}/{len(chosen)}")
    bad = [result for result in results if not result.is_good]
    if options.write is not None:
        options.write.write_text(page(results), encoding="utf-8")
        rows = options.write.parent / "data" / f"{options.write.stem}.csv"
        rows.parent.mkdir(exist_ok=True)
        rows.write_text(table(results), encoding="utf-8")
    print(
        f"{len(results) - len(bad)} rows of {len(results)} are as expected, in"
        f" {sum(result.seconds for result in results):.0f} s."
    )
    for result in bad:
        print(
            f"{result.row.label}: {result.verdict.value}, expected {result.row.expected.value}. {result.detail}",
            file=sys.stderr,
        )
    return bool(bad)


def _print_result(result: Result, number: str) -> None:
    mark = "" if result.is_good else "  <-- !"
    print(
        (
            f"{number} {result.row.label}: {result.verdict.value} ({result.seconds:.0f} s)"
            f" {one_line(result.detail)}{mark}"
        ),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
