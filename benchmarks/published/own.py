"""Compare steps that this project timed on an H100 with estimates from the preset alone, no block timed.

FSDP2 ran every unit there, in one process. A plan of one process has none any more, so the estimate is that of one of
two ranks whose links take no time and whose optimizer steps all parameters.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import transformers

from benchmarks.gpu_memory import MODELS, Model
from benchmarks.gpu_suite.beside import config_of
from benchmarks.gpu_suite.times import BLOCKS
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.cost.timing import estimate_time
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import DType, GatherSpan
from hf_osdp.planner.hardware import FSDP_OPERATORS, Link
from hf_osdp.planner.presets import preset
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.preparation.cache import describe_once

OPERATOR_S = 12.4e-6
"""As `measure_hardware` found it on that host (benchmarks/gpu_suite/results.md)."""
KINDS = {"plain autocast": (True, False), "FSDP2, freed": (False, True), "FSDP2, kept": (False, False)}
"""Whether one process runs under autocast, and whether blocks are freed after forward."""
BESIDE = {"GPT-2 medium": (78, 150, 112), "Llama 1B": (73, 115, 101), "BERT large": (71, 155, 119)}
"""Milliseconds of a step of each kind."""
KEPT = {
    "GPT-2": 129.5, "Llama, grouped queries": 128.2, "BERT": 130.3, "OPT": 63.4, "T5": 198.8, "ViT": 70.0,
    "Mixtral, experts": 64.4,
}  # fmt: skip
"""Milliseconds of a step of one kind of block after another."""


def own_table() -> str:
    """Return a line for each step."""
    cases: list[tuple[str, str, float, float]] = []
    for name, measured in BESIDE.items():
        for (kind, flags), measured_ms in zip(KINDS.items(), measured, strict=True):
            estimated_ms = _estimated_ms(config_of(MODELS[name]), MODELS[name], *flags)
            cases.append((name, kind, measured_ms, estimated_ms))
    for name, measured_ms in KEPT.items():
        model = BLOCKS[name]
        config = getattr(transformers, model.config)(**model.sizes, architectures=[model.architecture])
        cases.append((f"blocks of {name}", "FSDP2, kept", measured_ms, _estimated_ms(config, model, False, False)))
    lines = ["| model | step | measured | estimated | error |", "| --- | --- | ---: | ---: | ---: |"]
    lines += [
        f"| {name} | {kind} | {measured:.0f} ms | {found:.0f} ms | {found / measured - 1:+.0%} |"
        for name, kind, measured, found in cases
    ]
    errors = [abs(found / measured - 1) for *_, measured, found in cases]
    return "\n".join([*lines, "", f"Mean error {statistics.fmean(errors):.0%}, {max(errors):.0%} at worst."])


def _estimated_ms(config: Any, model: Model, autocast: bool, frees: bool) -> float:
    description = describe_once(
        build_on_meta(config), sequence_length=model.sequence_length, compute_dtype=DType.BFLOAT16, autocast=autocast,
        device_type="cuda", capability=(9, 0), recomputation=False,
    )  # fmt: skip
    ranks, at_once = 1 if autocast else 2, Link(latency_s=0.0, bytes_per_s=1e30, source="takes no time")
    hardware = replace(preset("h100"), devices_per_node=ranks, intra_node=at_once)
    hardware = replace(hardware, device=replace(hardware.device, operator_s=OPERATOR_S))
    hardware = hardware.running(FSDP_OPERATORS)
    precision = replace(Precision.named("bf16"), autocast=autocast)
    job = TrainingJob(global_batch_size=ranks * model.samples, precision=precision)
    layouts = [
        UnitLayout(shard_size=ranks, reshard_after_forward=frees and unit.span is GatherSpan.USE)
        for unit in description.units
    ]
    batch = Batch(micro_batch_size=model.samples, accumulation_steps=1)
    time = estimate_time(description, layouts, hardware, job, batch)
    return 1e3 * (time.step_s + (ranks - 1) * time.total("optimizer_s"))
