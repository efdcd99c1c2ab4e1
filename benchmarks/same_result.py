"""Compare the scores of recipes under a mixed plan on two processes with those of one process without hf_osdp.

    python benchmarks/same_result.py --data DIR [--seeds 1 2 3] [--only NAME ...] [--output DIR] [--markdown FILE]

DIR has WikiText-2 (`wikitext-2/*.txt`), GLUE's SST-2 (`glue/sst2/*.jsonl`), the vocabularies of GPT-2 and BERT
(`tokenizers/gpt2`, `tokenizers/bert-base-uncased`), Shakespeare (`tinyshakespeare/input.txt`) and a trained Llama
(`models/stories260K`). Each recipe runs twice for each seed, with the same samples in each optimizer step: with its
file of arguments on two processes, and by the stock Trainer in one process with twice the batch. Results of earlier
runs are reused.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "accelerate_configs" / "osdp_cpu.yaml"
COLUMNS = ("what", "seed", "score", "two processes, mixed plan", "one process", "layouts of the plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe, its file of arguments, and the flags for the data."""

    script: str
    arguments: str
    metric: str
    """Name of the metric in `eval_results.json`."""
    batch: tuple[int, int]
    """Batch sizes of the file: `per_device_train_batch_size` and `per_device_eval_batch_size`."""
    extra: tuple[str, ...]
    """Flags, in which `{data}` is the folder of the data, `{runs}` that of the results, and `{seed}` the seed."""
    seeds: int | None = None
    """Number of seeds to run; None for all."""


RECIPES = {
    "stories260K goes on": Recipe(
        script="run_clm", arguments="stories260k/continue.yaml", metric="perplexity", batch=(4, 8),
        extra=("--model_name_or_path", "{data}/models/stories260K", "--train_file",
               "{data}/tinyshakespeare/input.txt"),
    ),
    "GPT-2 from scratch": Recipe(
        script="run_clm", arguments="gpt2/small_wikitext.yaml", metric="perplexity", batch=(8, 8),
        extra=(
            "--tokenizer_name", "{data}/tokenizers/gpt2",
            "--train_file", "{data}/wikitext-2/train.txt", "--validation_file", "{data}/wikitext-2/validation.txt",
        ),
    ),
    "BERT from scratch": Recipe(
        script="run_mlm", arguments="bert/small.yaml", metric="perplexity", batch=(16, 16), seeds=1,
        extra=(
            "--tokenizer_name", "{data}/tokenizers/bert-base-uncased",
            "--train_file", "{data}/wikitext-2/train.txt", "--validation_file", "{data}/wikitext-2/validation.txt",
        ),
    ),
    "that BERT on SST-2": Recipe(
        script="run_glue", arguments="glue/sst2_small.yaml", metric="accuracy", batch=(32, 64),
        extra=(
            "--model_name_or_path", "{runs}/BERT from scratch, seed {first}, planned",
            "--train_file", "{data}/glue/sst2/train.jsonl", "--validation_file", "{data}/glue/sst2/validation.jsonl",
        ),
    ),
}  # fmt: skip
"""Recipes in the order in which they run; the last one starts from the model of the one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recipe with one seed."""

    name: str
    seed: int
    metric: str
    planned: float
    alone: float
    layouts: int
    """Number of distinct layouts in the plan."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table row."""
        digits = 4 if self.metric == "accuracy" else 2
        return (
            self.name,
            str(self.seed),
            self.metric,
            f"{self.planned:.{digits}f}",
            f"{self.alone:.{digits}f}",
            str(self.layouts),
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the missing trainings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder with texts, tokenizers and models"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--only", nargs="+", choices=RECIPES, metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/same_result"), metavar="DIR", help="folder for the runs"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to this file")
    options = parser.parse_args(arguments)
    cases = [(name, seed) for name in options.only or RECIPES for seed in options.seeds[: RECIPES[name].seeds]]
    places = {"data": options.data.resolve(), "runs": options.output.resolve(), "first": options.seeds[0]}
    rows = [
        row_of(name, seed, places) for name, seed in track(cases, description="Training", console=Console(stderr=True))
    ]  # fmt: skip
    Console().print(table(rows))
    for line in summary(rows):
        print(line)
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows), encoding="utf-8")


def row_of(name: str, seed: int, places: dict[str, object]) -> Row:
    """Return the row of both runs of a recipe with a seed."""
    recipe = RECIPES[name]
    planned, alone = (run(name, seed, places, processes) for processes in (2, 1))
    report = json.loads((planned / "osdp_report.json").read_text(encoding="utf-8"))
    layouts = {(unit["shard_size"], unit["reshard_after_forward"]) for unit in report["plan"]["units"]}
    scores = [json.loads((folder / "eval_results.json").read_text(encoding="utf-8")) for folder in (planned, alone)]
    key = recipe.metric if recipe.metric in scores[0] else f"eval_{recipe.metric}"
    return Row(
        name=name, seed=seed, metric=recipe.metric, planned=scores[0][key], alone=scores[1][key], layouts=len(layouts)
    )  # fmt: skip


def run(name: str, seed: int, places: dict[str, object], processes: int, *more: str) -> Path:
    """Train with the flags `more` unless results exist; return the folder with the results."""
    recipe = RECIPES[name]
    folder = Path(str(places["runs"])) / ", ".join(
        [name, f"seed {seed}", "planned" if processes == 2 else "alone", *(Path(value).name for value in more[1::2])]
    )
    if folder.is_dir():
        return folder
    script = [str(ROOT / "recipes" / f"{recipe.script}.py"), str(ROOT / "recipes" / recipe.arguments)]
    flags = [part.format(**places, seed=seed) for part in recipe.extra]
    unfinished = folder.with_name(f"{folder.name}, unfinished")
    flags += [*more, "--seed", str(seed), "--output_dir", str(unfinished), "--disable_tqdm", "true"]
    if processes == 2:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG), *script, *flags]
    else:
        train, evaluate = (str(2 * size) for size in recipe.batch)
        command = [sys.executable, *script, *flags, "--osdp", "false", "--use_cpu", "true"]
        command += ["--per_device_train_batch_size", train, "--per_device_eval_batch_size", evaluate]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "w", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"{folder.name} ended with code {done.returncode}; see {folder}.log.")
    return unfinished.rename(folder)


def summary(rows: Sequence[Row]) -> list[str]:
    """Return lines with the means over seeds and the largest difference of one seed."""
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        planned, alone = (statistics.mean(getattr(row, side) for row in own) for side in ("planned", "alone"))
        worst = max(abs(row.planned - row.alone) for row in own)
        lines.append(
            f"{name}: mean {own[0].metric} {planned:.4f} and {alone:.4f}; a seed's largest difference {worst:.4f}"
        )
    return lines


def table(rows: Sequence[Row]) -> Table:
    """Return the table for the terminal."""
    made = Table(*COLUMNS)
    for row in rows:
        made.add_row(*row.cells)
    return made


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells for row in rows)]
    return (
        "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        + "\n\n"
        + "\n".join(f"- {line}" for line in summary(rows))
        + "\n"
    )


if __name__ == "__main__":
    main()
