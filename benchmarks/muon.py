"""Compare torch's Muon on FSDP2's own tensors with Muon under a plan, which gathers each update once, on two gloo
ranks.

    python benchmarks/muon.py [--widths 64,512] [--json FILE]

Six sharded matrices have widths n and 4 n. Collectives and the bytes of their results are counted in one step; the
time is that of the fastest of five steps on rank 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # Python adds only the script's own folder

from benchmarks.torchrun import start_ranks
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.sharding.optimizer_steps import step_by_device


class Counted(TorchDispatchMode):
    """Count the bytes of the results of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors are counted
        result = func(*args, **(kwargs or {}))
        if "c10d" in str(func) and ("gather" in str(func) or "reduce" in str(func)):
            self.nbytes.append((result if isinstance(result, torch.Tensor) else args[0]).nbytes)
        return result


def row_of(width: int, by_plan: bool) -> dict[str, object]:
    torch.manual_seed(0)
    shapes = [(width, 4 * width), (4 * width, width), (width, width)] * 2
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
    fully_shard(model, mesh=Meshes("cpu").mesh(dist.get_world_size()))
    optimizer = torch.optim.Muon(model.parameters())
    if by_plan:
        step_by_device(optimizer)
    seconds = []
    for _ in range(6):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        dist.barrier()
        started = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    with Counted() as sent:
        optimizer.step()
    who = "a plan" if by_plan else "torch"
    return {
        "width": width,
        "step of": who,
        "collectives": len(sent.nbytes),
        "bytes": sum(sent.nbytes),
        "seconds": min(seconds[1:]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,512", help="with commas")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rows = [row_of(int(width), by_plan) for width in options.widths.split(",") for by_plan in (False, True)]
        if dist.get_rank() == 0:
            options.as_rank.write_text(json.dumps(rows), encoding="utf-8")
        dist.destroy_process_group()
        return 0
    rows = start_ranks(__file__, 2, "--widths", options.widths)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
