"""The least memory of Llama-3-8B by optimizer and loss, and its best plan at 24 GB per device, estimated.

    python benchmarks/least_memory.py

Nothing is measured. Devices and links are presets from data sheets, and the host has 96 GiB and PCIe 4.0 x16 for each
device. Parameters, gradients and activations stay on the devices.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # Python adds only the script's own folder

from benchmarks.limits import LLAMA_3_8B
from hf_osdp import InfeasibleError, PlanningProblem, TrainingJob, describe, preset, search
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.hardware import Hardware, HostSpec
from hf_osdp.planner.optimizers import LOW_BIT
from hf_osdp.planner.search.search import least_memory
from hf_osdp.planner.split import ModelSplit
from hf_osdp.planner.training_job import OptimizerSpec, Precision
from hf_osdp.quantities import format_bytes

LENGTH, SAMPLES, LIMIT_BYTES, CHUNKS = 4096, 64, 24 * 2**30, 8
OPTIMIZERS = {
    "AdamW": (OptimizerSpec(), False),
    "AdamW, states on host": (OptimizerSpec(), True),
    "AdamW8bit": (LOW_BIT["adamw8bit"], False),
    "AdamW4bit": (LOW_BIT["adamw4bit"], False),
}
"""Optimizers by name, and whether their states are kept in the host's memory."""


HOST = HostSpec(
    memory_bytes=96 * 2**30, to_device_bytes_per_s=25e9, to_host_bytes_per_s=25e9, update_bytes_per_s=25e9,
    source="made up: 96 GiB and PCIe 4.0 x16 for each device",
)  # fmt: skip


def described(hardware: Hardware, chunks: int) -> ModelDescription:
    return describe(
        LLAMA_3_8B, sequence_length=LENGTH, device_type="cuda", compute_dtype=DType.BFLOAT16,
        split=ModelSplit(loss_chunks=chunks),
        capability=hardware.device.capability,
    )  # fmt: skip


def row(description: ModelDescription, hardware: Hardware, job: TrainingJob) -> tuple[str, str, str]:
    """Return the least memory, and the micro-batch and tokens per second at the limit."""
    job = replace(job, host_offload=False, offload_activations=False)
    problem = PlanningProblem(description=description, hardware=hardware, job=job, memory_limit_bytes=LIMIT_BYTES)
    batch, rate = "", "does not fit"
    try:
        plan = search(problem)
        batch, rate = str(plan.plan.micro_batch_size), f"{job.global_batch_size * LENGTH / plan.time.step_s:,.0f}"
    except InfeasibleError:
        pass
    return format_bytes(least_memory(problem)), batch, rate


def table_of(title: str, *names: str) -> Table:
    table = Table(title=title)
    for name in ("devices", *names, "least memory", "micro-batch", "tokens a second"):
        table.add_column(name, justify="left" if name in names else "right", no_wrap=True)
    return table


def main() -> None:
    precision = Precision.named("bf16")
    plain = table_of(
        f"Llama-3-8B, {LENGTH} tokens, bf16, RTX 4090 (24 GiB), {SAMPLES} samples a step", "logits", "optimizer"
    )
    for devices in (8, 2):
        hardware = replace(preset("rtx-4090", devices_per_node=devices), host=HOST)
        for chunks in (1, CHUNKS):
            description = described(hardware, chunks)
            for name, (optimizer, away) in OPTIMIZERS.items():
                job = TrainingJob(
                    global_batch_size=SAMPLES, precision=precision, optimizer=optimizer, offload_optimizer=away
                )
                plain.add_row(
                    str(devices),
                    "whole" if chunks == 1 else f"{chunks} chunks",
                    name,
                    *row(description, hardware, job),
                )
    Console(width=100).print(plain)


if __name__ == "__main__":
    main()
