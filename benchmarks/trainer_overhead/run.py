"""Compare `Trainer(osdp=...)` with the stock Trainer: time of a step, and time until the first step.

    python -m benchmarks.trainer_overhead.run [--steps N] [--starts N] [--markdown FILE]

The same GPT-2 is trained on two CPU processes with gloo, sharded over both and freed after forward, by

- `stock`: transformers' Trainer with Accelerate's FSDP2;
- `osdp, torch's collectives`: this package's Trainer with `strategy="fsdp"` and FSDP2's own reduce-scatter for gloo,
  so that the comparison is of the package, not of how bytes are sent;
- `osdp`: this package's Trainer, unchanged.

Steps are taken in turns: all processes stay alive, and each contestant runs one step while the others wait, so that
changes in the machine's speed affect all alike. A step is everything that the Trainer does from the beginning of one
step to that of the next, including data and callbacks. Starts are separate runs, one after the other: from the start
of Python to the beginning of the first step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
CONTESTANTS = ("stock", "osdp, torch's collectives", "osdp")
RANKS = 2
WARM_UP = 5
"""Warm-up steps of each contestant, which do not count."""
STEP_AIM, START_AIM_S = 1.02, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contestant; times are in seconds."""

    name: str
    steps: Sequence[float]
    """Seconds of the steps on the slower rank, in order."""
    starts: Sequence[float]

    def against(self, other: Row) -> float:
        """Return the median ratio of neighbouring steps."""
        return statistics.median(own / its for own, its in zip(self.steps, other.steps, strict=True))

    def later_than(self, other: Row) -> float:
        """Return the difference of the median start times, in seconds."""
        return statistics.median(self.starts) - statistics.median(other.starts)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each contestant, taken in turns")
    parser.add_argument("--starts", type=int, default=3, help="starts of each contestant, one after the other")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to this file")
    options = parser.parse_args(arguments)
    steps = together(options.steps)
    starts: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for name in track(list(CONTESTANTS) * options.starts, description="Starts", console=Console(stderr=True)):
        starts[name].append(alone(name))
    rows = [Row(name=name, steps=steps[name], starts=starts[name]) for name in CONTESTANTS]
    Console().print(table(rows))
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows), encoding="utf-8")


def together(steps: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant's steps, taken in turns."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
    store.set("go/0", "")
    total = WARM_UP + steps
    found = _launch(CONTESTANTS, total, store.port)
    return {name: [max(times) for times in zip(*found[name], strict=True)][WARM_UP:] for name in CONTESTANTS}


def alone(name: str) -> float:
    """Return the seconds from the start of Python to the first step, on the slower rank."""
    return max(times[0] for times in _launch((name,), 1, None)[name])


def _launch(names: Sequence[str], steps: int, turns_port: int | None) -> dict[str, list[list[float]]]:
    """Run contestants at the same time; return what each of their ranks measured."""
    with tempfile.TemporaryDirectory(prefix="trainer_overhead_") as folder:
        stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in names]
        processes = [
            _start(name, index, rank, steps, folder, store.port, turns_port, len(names))
            for index, (name, store) in enumerate(zip(names, stores, strict=True))
            for rank in range(RANKS)
        ]
        codes = _wait(processes)
        if any(codes):
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(Path(folder).glob("*.log")))
            raise SystemExit(f"Contestants ended with codes {codes}:\n{logs}")
        return {
            name: [
                [float(line) for line in (Path(folder) / f"{index}.{rank}.txt").read_text().split()] for rank in range(RANKS)  # noqa: E501
            ]
            for index, name in enumerate(names)
        }  # fmt: skip


def _wait(processes: Sequence[subprocess.Popen]) -> list[int | None]:
    """Return the exit codes; if one contestant fails, end the others, which would wait for it."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.1)
    return [process.wait() for process in processes]


def _start(
    name: str, index: int, rank: int, steps: int, folder: str, port: int, turns_port: int | None, contestants: int
) -> subprocess.Popen:
    env = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME",
                                                                                                "lo"),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "benchmarks.trainer_overhead.contestant", "--name", name, "--steps", str(steps),
        "--output", f"{folder}/{index}.{rank}.txt", "--folder", f"{folder}/{index}", "--index", str(index),
        "--contestants", str(contestants), "--turns-port", str(turns_port or 0),
    ]  # fmt: skip
    with open(f"{folder}/{index}.{rank}.log", "w") as log:
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    stock = rows[0]
    return [
        (
            row.name,
            f"{1e3 * statistics.median(row.steps):.1f} ms",
            f"{row.against(stock):.3f}",
            f"{statistics.median(row.starts):.1f} s",
            f"{row.later_than(stock):+.1f} s",
        )
        for row in rows
    ]  # fmt: skip


COLUMNS = ("", "step, median", f"of stock (aim {STEP_AIM})", "first step after", f"later (aim {START_AIM_S:.0f} s)")


def table(rows: Sequence[Row]) -> Table:
    """Return the table for the terminal."""
    made = Table(*COLUMNS)
    for cells in _cells(rows):
        made.add_row(*cells)
    return made


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (COLUMNS, ("---",) * len(COLUMNS), *_cells(rows))) + "\n"


if __name__ == "__main__":
    main()
