"""How much deeper prefetch could gain: plans as they are beside a bound that no prefetch depth goes below.

    python benchmarks/prefetch_depth.py

FSDP2 gathers one unit ahead. Deeper prefetch lets communication wait for any compute of the step, not for its neighbour's alone, and holds
more gathered units. However deep, a plan then takes at least its copies and updates, and the larger of its compute and its communication;
so for every w between 0 and 1 at least

    Σ_units  (1 - w) compute + w communication + copies + update

which is a sum over units: the search finds the plan for which it is least, with prefetch costing no memory. The best w of ten gives
the bound. What is gathered first and reduced last (root, embedding) nothing hides at any depth. Nothing is run; times are rooflines of
presets.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, Python looks only in its folder

from hf_osdp.planner.cost import timing
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import GIB
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.quantities import format_seconds
from hf_osdp.tracing.describe import describe

WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
GPT2 = GPT2Config(n_layer=48, n_embd=1536, n_head=16)
LLAMA = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
    max_position_embeddings=8192,
)  # fmt: skip
CASES = (
    ("GPT-2 48 x 1536", GPT2, 1024, "h100", 1, 8), ("GPT-2 48 x 1536", GPT2, 1024, "rtx-4090", 1, 16),
    ("GPT-2 48 x 1536", GPT2, 1024, "a100-80", 2, 8), ("Llama-3-8B", LLAMA, 4096, "a100-80", 1, 80),
    ("Llama-3-8B", LLAMA, 4096, "h100", 1, 80), ("Llama-3-8B", LLAMA, 2048, "rtx-4090", 1, 24),
)  # fmt: skip
"""Model, its configuration, tokens, device, nodes of 8 devices, limit in GiB."""
JOB = TrainingJob(global_batch_size=64, precision=Precision.named("bf16"), offload_activations=False)
"""Activations stay on the device: their way to the host and back is not FSDP2's to prefetch."""


def main() -> None:
    """Print the table."""
    table = Table(title="Seconds of a step of 64 samples in bf16: plans, and a bound for every prefetch depth")
    for column in ("model", "devices", "limit", "plan", "no depth below", "gain at most"):
        table.add_column(column, justify="left" if column in ("model", "devices") else "right")
    for name, config, length, device, nodes, gib in CASES:
        hardware = preset(device, devices_per_node=8, nodes=nodes)
        described = _described(config, length, hardware.device.capability)
        problem = PlanningProblem(description=described, hardware=hardware, job=JOB, memory_limit_bytes=gib * GIB)
        planned = search(problem).time.step_s
        bound = max(_bound(problem, weight) for weight in WEIGHTS)
        row = (name, f"{nodes} x 8 {device}", f"{gib} GiB", format_seconds(planned), format_seconds(bound), f"{planned / bound - 1:.1%}")
        table.add_row(*row)
    Console(width=100).print(table)


def _described(config: PretrainedConfig, length: int, capability: tuple[int, int] | None) -> ModelDescription:
    """Describe a model without what the allocator's replay needs, so that plans are held against the limit by their estimate."""
    found = describe(config, sequence_length=length, device_type="cuda", compute_dtype=JOB.precision.compute, capability=capability)
    untraced = (s.each(lambda costs: replace(costs, allocations=None, offloaded_allocations=None)) for s in found.segments)
    return replace(found, segments=tuple(untraced), allocations=())


def _bound(problem: PlanningProblem, weight: float) -> float:
    def pooled(terms: object, layout: object, windows: timing.Windows, *others: object) -> timing.UnitTime:
        found = stock(terms, layout, windows, *others)  # type: ignore[arg-type]
        hides = windows != timing.Windows()
        return replace(found, exposed_s=weight * (found.communication_s - found.compute_s)) if hides else found

    stock = timing.unit_time
    with patch.object(timing, "unit_time", pooled):
        return search(problem).time.step_s


if __name__ == "__main__":
    main()
