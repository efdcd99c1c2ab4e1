"""Compare the step time of plans with a lower bound for every prefetch depth.

    python benchmarks/prefetch_depth.py

FSDP2 gathers one unit ahead. With deeper prefetch, a unit's communication can overlap with any compute of its pass
instead of only its neighbour's, and more gathered units are held. At any depth, there are two lower bounds for
forward: its compute plus what cannot be hidden (the first gather, and the part of the second that is longer than the
compute before it), and its communication plus the last unit's compute, which is after every gather. There are two for
backward: its compute plus the first unit's reduction, which comes last, and its communication. So for all weights f
and b between 0 and 1, a step takes at least the sum over units of

    (1 - f) forward's first bound + f its second + (1 - b) backward's first bound + b its second + copies + update

and the search finds the plan with the least sum, as if prefetch cost no memory. The bound is the highest over a few
weights. The gather of a unit that is kept for the whole step (tied embedding) is never hidden. Nothing is run; times
are roofline estimates of presets.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.table import Table
from transformers import GPT2Config

sys.path.insert(0, str(Path(__file__).parents[1]))  # Python adds only the script's own folder

from hf_osdp.modeling.catalogue import catalogue
from hf_osdp.planner.cost import timing
from hf_osdp.planner.decision import UnitLayout
from hf_osdp.planner.description import GatherSpan
from hf_osdp.planner.hardware import GIB
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import _searched, search
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.quantities import format_seconds
from hf_osdp.tracing.describe import describe

WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
GPT2 = GPT2Config(n_layer=48, n_embd=1536, n_head=16)
LLAMA_BF16 = catalogue()["meta-llama/Meta-Llama-3-8B"].config
"""Configuration with weights, gradients and states in bf16; the others use float32."""
LLAMA = copy.deepcopy(LLAMA_BF16)
LLAMA.dtype = None
CASES = (
    ("GPT-2 48 x 1536", GPT2, 1024, "h100", 1, 8), ("GPT-2 48 x 1536", GPT2, 1024, "rtx-4090", 1, 16),
    ("GPT-2 48 x 1536", GPT2, 1024, "a100-80", 2, 8), ("Llama-3-8B", LLAMA, 4096, "a100-80", 1, 80),
    ("Llama-3-8B", LLAMA, 4096, "h100", 1, 80), ("Llama-3-8B", LLAMA, 2048, "rtx-4090", 1, 24),
    ("the same in bf16", LLAMA_BF16, 2048, "rtx-4090", 1, 24),
)  # fmt: skip
"""Model, configuration, tokens, device, nodes of 8 devices, limit in GiB."""
JOB = TrainingJob(global_batch_size=64, precision=Precision.named("bf16"), offload_activations=False)
"""Activations stay on the device, because FSDP2 does not prefetch their copies from the host."""


def main() -> None:
    """Print the table."""
    table = Table(title="Seconds of a step of 64 samples in bf16: plans, and a bound for every prefetch depth")
    for column in ("model", "devices", "limit", "plan", "no depth below", "gain at most"):
        table.add_column(column, justify="left" if column in ("model", "devices") else "right")
    for name, config, length, device, nodes, gib in CASES:
        hardware = preset(device, devices_per_node=8, nodes=nodes)
        described = describe(
            config,
            sequence_length=length,
            device_type="cuda",
            compute_dtype=JOB.precision.compute,
            capability=hardware.device.capability,
        )
        problem = PlanningProblem(description=described, hardware=hardware, job=JOB, memory_limit_bytes=gib * GIB)
        planned = search(problem).time.step_s
        bound = _best_bound(problem)
        row = (
            name,
            f"{nodes} x 8 {device}",
            f"{gib} GiB",
            format_seconds(planned),
            format_seconds(bound),
            f"{planned / bound - 1:.1%}",
        )
        table.add_row(*row)
    Console(width=100).print(table)


def _best_bound(problem: PlanningProblem) -> float:
    """Return the highest bound found, optimising one weight after the other."""
    forward = max(WEIGHTS, key=lambda weight: _bound(problem, weight, 0.0))
    backward = max(WEIGHTS, key=lambda weight: _bound(problem, forward, weight))
    return max(_bound(problem, weight, backward) for weight in WEIGHTS)


def _bound(problem: PlanningProblem, forward: float, backward: float) -> float:
    description, stock = problem.description, timing.UnitTimer.__call__
    freed = [s.unit for s in description.segments if description.units[s.unit].span is GatherSpan.USE]

    def pooled(timer: timing.UnitTimer, index: int, layout: UnitLayout) -> timing.UnitTime:
        found, (compute, windows) = stock(timer, index, layout), timer.work(layout)
        if index not in freed:
            return found
        batch, window, terms = timer._batch, windows[index], timer.terms(index, layout)
        own_s, gather_s = compute[index] - window.backward, terms.gather_forward
        hidden_by_none = max(0.0, gather_s - window.forward) if index in freed[:2] else 0.0
        less_s = 0.0 if index == freed[-1] else own_s
        ahead_s = batch.accumulation_steps * ((1 - forward) * hidden_by_none + forward * (gather_s - less_s))
        reduce_s = batch.reduce_scatters(layout) * terms.reduce_scatter + terms.all_reduce
        own_s = batch.accumulation_steps * window.backward
        left_s = max(0.0, reduce_s - own_s) if index == freed[0] else 0.0
        back_s = (1 - backward) * left_s + backward * (
            batch.accumulation_steps * terms.gather_backward + reduce_s - own_s
        )
        return replace(found, exposed_s=ahead_s + back_s)

    with patch.object(timing.UnitTimer, "__call__", pooled):
        _searched.cache_clear()
        step_s = search(problem).time.step_s
    _searched.cache_clear()
    return step_s


if __name__ == "__main__":
    main()
