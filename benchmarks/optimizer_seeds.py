"""Measure what 8-bit and 4-bit optimizer states cost in perplexity: GPT-2 from scratch on WikiText-2 under a plan,
same seeds for each.

    python benchmarks/optimizer_seeds.py --data DIR [--seeds 1 2 3] [--optim NAME ...] [--output DIR] [--markdown FILE]

DIR and the recipe (two processes, 200 steps) are those of `same_result.py`. The exit code is 1 if the mean perplexity
with 8 bits is outside the range of AdamW's seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # Python adds only the script's own folder

from benchmarks.same_result import run

RECIPE = "GPT-2 from scratch"
EXACT, EIGHT_BITS = "adamw_torch", "adamw_torch_8bit"
OPTIMIZERS = (EXACT, EIGHT_BITS, "adamw_torch_4bit")


def main(arguments: list[str] | None = None) -> int:
    """Run the missing trainings, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with texts and tokenizers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument(
        "--optim", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help="values of `TrainingArguments.optim`"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/optimizer_seeds"), metavar="DIR", help="folder for the runs"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to this file")
    options = parser.parse_args(arguments)
    found = over_seeds("optimizer", {optim: ("--optim", optim) for optim in options.optim}, options)
    return is_outside(found, EIGHT_BITS, EXACT)


def over_seeds(kind: str, flags: Mapping[str, Sequence[str]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the perplexities of each kind of run over `options.seeds`; print the table and write it to
    `options.markdown`.
    """
    places = {"data": options.data.resolve(), "runs": options.output.resolve()}
    cases = [(name, seed) for seed in options.seeds for name in flags]
    found: dict[str, list[float]] = {name: [] for name in flags}
    for name, seed in track(cases, description="Training", console=Console(stderr=True)):
        folder = run(RECIPE, seed, places, 2, *flags[name])
        found[name].append(json.loads((folder / "eval_results.json").read_text(encoding="utf-8"))["perplexity"])
    show(kind, found, options.seeds, options.markdown)
    return found


def show(kind: str, found: Mapping[str, Sequence[float]], seeds: Sequence[int], markdown: Path | None) -> None:
    """Print a table of perplexities by kind and seed, and write it to `markdown`."""
    rows = [(kind, *(f"seed {seed}" for seed in seeds), "mean", "spread"), *map(cells, found, found.values())]
    shown = Table(*rows[0])
    for row in rows[1:]:
        shown.add_row(*row)
    Console().print(shown)
    if markdown is not None:
        lines = (rows[0], ("---",) * len(rows[0]), *rows[1:])
        markdown.write_text("".join(f"| {' | '.join(row)} |\n" for row in lines), encoding="utf-8")


def is_outside(found: Mapping[str, Sequence[float]], name: str, exact: str) -> int:
    """Return 1 if the mean of `name` is outside the range of `exact`; 0 if it is inside, or if one of the two did
    not run.
    """
    values, seeds = found.get(name), found.get(exact)
    return 0 if not (values and seeds) else int(not min(seeds) <= statistics.mean(values) <= max(seeds))


def cells(optim: str, values: Sequence[float]) -> tuple[str, ...]:
    """Return the cells for the perplexities, their mean and their range."""
    return (
        optim,
        *(f"{value:.2f}" for value in values),
        f"{statistics.mean(values):.2f}",
        f"{max(values) - min(values):.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
