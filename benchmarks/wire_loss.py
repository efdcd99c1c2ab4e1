"""What fewer bits on the wire cost in perplexity: GPT-2 from scratch on WikiText-2 in full shards, each format over the same seeds.

    python benchmarks/wire_loss.py --data DIR [--seeds 1 2 3] [--communication NAME ...] [--steps N] [--output DIR] [--markdown FILE]

DIR is that of `same_result.py`, and so is the recipe: two processes, planned for a slow link, so that each parameter is gathered
twice and each gradient reduced in the coarsest format that is allowed. Exit code 1 where the mean perplexity with int8
lies outside the seeds of exact runs, or that with int4 more than 1 % above their mean.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, Python looks only in its folder

from benchmarks.optimizer_seeds import is_outside, over_seeds
from hf_osdp.planner.hardware import Link
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile
from hf_osdp.planning.config import COMMUNICATIONS, EXACT

LINK = Link(latency_s=1e-4, bytes_per_s=1.25e6, source="10 Mbit/s, so that the planner takes the coarsest format")
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
    options.output.mkdir(parents=True, exist_ok=True)
    profile = options.output.resolve() / "profile.json"
    Profile(hardware=replace(preset("cpu", devices_per_node=2), intra_node=LINK)).save(profile)
    same = ("--max_steps", str(options.steps), "--strategy", "fsdp", "--memory_limit", "1GiB", "--profile", str(profile))
    flags = {name: ("--communication", name, *same) for name in options.communication}
    found = over_seeds("communication", flags, options)
    too_coarse = False
    if EXACT in found and "int4" in found:
        int4 = statistics.mean(found["int4"]) / statistics.mean(found[EXACT])
        too_coarse = int4 > WORSE
        print(f"int4: {int4 - 1:+.2%} of the mean of exact runs")
    return int(bool(is_outside(found, "int8", EXACT) or too_coarse))


if __name__ == "__main__":
    sys.exit(main())
