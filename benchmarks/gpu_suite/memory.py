"""Memory as rank 0 of 8 on one GPU: allocated and reserved bytes against the estimate, and enforced limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import gpu_memory
from benchmarks.gpu_memory import LAYOUTS, WORLD, LayoutRow, LimitRow, Model
from hf_osdp.quantities import format_bytes
from tests.helpers.fake_step import fake_process_group

from .processes import apart
from .step import Bench, step

TINY = Model(
    config="GPT2Config", architecture="GPT2LMHeadModel", sequence_length=32, samples=2,
    sizes={"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 301, "n_positions": 32, "bos_token_id": 0,
           "eos_token_id": 0},
)  # fmt: skip
LIMITS = (("GPT-2 small", "bf16"), ("Llama 1B", "bf16"), ("BERT large", "no"), ("GPT-2 medium", "bf16"))
BETWEEN = (0.0, 0.15, 0.35, 0.6, 0.9)
"""Fractions of the way from the least feasible limit to what DDP needs; 20 limits with four models."""


@step(
    part=4,
    expected_s=120,
    limit_s=420,
    rehearsal_s=15,
    proves="layouts of published models as rank 0 of 8: estimated against allocated and reserved",
)
def layouts(bench: Bench) -> None:
    rows: list[LayoutRow] = []
    cases = (("tiny", "bf16"),) if bench.rehearses else [(n, p) for p in ("bf16", "no") for n in gpu_memory.MODELS]
    for name, precision in in_time(bench, cases):
        chosen = ("zero3", "mixed") if bench.rehearses else LAYOUTS
        found = measured(bench, name, precision, chosen, ())[0]
        rows += found
        for row in found:
            error = "out of memory" if row.error is None else f"{row.error:+.2%}"
            bench.row(
                model=name, dtype=precision, layout=row.layout, estimated=size(row.estimated_bytes),
                allocated=size(row.allocated_bytes), reserved=size(row.reserved_bytes), error=error,
            )  # fmt: skip
    line, _ = gpu_memory.headline(rows, [])
    bench.note(line.split(";")[0])
    errors = [abs(row.error) for row in rows if row.error is not None]
    bench.aim(
        bool(errors) and sum(errors) / len(errors) <= (0.02 if bench.rehearses else gpu_memory.AIM_ERROR),
        f"the {line.split(';')[0]}",
    )


@step(
    part=4,
    expected_s=150,
    limit_s=420,
    rehearsal_s=20,
    proves="20 limits that torch's allocator enforces: every plan that is called feasible runs",
)
def limits(bench: Bench) -> None:
    for name, precision in in_time(bench, (("tiny", "bf16"),) if bench.rehearses else LIMITS):
        between = (0.3,) if bench.rehearses else BETWEEN
        show_limits(bench, measured(bench, name, precision, (), between)[1])


def in_time(bench: Bench, cases: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield models and precisions while half as much again as the longest so far is left; name the others."""
    longest = 0.0
    for number, case in enumerate(cases):
        before = bench.left_s
        if before < 1.5 * longest:
            bench.note(f"No time was left for {', '.join(map(' '.join, cases[number:]))}.")
            return
        yield case
        longest = max(longest, before - bench.left_s)


def show_limits(bench: Bench, rows: Sequence[LimitRow]) -> None:
    """Write rows; a plan that runs out of memory under its limit is a missed aim."""
    for row in rows:
        bench.row(
            model=row.model, dtype=row.precision, limit=size(row.limit_bytes), planned=size(row.planned_bytes),
            allocated=size(row.allocated_bytes), reserved=size(row.reserved_bytes),
            used="-" if row.used is None else f"{row.used:.1%}",
            outcome="fits" if row.fits else "OUT OF MEMORY",
        )  # fmt: skip
        bench.aim(row.fits, f"{row.model} {row.precision}: the plan for {size(row.limit_bytes)} runs out of memory")


def measured(bench: Bench, name: str, *args: Any) -> tuple[list[LayoutRow], list[LimitRow]]:
    """Return rows measured on the GPU, or of a tiny model in counted CPU memory."""
    if not bench.on_cpu:
        return apart(measured_on_cuda, name, *args)
    from .counted_memory import CountedMemory

    precision, layouts, between = args
    memory = CountedMemory()
    with fake_process_group(WORLD):
        setting = gpu_memory.setting_of(name, TINY, precision, memory.device)
        return gpu_memory.measure(setting, memory, layouts, between)


def measured_on_cuda(name: str, *args: Any) -> tuple[list[LayoutRow], list[LimitRow]]:
    gpu_memory.MORE_MODELS["tiny"] = TINY
    return gpu_memory.measure_on_cuda(name, *args)


def size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
