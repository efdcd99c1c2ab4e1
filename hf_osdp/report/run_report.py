"""`osdp_report.json`: what was planned, what else could have been done, and what came of it."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..planner.cost.evaluate import PlanEstimate
from ..planner.description import ModelDescription
from ..planner.files import plain
from ..planner.hardware import Hardware
from ..planner.job import TrainingJob
from ..planner.plan import Plan
from ..planner.search.search import StrategyResult
from .plan_file import PlanInputs, write_json

REPORT_FILE = "osdp_report.json"
_PACKAGES = ("hf_osdp", "torch", "accelerate", "transformers")


def report_content(
    *,
    plan: Plan,
    description: ModelDescription,
    estimate: PlanEstimate,
    hardware: Hardware | None,
    comparison: Sequence[StrategyResult] | None,
    planning_s: float,
    measured: dict | None,
    job: TrainingJob | None = None,
    recalibration: Sequence[dict] = (),
) -> dict:
    """The report as plain values; bytes and seconds throughout.

    Args:
        plan: what ran.
        description: the model.
        estimate: what it was expected to need.
        hardware: what the estimate was made for, or None.
        comparison: the other strategies, where they were estimated.
        planning_s: seconds that planning took.
        measured: `steps`, `median_step_s`, `peak_bytes`, `reserved_bytes` and `collectives` of the run, or None.
        job: precision, optimizer, batch; with it the report holds all that `hf-osdp explain` needs.
        recalibration: plans that were tried before training, with what was seen.
    """
    peak = estimate.memory.peak
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "plan": {**json.loads(plan.to_json())},
        "model": {
            "name": description.model_name,
            "class": description.model_class,
            "parameters": description.numel,
            "block_classes": list(description.block_classes),
            "sequence_length": description.sequence_length,
            "trace": description.trace,
        },
        "hardware": None if hardware is None else _hardware(hardware),
        "estimated": {
            "peak_bytes": peak.total_bytes,
            "reserved": None if estimate.reserved is None else asdict(estimate.reserved),
            "peak_phase": peak.phase,
            "peak_unit": peak.unit,
            "peak_breakdown": asdict(peak.breakdown),
            "step_s": None if estimate.time is None else estimate.time.step_s,
            "step_breakdown": None if estimate.time is None else {
                term: estimate.time.total(term) for term in ("compute_s", "communication_s", "exposed_s", "copy_s", "optimizer_s")
            },
            "collectives": None if estimate.collectives is None else {
                collective.value: seconds for collective, seconds in estimate.collectives.items()
            },
        },
        "recalibration": list(recalibration),
        "strategies": None if comparison is None else [strategy_content(row) for row in comparison],
        "planning_s": planning_s,
        "measured": measured,
        **({} if job is None else {"inputs": plain(PlanInputs(description=description, job=job, hardware=hardware))}),
    }  # fmt: skip


def write_report(content: dict, output_dir: str | Path) -> Path:
    """Write the report into an existing folder, whole or not at all; returns its path."""
    path = Path(output_dir) / REPORT_FILE
    write_json(content, path)
    return path


def _hardware(hardware: Hardware) -> dict:
    device = hardware.device
    return {
        "summary": hardware.summary,
        "nodes": hardware.nodes,
        "devices_per_node": hardware.devices_per_node,
        "backend": hardware.backend.value,
        "memory_bytes": device.memory_bytes,
        "reserved_bytes": device.reserved_bytes,
        "communicator_bytes": device.communicator_bytes,
        "margin": hardware.free_share,
        "flops_per_s": {dtype.value: rate for dtype, rate in device.flops_per_s.items()},
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "operator_s": device.operator_s,
        "unit_s": device.unit_s,
        "source": device.source,
        "collectives": [
            {"collective": t.collective.value, "group_size": t.group_size, "latency_s": t.latency_s, "seconds_per_byte": t.seconds_per_byte}
            for t in hardware.timings
        ],
    }


def strategy_content(row: StrategyResult) -> dict:
    """A strategy's best plan in short, or why it has none."""
    if row.result is None:
        return {"strategy": row.strategy.value, "reason": row.reason, "least_peak_bytes": row.least_peak_bytes}
    plan = row.result.plan
    return {
        "strategy": row.strategy.value,
        "micro_batch_size": plan.micro_batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "peak_bytes": plan.peak_bytes,
        "step_s": plan.step_s,
        "samples_per_s": plan.samples_per_s,
    }


def package_versions() -> dict[str, str]:
    """Versions of Python, the system and the packages that estimates depend on."""
    found = {"python": sys.version.split()[0], "system": f"{platform.system()} {platform.machine()}"}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
