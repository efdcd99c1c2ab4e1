"""Compare the estimated peak memory with that of the real FSDP2 step, simulated on fake tensors.

    python -m tests.simulation [--only layouts|ways] [--sample N] [--jobs N] [--csv FILE]

Thirteen models, worlds of 2, 8 and 64 devices, seven layouts, float32 and bfloat16, with and without activation
checkpointing; kernels and allocation granularity as on CUDA, dropout as the configurations have it, 4 samples of up to
512 tokens. Beside these layouts, on 8 and 64 devices, the other ways to fit: all blocks recomputed under ZeRO-3; every
decision in turn (layout, recomputation, states and activations on the host, gradients held over three micro-steps);
and of models of 4 blocks, operator units, operators in slices, and an untied vocabulary projection in 4 slices with
its loss. The aim: mean error at most 0.5 %, worst at most 3 %, never more than 1 % under. Exit code 1 where it
is missed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hf_osdp.quantities import format_bytes

from .cases import MEAN_AIM, UNDER_AIM, WORST_AIM, Row, cases, run, sampled

_HEADER = ("", "cases", "mean error", "most over", "most under", "worst case")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("layouts", "ways"), help="only layouts, or only the other ways to fit")
    parser.add_argument("--sample", type=int, metavar="N", help="N of the cases, evenly spread")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes that simulate at the same time")
    parser.add_argument("--csv", type=Path, help="also write every case to this file, one per line")
    options = parser.parse_args()
    work = cases(options.only)
    if options.sample is not None and not 1 <= options.sample <= len(work):
        parser.error(f"--sample {options.sample}: there are {len(work)} cases; give a number from 1 to that.")
    if options.sample:
        work = sampled(work, options.sample)
    rows = run(work, jobs=options.jobs)
    show("Peak memory, estimate against simulation, by model", rows, lambda row: row.model)
    show("By layout and way to fit", rows, lambda row: row.kind)
    if options.csv:
        write_cases(options.csv, rows)
    line, met = verdict(rows)
    print(line)
    return 0 if met else 1


def _summary(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    worst = max(rows, key=lambda row: abs(row.error))
    case = f"{worst.kind} on {worst.world}, {'bf16' if worst.precision == 'bf16' else 'fp32'}"
    return (
        name, str(len(rows)), f"{_mean(rows):.2%}", f"{max(row.error for row in rows):+.2%}",
        f"{min(row.error for row in rows):+.2%}",
        f"{case}{', checkpointed' if worst.checkpointing else ''}, {format_bytes(worst.simulated_bytes)}",
    )  # fmt: skip


def _mean(rows: Iterable[Row]) -> float:
    return statistics.fmean(abs(row.error) for row in rows)


def show(title: str, rows: Sequence[Row], key: Callable[[Row], str]) -> None:
    table = Table(title=title)
    for number, name in enumerate(_HEADER):
        table.add_column(name, justify="left" if number in (0, 5) else "right")
    for part in dict.fromkeys(map(key, rows)):
        table.add_row(*_summary(part, [row for row in rows if key(row) == part]))
    table.add_row(*_summary("all", rows))
    Console(width=100).print(table)


def write_cases(path: Path, rows: Sequence[Row]) -> None:
    header = "model,devices,layout,precision,checkpointing,estimated_bytes,simulated_bytes,error,peak in".split(",")
    cells = [
        (r.model, r.world, f"{r.layout}, {r.split}" if r.split else r.layout,
         "bf16" if r.precision == "bf16" else "fp32",
         "yes" if r.checkpointing else "no", r.estimated_bytes, r.simulated_bytes, f"{r.error:+.2%}", r.moment)
        for r in rows
    ]  # fmt: skip
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *cells])


def verdict(rows: Sequence[Row]) -> tuple[str, bool]:
    """Return the result in one line, and whether every aim was met."""
    mean, worst, under = _mean(rows), max(abs(row.error) for row in rows), min(row.error for row in rows)
    met = mean <= MEAN_AIM and worst <= WORST_AIM and under >= UNDER_AIM
    return (
        f"peak memory, estimate against simulation, {len(rows)} cases: mean error {mean:.2%} (aim {MEAN_AIM:.1%}),"
        f" worst {worst:.2%}"
        f" (aim {WORST_AIM:.0%}), most under {min(0.0, under):.2%} (aim {UNDER_AIM:.0%}): {'met' if met else 'MISSED'}"
    ), met


if __name__ == "__main__":
    sys.exit(main())
