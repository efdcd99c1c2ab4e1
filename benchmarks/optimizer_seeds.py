"""What states of 8 and 4 bits cost in perplexity: GPT-2 from scratch on WikiText-2 under a plan, each optimizer over the same seeds.

    python benchmarks/optimizer_seeds.py --data DIR [--seeds 1 2 3] [--optim NAME ...] [--output DIR] [--markdown FILE]

DIR is that of `same_result.py`, and so is the recipe: two processes, 200 steps. Exit code 1 where the mean perplexity with 8 bits lies
outside the seeds of AdamW.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, Python looks only in its folder

from benchmarks.same_result import run

RECIPE = "GPT-2 from scratch"
EXACT, EIGHT_BITS = "adamw_torch", "adamw_torch_8bit"
OPTIMIZERS = (EXACT, EIGHT_BITS, "adamw_torch_4bit")


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of texts and tokenizers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--optim", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help="as `TrainingArguments.optim` names them")
    parser.add_argument("--output", type=Path, default=Path("runs/optimizer_seeds"), metavar="DIR", help="where runs are written")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    options = parser.parse_args(arguments)
    places = {"data": options.data.resolve(), "runs": options.output.resolve()}
    cases = [(optim, seed) for seed in options.seeds for optim in options.optim]
    found: dict[str, list[float]] = {optim: [] for optim in options.optim}
    for optim, seed in track(cases, description="Training", console=Console(stderr=True)):
        folder = run(RECIPE, seed, places, 2, "--optim", optim)
        found[optim].append(json.loads((folder / "eval_results.json").read_text(encoding="utf-8"))["perplexity"])
    rows = [("optimizer", *(f"seed {seed}" for seed in options.seeds), "mean", "spread"), *map(cells, found, found.values())]
    shown = Table(*rows[0])
    for row in rows[1:]:
        shown.add_row(*row)
    Console().print(shown)
    if options.markdown is not None:
        lines = (rows[0], ("---",) * len(rows[0]), *rows[1:])
        options.markdown.write_text("".join(f"| {' | '.join(row)} |\n" for row in lines), encoding="utf-8")
    exact, quantized = found.get(EXACT), found.get(EIGHT_BITS)
    return 0 if not (exact and quantized) else int(not min(exact) <= statistics.mean(quantized) <= max(exact))


def cells(optim: str, values: list[float]) -> tuple[str, ...]:
    """Perplexities with their mean, and from the lowest to the highest."""
    return optim, *(f"{value:.2f}" for value in values), f"{statistics.mean(values):.2f}", f"{max(values) - min(values):.2f}"


if __name__ == "__main__":
    sys.exit(main())
