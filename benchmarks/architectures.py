"""Plan and train architectures of transformers, and write the table of docs/models.md.

    python -m benchmarks.architectures [--only NAME ...] [--markdown FILE]

Each model class is tried twice. In its default configuration it is described without weights and planned for H100
machines, under a memory limit half-way between the least possible one and what data parallelism needs. As a tiny model
it is trained with two processes on the CPU in float64: two AdamW steps with clipping under a plan that gives
neighbouring units different layouts, compared with one process. The exit code is 1 if one of the two fails.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers.utils import logging

from hf_osdp.errors import OSDPError
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import SearchResult, least_memory, search
from hf_osdp.quantities import format_bytes
from hf_osdp.report.content import package_versions
from hf_osdp.tracing.describe import describe
from tests.helpers.architectures import BLOCK_CLASSES, TINY, train_alone, train_by_plan
from tests.helpers.distributed import RankFailure, run_ranks

TOKENS, SAMPLES_PER_DEVICE = 256, 8
MOST_NODES = 8
TOLERANCE = 1e-12
COLUMNS = ("model", "parameters", "blocks", "peak of limit", "plan", "difference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model class."""

    name: str
    description: ModelDescription
    hardware: Hardware
    limit_bytes: int
    result: SearchResult
    worst_error: float
    """Largest absolute difference of losses, gradient norms, parameters and buffers."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table row."""
        peak = self.result.memory.on(self.hardware)
        blocks = Counter(
            u.class_name for u in self.description.units if u.class_name in self.description.block_classes
        )
        return (
            self.name,
            _count(sum(unit.numel for unit in self.description.units)),
            ", ".join(f"{number} {name}" for name, number in blocks.items()),
            f"{format_bytes(peak)} of {format_bytes(self.limit_bytes)} on {self.hardware.world_size}",
            layouts(self.result.plan),
            f"{self.worst_error:.0e}",
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=TINY, help="model classes; default: all")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    rows, failures = [], []
    for name in track(options.only or tuple(TINY), description="Planning and training", console=Console(stderr=True)):
        try:
            rows.append(tried(name))
        except (OSDPError, ValueError, RankFailure) as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    Console().print(table(rows))
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows), encoding="utf-8")
    failures += [f"{row.name}: differs by {row.worst_error:.1e}" for row in rows if not row.worst_error <= TOLERANCE]
    for failure in failures:
        print(failure, file=sys.stderr)
    return bool(failures)


def tried(name: str) -> Row:
    """Plan the default configuration and train the tiny one."""
    config = getattr(transformers, name).config_class()
    description = describe(
        config, sequence_length=TOKENS, auto_class=name, compute_dtype=DType.BFLOAT16, device_type="cuda",
        block_classes=BLOCK_CLASSES.get(name),
    )  # fmt: skip
    hardware, limit, result = planned(description)
    _, trained = run_ranks(train_by_plan, 2, name)[0]
    worst = max(trained.worst_error(train_alone(name, 2)).values())
    return Row(
        name=name, description=description, hardware=hardware, limit_bytes=limit, result=result, worst_error=worst
    )


def planned(description: ModelDescription) -> tuple[Hardware, int, SearchResult]:
    """Plan for one H100 machine; double the number of machines until a plan fits."""
    nodes = 1
    while True:
        hardware = preset("h100", nodes=nodes, devices_per_node=8)
        job = TrainingJob(
            global_batch_size=SAMPLES_PER_DEVICE * hardware.world_size, precision=Precision.named("bf16")
        )
        least = least_memory(
            PlanningProblem(
                description=description, hardware=hardware, job=job, memory_limit_bytes=hardware.device.memory_bytes
            )
        )
        if least <= hardware.device.memory_bytes or nodes == MOST_NODES:
            break
        nodes *= 2
    limit = min(
        hardware.device.memory_bytes,
        (
            least
            + least_memory(
                PlanningProblem(
                    description=description,
                    hardware=hardware,
                    job=job,
                    memory_limit_bytes=hardware.device.memory_bytes,
                    strategy="ddp",
                )
            )
        )
        // 2,
    )
    return (
        hardware,
        limit,
        search(PlanningProblem(description=description, hardware=hardware, job=job, memory_limit_bytes=limit)),
    )


def layouts(plan: Plan) -> str:
    """Return the number of units per layout: `3 replicate, 9 ZeRO-2 over 8, 2 ZeRO-3 over 8`."""

    def layout(shard_size: int, frees: bool, stage_size: int) -> str:
        if shard_size == 1:
            return "replicated"
        where = f"over {shard_size}" + (" in 2 stages" if stage_size > 1 else "")
        return f"{'freed' if frees else 'kept'} {where}"

    counts = Counter(layout(u.shard_size, u.reshard_after_forward, u.stage_size) for u in plan.units)
    recomputed = sum(unit.activations.recomputes for unit in plan.units)
    text = ", ".join(f"{number} {name}" for name, number in counts.most_common()) + (
        f"; {recomputed} recomputed" if recomputed else ""
    )
    return f"{text}; {plan.micro_batch_size} x {plan.accumulation_steps} samples"


def table(rows: list[Row]) -> Table:
    """Return the table for the terminal."""
    made = Table(*COLUMNS, row_styles=("", "dim"))
    for row in rows:
        made.add_row(*row.cells)
    return made


def markdown(rows: list[Row]) -> str:
    """Return the page of the documentation."""
    lines = [" | ".join(cells) for cells in (COLUMNS, ("---",) * len(COLUMNS), *(row.cells for row in rows))]
    body = "\n".join(f"| {line} |" for line in lines)
    return PAGE.format(
        table=body, versions=_versions(), tolerance=TOLERANCE, tokens=TOKENS, samples=SAMPLES_PER_DEVICE
    )


def _versions() -> str:
    versions = package_versions()
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "accelerate"))


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


PAGE = """# Models that were tried

The model classes that were planned and trained. Any `transformers` model whose repeated blocks can be found should work; these do. Each
class was tried in two ways:

- **With its default configuration**, on paper: described without weights, bf16, {tokens} tokens a sample, {samples} samples a device and
  step, planned for machines of 8 H100 (as many as are needed to hold the model). The limit is half-way between the least possible memory
  and the memory of plain data parallelism, at most 80 GiB, so that the planner has to mix layouts. `peak of limit` is the estimate, the
  limit and the number of devices; both include the memory that a device reserves for itself. `plan` says how many units are replicated,
  kept from forward to backward (ZeRO-2) or freed (ZeRO-3), over how many devices; how many blocks are recomputed (wholly or by operator);
  and micro-batch x accumulation steps.
- **Tiny**, with real weights and data: two AdamW steps with clipping on two processes, in float64, compared with one process, under a plan
  that gives neighbouring units different layouts, recomputes some blocks and offloads others to the host.
  `difference` is the largest absolute difference of any loss, gradient norm, parameter or buffer; the bound is {tolerance:.0e}
  (`tests/distributed/test_architectures.py`).

Written by `python -m benchmarks.architectures --markdown docs/models.md` (two CPU cores, {versions},
November 2026).

{table}

Special cases:

- Blocks are found automatically, except for ALBERT, which runs its one layer repeatedly: `block_classes=("AlbertLayer",)`.
- **Tied weights** are one unit with all their owners. Several classes of blocks (encoder and decoder) are planned together. Parameters
  outside of blocks belong to the root. Buffers are replicated, and come from rank 0 at the start.
- **Batch norm** (ResNet) stays in float32 under bf16 and fp16: batch norms are then units of their own. Each rank normalises by its own
  samples, as in plain data parallelism, and keeps its own running statistics; rank 0's are saved. Blocks with batch norm are not
  recomputed, because their statistics would be updated twice.
- **Mixture of experts**: every expert is in its block's unit. In float64 the experts run one by one (`experts_implementation="eager"`);
  `grouped_mm`, the default, does not support float64.
- Gemma's norm computes in float32 whatever the dtype of the parameters, so its gradients depend on the order of sums in the 8th digit; in
  this comparison it computes in float64.
- Inputs are known for text, images and log-mel spectrograms. For others, such as Wav2Vec2's waveforms, `describe` and
  `OptimalShardedDataParallel` take `inputs`.
"""  # noqa: E501

if __name__ == "__main__":
    sys.exit(main())
