"""Contents of the tables as plain values for JSON, in bytes and seconds, including `osdp_report.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..planner.cost.evaluate import PlanEstimate
from ..planner.files import plain
from ..planner.hardware import Hardware
from ..planner.plan import Plan
from ..planner.search.compare import StrategyResult
from ..planner.search.search import SearchResult
from ..versions import package_versions
from .explain import Alternative, Explanation
from .plan_file import PlanInputs, write_json
from .tables import Answer, PlanRow, layouts_text, plan_rows

REPORT_FILE = "osdp_report.json"
Content = dict[str, Any]
_TIME_TERMS = ("compute_s", "communication_s", "exposed_s", "copy_s", "optimizer_s")
_OUTCOME = ("peak_bytes", "step_s", "samples_per_s")
_BATCH = ("world_size", "micro_batch_size", "accumulation_steps", "global_batch_size", "sequence_length")


def report_content(
    plan: Plan,
    inputs: PlanInputs,
    estimate: PlanEstimate,
    *,
    planning_s: float,
    comparison: Sequence[StrategyResult] | None = None,
    measured: Content | None = None,
    recalibration: Sequence[Content] = (),
) -> Content:
    """Return the report of a run, with all inputs of `hf-osdp explain`.

    `estimate` and `measured` are the estimated and measured memory and time, `comparison` the estimates of other
    strategies, if any, `recalibration` the plans that were tried before training, with their measurements, and
    `planning_s` the seconds of planning.
    """
    description = inputs.description
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "plan": json.loads(plan.to_json()),
        "model": {
            "name": description.model_name,
            "class": description.model_class,
            "parameters": description.numel,
            "block_classes": list(description.block_classes),
            "sequence_length": description.sequence_length,
            "trace": description.trace,
        },
        "hardware": None if inputs.hardware is None else _hardware(inputs.hardware),
        "estimated": _estimated(estimate),
        "recalibration": list(recalibration),
        "strategies": None if comparison is None else [_strategy(row) for row in comparison],
        "planning_s": planning_s,
        "measured": measured,
        "inputs": plain(inputs),
    }


def write_report(content: Content, output_dir: str | Path) -> Path:
    """Write the report atomically into an existing folder; return its path."""
    path = Path(output_dir) / REPORT_FILE
    write_json(content, path)
    return path


def _hardware(hardware: Hardware) -> Content:
    return {
        **_picked(hardware, "summary", "nodes", "devices_per_node"),
        "backend": hardware.backend.value,
        "margin": hardware.free_share,
        "margin_bytes": hardware.free_bytes,
        **plain(hardware.device),
        "collectives": plain(hardware.timings),
    }


def _estimated(estimate: PlanEstimate) -> Content:
    peak, time = estimate.memory.peak, estimate.time
    return {
        "peak_bytes": peak.total_bytes,
        "peak_phase": peak.phase,
        "peak_unit": peak.unit,
        "peak_breakdown": asdict(peak.breakdown),
        "step_s": None if time is None else time.step_s,
        "step_breakdown": None if time is None else {term: time.total(term) for term in _TIME_TERMS},
        "collectives": plain(estimate.collectives),
    }


def comparison_content(
    hardware: Hardware, memory_limit_bytes: int, rows: Sequence[StrategyResult], front: Sequence[SearchResult]
) -> Content:
    return {
        "hardware": hardware.summary,
        "memory_limit_bytes": memory_limit_bytes,
        "strategies": [_strategy(row) for row in rows],
        "frontier": [_result(result.plan) for result in front],
    }


def answers_content(answers: Sequence[Answer]) -> Content:
    """Return answers to what-if questions; the first answer is without a change."""
    return {
        "answers": [
            {
                **_picked(row, "question", "change", "tokens_per_s", "reason"),
                "memory_limit_bytes": None if row.problem is None else row.problem.memory_limit_bytes,
                "parameters": None if row.problem is None else row.problem.description.numel,
                "result": None if row.plan is None else _result(row.plan),
            }
            for row in answers
        ]
    }


def _strategy(row: StrategyResult) -> Content:
    """Return a summary of a strategy's best plan, or the reason why it has none."""
    if row.result is None:
        return {"strategy": row.label, **_picked(row, "reason", "least_peak_bytes")}
    return {"strategy": row.label, **_picked(row.result.plan, "micro_batch_size", "accumulation_steps", *_OUTCOME)}


def _result(plan: Plan) -> Content:
    return {**_picked(plan, *_BATCH, *_OUTCOME), "layouts": layouts_text(plan), "fingerprint": plan.fingerprint}


def explanation_content(explanation: Explanation) -> Content:
    """Return an explanation: the peak, every moment, the streams, rows with their alternatives, the bottleneck."""
    plan, estimate = explanation.plan, explanation.estimate
    peak = estimate.memory.peak
    return {
        **_picked(plan, "fingerprint", "hardware", "strategy", "memory_limit_bytes"),
        "model": plan.model_name,
        "batch": _picked(plan, *_BATCH),
        "margin_bytes": explanation.margin_bytes,
        "reserved_bytes": explanation.outside_bytes,
        "communicators": estimate.memory.communicators,
        "peak": {**plain(peak), "total_bytes": peak.total_bytes + explanation.outside_bytes},
        "moments": plain(estimate.memory.moments),
        "step_s": None if estimate.time is None else estimate.time.step_s,
        "streams": [{**plain(stream), "hidden_s": stream.hidden_s} for stream in explanation.streams],
        "rows": [_row(explanation, row) for row in plan_rows(plan, explanation.description)],
        "binds": plain(explanation.bottleneck),
    }


def _row(explanation: Explanation, row: PlanRow) -> Content:
    estimate, time = explanation.estimate, explanation.estimate.time
    reason = next((reason for reason in explanation.reasons if reason.row.units == row.units), None)

    def alternative(other: Alternative | None) -> Content | None:
        return (
            None if other is None else {"layout": other.choice.describe(explanation.plan.world_size), **asdict(other)}
        )

    return {
        "units": [explanation.description.units[i].fqn for i in row.units],
        "class": row.class_name,
        "layout": row.layout,
        "bytes": {
            name: sum(getattr(estimate.memory.units[i], name) for i in row.units)
            for name in asdict(estimate.memory.units[0])
        },
        "seconds": None if time is None else {term: row.seconds(time, term) for term in _TIME_TERMS},
        "quicker": None if reason is None else alternative(reason.faster),
        "next_fitting": None if reason is None else alternative(reason.next_fitting),
    }


def _picked(value: object, *names: str) -> Content:
    return {name: getattr(value, name) for name in names}
