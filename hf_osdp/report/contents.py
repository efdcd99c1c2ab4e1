"""What the tables say, as plain values for machines: bytes and seconds throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ..planner.files import plain
from ..planner.hardware import Hardware
from ..planner.search.search import SearchResult, StrategyResult
from ..planner.search.what_if import Answer
from .explain import Alternative, Explanation
from .explain_tables import layout_text, layouts_text
from .run_report import strategy_content
from .tables import plan_rows

_TIME_TERMS = ("compute_s", "communication_s", "exposed_s", "copy_s", "optimizer_s")


def explanation_content(explanation: Explanation) -> dict:
    """An explanation: the peak, every moment, the streams, rows with their alternatives, what binds."""
    plan, estimate = explanation.plan, explanation.estimate
    peak = estimate.memory.peak
    return {
        "fingerprint": plan.fingerprint,
        "model": plan.model_name,
        "hardware": plan.hardware,
        "strategy": plan.strategy,
        "batch": batch_content(plan),
        "memory_limit_bytes": plan.memory_limit_bytes,
        "margin_bytes": explanation.margin_bytes,
        "reserved_bytes": explanation.outside_bytes,
        "communicators": estimate.memory.communicators,
        "peak": {**plain(peak), "total_bytes": peak.total_bytes + explanation.outside_bytes},
        "moments": plain(estimate.memory.moments),
        "step_s": None if estimate.time is None else estimate.time.step_s,
        "streams": [{**plain(stream), "hidden_s": stream.hidden_s} for stream in explanation.streams],
        "rows": _rows(explanation),
        "binds": plain(explanation.binding),
    }


def _rows(explanation: Explanation) -> list[dict]:
    plan, estimate = explanation.plan, explanation.estimate
    reasons = {reason.row.units: reason for reason in explanation.reasons}
    rows = []
    for row in plan_rows(plan, explanation.description):
        reason = reasons.get(row.units)
        times = None if estimate.time is None else [estimate.time.units[i] for i in row.units]
        rows.append({
            "units": [explanation.description.units[i].fqn for i in row.units],
            "class": row.class_name,
            "layout": row.layout,
            "bytes": {name: sum(getattr(estimate.units[i], name) for i in row.units) for name in estimate.units[0].__slots__},
            "seconds": None if times is None else {term: sum(getattr(time, term) for time in times) for term in _TIME_TERMS},
            "quicker": None if reason is None else _alternative(reason.quicker, plan.world_size),
            "next_fitting": None if reason is None else _alternative(reason.next_fitting, plan.world_size),
        })  # fmt: skip
    return rows


def _alternative(other: Alternative | None, world_size: int) -> dict | None:
    if other is None:
        return None
    return {"layout": layout_text(other.choice, world_size), **asdict(other)}


def batch_content(plan) -> dict:
    """The batch side of a plan."""
    names = ("world_size", "micro_batch_size", "accumulation_steps", "global_batch_size", "sequence_length")
    return {name: getattr(plan, name) for name in names}


def comparison_content(hardware: Hardware, memory_limit_bytes: int, rows: Sequence[StrategyResult], front: Sequence[SearchResult]) -> dict:
    """Strategies side by side, and the Pareto front."""
    return {
        "hardware": hardware.summary,
        "memory_limit_bytes": memory_limit_bytes,
        "strategies": [strategy_content(row) for row in rows],
        "frontier": [result_content(result) for result in front],
    }


def result_content(result: SearchResult) -> dict:
    """A search result in short."""
    plan = result.plan
    return {
        **batch_content(plan), "peak_bytes": plan.peak_bytes, "step_s": plan.step_s, "samples_per_s": plan.samples_per_s,
        "layouts": layouts_text(plan), "fingerprint": plan.fingerprint,
    }  # fmt: skip


def answers_content(answers: Sequence[Answer]) -> dict:
    """Answers to what-if questions; the first is how things are."""
    return {
        "answers": [
            {
                "question": row.question,
                "change": row.change,
                "memory_limit_bytes": None if row.problem is None else row.problem.memory_limit_bytes,
                "parameters": None if row.problem is None else row.problem.description.numel,
                "result": None if row.result is None else result_content(row.result),
                "tokens_per_s": row.tokens_per_s,
                "reason": row.reason,
            }
            for row in answers
        ]
    }
