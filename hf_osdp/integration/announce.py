"""What a person sees of a run, on rank 0: the plan before it, the estimate beside the measurement after it."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from ..quantities import format_bytes, format_seconds
from .planning import PlannedRun

REPORT_FILE = "osdp_report.json"


def announce_plan(run: PlannedRun, *, is_rank_zero: bool) -> None:
    """Print the plan, with the other strategies beside it where they were estimated."""
    if not is_rank_zero:
        return
    plan = run.plan
    estimate = f", estimated {format_bytes(plan.peak_bytes)} and {format_seconds(plan.step_s)} a step" if plan.step_s else ""
    print(
        f"OSDP plan {plan.fingerprint}: {plan.strategy}, {plan.micro_batch_size} samples x {plan.accumulation_steps} micro-steps"
        f" on {plan.world_size} processes{estimate}",
        flush=True,
    )


def announce_result(run: PlannedRun, measured: Any, *, output_dir: str | Path, is_rank_zero: bool) -> None:
    """Print estimated beside measured peak and step time, and write `osdp_report.json`.

    Args:
        run: what was planned.
        measured: summary of the step meter.
        output_dir: an existing folder.
        is_rank_zero: whether this process reports.
    """
    if not is_rank_zero:
        return
    content = {"plan": json.loads(run.plan.to_json()), "measured": asdict(measured) if is_dataclass(measured) else measured}
    (Path(output_dir) / REPORT_FILE).write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
