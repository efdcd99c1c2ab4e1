"""Reports as plain values, in bytes and seconds: what is known of a plan, of strategies, or of a run. Tables, charts,
the page and JSON files are all made from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

from ..planner.cost.evaluate import PlanEstimate
from ..planner.cost.timing import ACTIVATIONS
from ..planner.description import ModelDescription, shown_name
from ..planner.files import plain
from ..planner.hardware import Hardware
from ..planner.plan import Plan
from ..planner.presets import peak_rate
from ..planner.problem import PlanningProblem
from ..planner.search.compare import StrategyResult
from ..versions import package_versions
from .plan_file import PlanInputs, plan_file_content

REPORT_FILE = "osdp_report.json"
Content = dict[str, Any]
TIME_TERMS = ("compute_s", "communication_s", "exposed_s", "copy_s", "optimizer_s", "update_gathers_s", "waits_s")


def report_content(
    plan: Plan,
    inputs: PlanInputs,
    *,
    planning_s: float | None = None,
    comparison: Sequence[StrategyResult] | None = None,
    measured: Content | None = None,
) -> Content:
    """Return the report of a plan or of a run, with all inputs of `hf-osdp explain`.

    The plan must be for the inputs' description (`Plan.check`). `comparison` holds other strategies, if any,
    `measured` the measured memory and time, and `planning_s` the seconds of planning.
    """
    description, hardware = inputs.description, inputs.hardware
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": package_versions(),
        **plan_file_content(plan, inputs),
        "model": {
            "name": description.model_name,
            "class": description.model_class,
            "parameters": description.numel,
            "trained_parameters": sum(unit.trainable_numel for unit in description.units),
            "block_classes": list(description.block_classes),
            "sequence_length": description.sequence_length,
            "trace": description.trace,
        },
        "hardware": None if hardware is None else _hardware(hardware),
        "estimated": _estimated(plan, inputs),
        "strategies": None if comparison is None else list(map(strategy_content, comparison)),
        "planning_s": planning_s,
        "measured": measured,
    }


def comparison_content(problem: PlanningProblem, rows: Sequence[StrategyResult]) -> Content:
    """Return strategies under a problem's limit, of which `room_bytes` are without the margin."""
    return {
        "model": problem.description.model_name,
        "hardware": problem.hardware.summary,
        "memory_limit_bytes": problem.memory_limit_bytes,
        "room_bytes": problem.room_bytes,
        "strategies": list(map(strategy_content, rows)),
    }


def strategy_content(row: StrategyResult) -> Content:
    """Return a strategy's best plan in figures, or the reason why it has none."""
    if row.result is None:
        return {"strategy": row.label, **_picked(row, "reason", "least_peak_bytes")}
    return {"strategy": row.label, **outcome_content(row.result.plan)}


def outcome_content(plan: Plan) -> Content:
    """Return the batch, peak and time of a plan from the search."""
    return _picked(plan, "micro_batch_size", "accumulation_steps", "peak_bytes", "step_s", "samples_per_s")


def _hardware(hardware: Hardware) -> Content:
    return {
        **_picked(hardware, "summary", "nodes", "devices_per_node"),
        "backend": hardware.backend.value,
        "margin": hardware.free_share,
        "margin_bytes": hardware.free_bytes,
        "beside_bytes": hardware.beside_bytes,
        **plain(hardware.device),
        "host": plain(hardware.host),
        "collectives": plain(hardware.timings),
    }


def _estimated(plan: Plan, inputs: PlanInputs) -> Content:
    estimate, hardware, limit = inputs.estimate(plan), inputs.hardware, plan.memory_limit_bytes
    memory, time, peak = estimate.memory, estimate.time, estimate.memory.peak
    return {
        "peak_bytes": peak.total_bytes,
        "peak_phase": peak.phase,
        "peak_unit": peak.unit,
        "peak_breakdown": asdict(peak.breakdown),
        "outside": {} if hardware is None else memory.outside(hardware),
        "margin_bytes": 0 if hardware is None or limit is None else limit - hardware.room_bytes(limit),
        "host_bytes": memory.host_bytes,
        "step_s": None if time is None else time.step_s,
        "expected": _expected(plan, inputs),
        "step_breakdown": None if time is None else {term: time.total(term) for term in TIME_TERMS},
        "utilisation": _utilisation(plan, inputs),
        "streams": _streams(estimate),
        "units": _rows(plan, inputs.description, estimate),
        "phases": [asdict(phase) for phase in inputs.phases(plan, estimate)],
        "moments": [
            {
                "phase": moment.phase,
                "unit": moment.unit,
                "bytes": {kind: nbytes for kind, nbytes in asdict(moment.breakdown).items() if nbytes},
            }
            for moment in memory.moments
        ],
    }


def _expected(plan: Plan, inputs: PlanInputs) -> Content | None:
    """Return the micro-steps of an expected step, the tokens of one, padding included, and those of a sample; None if
    all samples count as the longest.
    """
    if (lengths := inputs.job.lengths) is None:
        return None
    batch = lengths.expected(plan.batch, plan.world_size)
    tokens = batch.micro_batch_size * lengths.longest
    return {"micro_steps": batch.accumulation_steps, "tokens": tokens, "sample_tokens": lengths.mean}


def _utilisation(plan: Plan, inputs: PlanInputs) -> Content | None:
    """Return the share of the devices' peak that the model's own operations reach, without those that are computed
    again (model FLOPs utilisation), and that peak; None if it is not known.
    """
    description, hardware = inputs.description, inputs.hardware
    peak = None if hardware is None else peak_rate(hardware.device, description.compute_dtype)
    if peak is None or not plan.step_s:
        return None
    phases = (phase for segment in description.segments for phase in (segment.forward, segment.backward))
    batch = plan.batch if inputs.job.lengths is None else inputs.job.lengths.expected(plan.batch, plan.world_size)
    flops = batch.accumulation_steps * sum(phase.flops(batch.micro_batch_size) for phase in phases)
    share = flops / plan.step_s / peak
    return {"share": share, "flops_per_s": peak, "dtype": description.compute_dtype.value}


def _streams(estimate: PlanEstimate) -> list[Content]:
    """Return seconds of a step by kind of work, whose `exposed_s` add up to the step; collectives in two stages count
    as those in one. Without hardware there are none.
    """
    time = estimate.time
    if time is None or estimate.streams is None:
        return []
    waits_s, compute_s = time.total("waits_s"), time.total("compute_s")
    copies, optimizer = ((time.total(term),) * 2 for term in ("copy_s", "optimizer_s"))
    compute = {"compute": (compute_s - waits_s,) * 2} | ({"waits for the CPU": (waits_s,) * 2} if waits_s else {})
    named = {**compute, **dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), (0.0, 0.0))}
    for stream, (more_s, more_exposed_s) in estimate.streams.items():
        if more_s or stream != ACTIVATIONS:
            name = str.removeprefix(stream, "two_stage_").replace("_", "-")
            total_s, exposed_s = named.get(name, (0.0, 0.0))
            named[name] = total_s + more_s, exposed_s + more_exposed_s
    named |= {"copies": copies, "optimizer": optimizer}
    return [
        {"name": name, "total_s": total, "exposed_s": exposed, "hidden_s": max(0.0, total - exposed)}
        for name, (total, exposed) in named.items()
    ]


def unit_rows(plan: Plan, description: ModelDescription) -> list[tuple[int, ...]]:
    """Return the units as indices, with neighbours of one class, size and layout in one row."""

    def kind(index: int) -> tuple[str, str, int]:
        unit = description.units[index]
        return unit.class_name, plan.decision(unit.fqn).describe(plan.world_size), unit.numel

    return [tuple(indices) for _, indices in groupby(range(len(description.units)), key=kind)]


def _rows(plan: Plan, description: ModelDescription, estimate: PlanEstimate) -> list[Content]:
    """Return each row of units with its layout, bytes on one device and seconds of a step.

    `held` is parameters, gradients and optimizer states; `host` is the host's memory, including activations that are
    offloaded until backward; `kept` are gathered parameters between forward and backward, or copies of replicas, and
    `while it runs` is the most that one unit of the row gathers and copies.
    """
    memory, time = estimate.memory, estimate.time
    saved, host = [0] * len(memory.units), [unit.host for unit in memory.units]
    for segment, terms in zip(description.segments, memory.segments, strict=True):
        saved[segment.unit] += max(0, terms.saved)
        host[segment.unit] += terms.host

    def row(indices: tuple[int, ...]) -> Content:
        units, terms = [description.units[i] for i in indices], [memory.units[i] for i in indices]
        decision = plan.decision(units[0].fqn)
        policy, times = decision.activations.recomputation, [] if time is None else [time.units[i] for i in indices]
        return {
            "units": [unit.fqn for unit in units],
            "label": _label([unit.fqn for unit in units]),
            "class": units[0].class_name,
            "layout": decision.describe(plan.world_size),
            "recomputation": None if policy is None else policy.describe(),
            "parameters": sum(unit.numel for unit in units),
            "bytes": {
                "held": sum(one.held - one.copies + max(0, one.gradients_after) for one in terms),
                "host": sum(host[i] for i in indices),
                "parameters": sum(one.parameters for one in terms),
                "optimizer": sum(one.optimizer for one in terms),
                "gradients": sum(one.gradients_held + one.gradients_after for one in terms),
                "activations": sum(saved[i] for i in indices),
                "kept": sum(one.kept + one.copies for one in terms),
                "while it runs": max(one.gathered - one.kept + one.gather_buffer + one.copy_out for one in terms),
            },
            "seconds": {term: float(sum(getattr(one, term) for one in times)) for term in TIME_TERMS} if times else {},
        }

    return [row(indices) for indices in unit_rows(plan, description)]


def _label(units: Sequence[str]) -> str:
    """Return the name of a row: `transformer.h.0-5 (6)`."""
    label = shown_name("+".join(units))
    if len(units) == 1:
        return label
    first, *_, last = modules = "+".join(units).split("+")
    if "+" in label:
        label = f"{shown_name(first)} ... {shown_name(last)}"
    return f"{label} ({len(modules)})"


def _picked(value: object, *names: str) -> Content:
    return {name: getattr(value, name) for name in names}
