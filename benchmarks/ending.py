"""How long the other ranks live after one of four raised or was killed.

    python benchmarks/ending.py [--trials 20] [--torchrun-trials 5] [--json FILE]

Ranks are ended in planning (rank 0 in a function that takes long, the others waiting for its result) and in a step (all in
collectives). Without a launcher nobody but the lifeline and gloo end them; torchrun also ends the ranks of its own machine. Times are
from the signal, or the line that raises, to the end of the last process, on gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_osdp.distributed.consensus import on_rank_zero  # noqa: E402
from hf_osdp.sharding.environment import form_process_group, training_device  # noqa: E402
from tests.helpers.ending import endings  # noqa: E402

RANKS, VICTIM = 4, 2
ENDS, PLACES = ("killed", "raises"), ("planning", "step")
LONG_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="of each kind, without a launcher")
    parser.add_argument("--torchrun-trials", type=int, default=5, help="of each kind, under torchrun")
    parser.add_argument("--json", type=Path, help="also write the times here")
    parser.add_argument("--as-rank", nargs=3, metavar=("END", "PLACE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        train(*options.as_rank)
        return 0
    rows = {}
    for launcher, end, place in product(("none", "torchrun"), ENDS, PLACES):
        trials = options.trials if launcher == "none" else options.torchrun_trials
        rows[launcher, end, place] = [trial(launcher, end, place) for _ in range(trials)]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({" ".join(kind): times for kind, times in rows.items()}, indent=1) + "\n", encoding="utf-8")
    return 0


def train(end: str, place: str, folder: str) -> None:
    """On a rank: join the others, and either end or go on for long."""
    form_process_group(needed=True)
    rank = dist.get_rank()
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    ones = torch.ones(1, device=training_device())
    dist.all_reduce(ones)
    if rank == VICTIM:
        time.sleep(0.5)
        (Path(folder) / "ended").write_text(str(time.time()))
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the reason")
    if place == "planning":
        on_rank_zero(work)
    while True:
        dist.all_reduce(ones)


def work() -> None:
    """As tracing and searching do: Python, all the time."""
    began = time.monotonic()
    while time.monotonic() < began + LONG_S:
        pass


def trial(launcher: str, end: str, place: str) -> float:
    """Seconds from one rank's end to that of the last."""
    with tempfile.TemporaryDirectory() as folder:
        if launcher == "none":
            from benchmarks.ending import train as by_name  # not __main__'s: ranks import it

            endings(by_name, RANKS, end, place, folder)
            last = time.time()
        else:
            last = under_torchrun(end, place, Path(folder))
        return last - float((Path(folder) / "ended").read_text())


def under_torchrun(end: str, place: str, folder: Path) -> float:
    """When the last rank ended."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    process = subprocess.Popen([*launch, "--as-rank", end, place, str(folder)], stderr=subprocess.DEVNULL)
    ranks: list[psutil.Process] = []
    while len(ranks) < RANKS:
        time.sleep(0.01)
        ranks = [psutil.Process(int(path.read_text())) for path in folder.glob("pid*") if path.stat().st_size]
    psutil.wait_procs(ranks)
    last = time.time()
    process.wait()
    return last


def show(rows: dict[tuple[str, str, str], list[float]]) -> None:
    """A table."""
    table = Table(title=f"Seconds until the last of {RANKS} ranks has ended, torch {torch.__version__}, gloo", title_justify="left")
    for name in ("launcher", "one rank", "others in", "trials", "median", "slowest"):
        table.add_column(name, justify="left" if name in ("launcher", "one rank", "others in") else "right")
    for (launcher, end, place), times in rows.items():
        if times:
            table.add_row(launcher, end, place, str(len(times)), f"{statistics.median(times):.2f}", f"{max(times):.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
