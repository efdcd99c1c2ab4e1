"""What fewer bits on the wire cost in perplexity: GPT-2 from scratch on WikiText-2 in full shards, each format over the same seeds.

    python benchmarks/wire_loss.py --data DIR [--seeds 1 2 3] [--communication NAME ...] [--steps N] [--output DIR] [--markdown FILE]

DIR is that of `same_result.py`, and so is the recipe: two processes, here as two machines of one, so that each parameter is gathered
twice and each gradient reduced over the link, in the coarsest format that is allowed. Exit code 1 where the mean perplexity with int8
lies outside the seeds of exact runs, or that with int4 more than 1 % above their mean.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, Python looks only in its folder

from benchmarks.optimizer_seeds import is_outside, over_seeds
from hf_osdp.planning.config import COMMUNICATIONS, EXACT

TWO_MACHINES = ("--strategy", "fsdp", "--hardware", "cpu", "--nodes", "2")
WORSE = 1.01


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of texts and tokenizers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--communication", nargs="+", choices=COMMUNICATIONS, default=list(COMMUNICATIONS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="of each run (default 200)")
    parser.add_argument("--output", type=Path, default=Path("runs/wire_loss"), metavar="DIR", help="where runs are written")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    options = parser.parse_args(arguments)
    flags = {
        name: ("--communication", name, "--max_steps", str(options.steps), *TWO_MACHINES) for name in options.communication
    }  # fmt: skip
    found = over_seeds("communication", flags, options)
    too_coarse = False
    if EXACT in found and "int4" in found:
        int4 = statistics.mean(found["int4"]) / statistics.mean(found[EXACT])
        too_coarse = int4 > WORSE
        print(f"int4: {int4 - 1:+.2%} of the mean of exact runs")
    return int(bool(is_outside(found, "int8", EXACT) or too_coarse))


if __name__ == "__main__":
    sys.exit(main())
