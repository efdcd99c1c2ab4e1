"""Plan problems by reached rates and by data sheets, and time both plans by the reached rates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import transformers

from hf_osdp.errors import InfeasibleError
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.hardware import GIB, Hardware
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.preparation.cache import describe_once
from hf_osdp.quantities import format_bytes, format_seconds

MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2 medium": lambda: _gpt2(24, 1024, 16),
    "GPT-2 XL": lambda: _gpt2(48, 1600, 25),
    "Qwen3-1.7B": lambda: transformers.Qwen3Config(
        num_hidden_layers=28, hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    ),
    "Llama-3-8B": lambda: transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, architectures=["LlamaForCausalLM"],
    ),
}  # fmt: skip
MACHINES = {
    "4 RTX 4090": ("rtx-4090", 1, 4),
    "2 x 4 RTX 3090": ("rtx-3090", 2, 4),
    "8 A6000": ("a6000", 1, 8),
    "8 A100-80": ("a100-80", 1, 8),
    "2 x 8 H100": ("h100", 2, 8),
}
SAMPLES_PER_DEVICE, LENGTH = 16, 1024
ABOVE_LEAST = 1.5
"""The limit: this multiple of the least memory, so that memory decides, but at most the device's."""


def _gpt2(layers: int, width: int, heads: int) -> Any:
    return transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=heads, architectures=["GPT2LMHeadModel"])


@cache
def _described(name: str) -> ModelDescription:
    """Return a model's description with flash attention, which all these devices run."""
    return describe_once(
        build_on_meta(MODELS[name]()), sequence_length=LENGTH, compute_dtype=DType.BFLOAT16, device_type="cuda",
        capability=(8, 0),
    )  # fmt: skip


def choice_table() -> str:
    """Return a line for each problem: the step of the plan by data sheets over that of the plan by reached rates."""
    lines = [
        "| model | machine | limit | plan by reached rates | plan by data sheets, timed likewise | times |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    gains = []
    for model in MODELS:
        for machine, (device, nodes, devices) in MACHINES.items():
            reached, sheet = (
                preset(device, nodes=nodes, devices_per_node=devices, data_sheet=flag) for flag in (False, True)
            )
            row = _compared(_described(model), reached, sheet)
            if row is None:
                lines.append(f"| {model} | {machine} | - | does not fit | - | - |")
                continue
            limit, best_s, other_s = row
            gains.append(other_s / best_s)
            lines.append(
                f"| {model} | {machine} | {format_bytes(limit)} | {format_seconds(best_s)} |"
                f" {format_seconds(other_s)} | {other_s / best_s:.3f} |"
            )
    changed = sum(gain > 1.001 for gain in gains)
    worst = f"by data sheets a step takes up to {max(gains):.2f} times as long"
    return "\n".join([*lines, "", f"{changed} of {len(gains)} plans differ in time; {worst}."])


def _compared(description: ModelDescription, reached: Hardware, sheet: Hardware) -> tuple[int, float, float] | None:
    """Return the limit and the seconds of both plans by the reached rates; None if no plan fits."""
    job = TrainingJob(global_batch_size=SAMPLES_PER_DEVICE * reached.world_size, precision=Precision.named("bf16"))

    def problem(hardware: Hardware, limit: int) -> PlanningProblem:
        return PlanningProblem(description=description, hardware=hardware, job=job, memory_limit_bytes=limit)

    def seconds(plan: Plan) -> float:
        time = estimate_plan(plan, description, job, reached).time
        assert time is not None
        return time.step_s

    try:
        least = least_memory(problem(reached, reached.device.memory_bytes))
        limit = min(reached.device.memory_bytes, round(ABOVE_LEAST * least / GIB) * GIB)
        plans = [search(problem(hardware, limit)).plan for hardware in (reached, sheet)]
    except InfeasibleError:
        return None
    best_s, other_s = map(seconds, plans)
    return limit, best_s, other_s
