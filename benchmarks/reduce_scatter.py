"""Compare gloo's reduce-scatter with ours on this machine.

    python benchmarks/reduce_scatter.py [--world-sizes 2,4] [--seconds 20] [--json FILE]

gloo implements a reduce-scatter as an all-reduce and drops the rest; `PieceTransport` sends chunks around a ring. Bytes are counted on the
loopback interface (`/proc/net/dev`, Linux) for all ranks together, so nothing else may use it. Times are those of the slowest rank; both
kinds run in turn in each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

sys.path.insert(0, str(Path(__file__).parents[1]))  # Python adds only the script's own folder

from benchmarks.torchrun import start_ranks
from hf_osdp.distributed.collectives import PieceTransport, TransportReduceScatter
from hf_osdp.measurement.timing import barrier, over_ranks, rounds

SIZES_BYTES = (2**16, 2**20, 2**24, 2**26)
CPU = torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", default="2,4", help="world sizes, separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="approximate duration for each world size")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        return run_rank(options.as_rank, options.seconds)
    rows = [row for size in options.world_sizes.split(",") for row in start_ranks(__file__, int(size), "--seconds", str(options.seconds))]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def run_rank(result: Path, seconds: float) -> int:
    """Run one rank: every size, both kinds in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [row_of(nbytes, seconds / len(SIZES_BYTES)) for nbytes in SIZES_BYTES]
    if dist.get_rank() == 0:
        result.write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()
    return 0


def row_of(nbytes: int, seconds: float) -> dict:
    """Return seconds and bytes of one reduce-scatter of `nbytes` for each kind."""
    kinds = {"gloo": DefaultReduceScatter(), "ring": TransportReduceScatter(PieceTransport())}
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    sent: dict[str, list[int]] = {name: [] for name in kinds}
    for _ in rounds(seconds, least=5, most=200):
        for name, scatter in kinds.items():
            took, crossed = timed(scatter, nbytes)
            taken[name].append(took)
            sent[name].append(crossed)
    return {
        "ranks": dist.get_world_size(), "bytes": nbytes, "rounds": len(taken["gloo"]),
        **{f"{name}_s": statistics.median(values) for name, values in taken.items()},
        **{f"{name}_sent": statistics.median(values) for name, values in sent.items()},
    }  # fmt: skip


def timed(scatter: Callable, nbytes: int) -> tuple[float, int]:
    """Return the seconds on the slowest rank, and the bytes that crossed the interface during this time."""
    world = dist.get_world_size()
    whole = torch.zeros(nbytes // 4 // world * world)
    part = torch.empty(whole.numel() // world)
    barrier(CPU)
    before, start = loopback_bytes(), time.perf_counter()
    scatter(part, whole, dist.group.WORLD, dist.ReduceOp.SUM)
    took = time.perf_counter() - start
    barrier(CPU)
    return over_ranks([took])[0], loopback_bytes() - before


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has sent."""
    (line,) = [line for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def show(rows: list[dict]) -> None:
    """Print a table; bytes are those sent by all ranks, divided by the size of the tensor."""
    table = Table(title="Reduce-scatter over gloo: its own against the ring")
    for name in ("ranks", "tensor", "gloo", "ring", "gloo / ring", "gloo sends", "ring sends", "bytes gloo / ring"):
        table.add_column(name, justify="right")
    for row in rows:
        times = (f"{1e3 * row[f'{name}_s']:.2f} ms" for name in ("gloo", "ring"))
        sent = (f"{row[f'{name}_sent'] / row['bytes']:.2f} x" for name in ("gloo", "ring"))
        ratios = row["gloo_s"] / row["ring_s"], row["gloo_sent"] / row["ring_sent"]
        tensor = f"{row['bytes'] / 2**20:g} MiB" if row["bytes"] >= 2**20 else f"{row['bytes'] >> 10} KiB"
        table.add_row(str(row["ranks"]), tensor, *times, f"{ratios[0]:.2f}x", *sent, f"{ratios[1]:.2f}x")
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
