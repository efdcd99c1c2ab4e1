"""Train the same thing with the stock stack and with this package, row by row, and compare what they log.

    python -m tests.compatibility [--only PATTERN] [--sample TEXT] [--write docs/compatibility.md]

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
from .row import read_rows
from .run import PRELOAD, one_line, run


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
