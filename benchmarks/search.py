"""Measure the time to the proven optimum for models of 12 to 128 layers.

    python benchmarks/search.py [--quick] [--json FILE]

Each model is described once from its configuration (the trace is timed separately). The search runs under memory
limits from just above the least that any plan needs to more than replication needs. The aim is under one second per
search on one core. The exit code is 1 if it is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import GPT2Config
from transformers.utils import logging

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.quantities import format_bytes, format_seconds
from hf_osdp.tracing.describe import describe

AIM_S = 1.0
FACTORS = (1.001, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the devices it is planned for."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence_length: int
    hardware: Hardware
    global_batch_size: int


CASES = (
    Case(name="GPT-2 small", layers=12, hidden=768, heads=12, sequence_length=1024,
         hardware=preset("titan-rtx", devices_per_node=8), global_batch_size=64),
    Case(name="GPT-2 48 x 1536", layers=48, hidden=1536, heads=24, sequence_length=1024,
         hardware=preset("titan-rtx", nodes=2, devices_per_node=8), global_batch_size=128),
    Case(name="GPT 175B", layers=96, hidden=12288, heads=96, sequence_length=2048,
         hardware=preset("a100-80", nodes=64, devices_per_node=8), global_batch_size=1024),
    Case(name="GPT 1T", layers=128, hidden=25600, heads=160, sequence_length=2048,
         hardware=preset("h100", nodes=128, devices_per_node=8), global_batch_size=2048),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repetition instead of three")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    logging.set_verbosity_error()
    rows = [row for case in CASES for row in measure(case, repetitions=1 if options.quick else 3)]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    worst = max(row["search_s"] for row in rows)
    proven = all(row["proven"] for row in rows)
    print(f"slowest search {worst:.3f} s (aim {AIM_S:g} s), {'all' if proven else 'NOT all'} proven optimal")
    return 0 if worst <= AIM_S and proven else 1


def described(case: Case) -> ModelDescription:
    """Describe a case's model."""
    return describe(
        GPT2Config(n_layer=case.layers, n_embd=case.hidden, n_head=case.heads, n_positions=case.sequence_length),
        sequence_length=case.sequence_length, compute_dtype=DType.BFLOAT16, device_type="cuda", recomputation=True,
    )  # fmt: skip


def job_of(case: Case) -> TrainingJob:
    return TrainingJob(global_batch_size=case.global_batch_size, precision=Precision.named("bf16"))


def measure(case: Case, *, repetitions: int) -> list[dict]:
    """Return one row per memory limit; the time is the median of the repetitions."""
    started = time.perf_counter()
    description, job = described(case), job_of(case)
    describe_s = time.perf_counter() - started
    rows = []
    for name, limit in limits(description, case.hardware, job).items():
        times, result = [], None
        for _ in range(repetitions):
            started = time.perf_counter()
            result = search(
                PlanningProblem(description=description, hardware=case.hardware, job=job, memory_limit_bytes=limit)
            )
            times.append(time.perf_counter() - started)
        rows.append({
            "model": case.name, "parameters": description.numel, "layers": case.layers,
            "devices": case.hardware.world_size,
            "limit": name, "limit_bytes": limit, "describe_s": describe_s, "search_s": sorted(times)[len(times) // 2],
            "proven": result.plan.proven_optimal, "gap": result.plan.gap, "step_s": result.plan.step_s,
            "micro_batch_size": result.plan.micro_batch_size,
            "layouts": len({(u.shard_size, u.reshard_after_forward) for u in result.plan.units}),
        })  # fmt: skip
    return rows


def limits(description: ModelDescription, hardware: Hardware, job: TrainingJob) -> dict[str, int]:
    """Return limits in bytes, as multiples of the least that any plan needs."""
    try:
        search(PlanningProblem(description=description, hardware=hardware, job=job, memory_limit_bytes=2**20))
    except InfeasibleError as error:
        return {f"{factor:g} x least": int(error.least_peak_bytes * factor) for factor in FACTORS}
    raise AssertionError("1 MiB cannot be enough")


def show(rows: list[dict]) -> None:
    """Print the slowest search of each model."""
    table = Table(title=f"Time to the proven optimum, the slowest of {len(FACTORS)} limits")
    for name in ("model", "devices", "limit", "", "micro-batch", "layouts", "describe", "search"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    slowest: dict[str, dict] = {}
    for row in rows:
        if row["search_s"] >= slowest.get(row["model"], row)["search_s"]:
            slowest[row["model"]] = row
    for row in slowest.values():
        table.add_row(
            row["model"], str(row["devices"]), row["limit"], format_bytes(row["limit_bytes"]),
            str(row["micro_batch_size"]),
            str(row["layouts"]), f"{row['describe_s']:.2f} s", format_seconds(row["search_s"]),
        )  # fmt: skip
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
