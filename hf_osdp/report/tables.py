"""Tables for a terminal: the plan, the strategies side by side, the estimate beside the measurement."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.table import Table

from ..planner.allocator.replay import Reserved
from ..planner.cost.evaluate import PlanEstimate
from ..planner.cost.memory import Moment
from ..planner.description import ModelDescription, UnitDescription
from ..planner.hardware import Hardware
from ..planner.plan import Plan
from ..planner.search.search import StrategyResult
from ..quantities import format_bytes, format_count, format_seconds

_NUMBER = re.compile(r"\d+")
_WIDTH = 100
"""Columns that tables are read at."""
_NAMES_WIDTH = 46
"""Columns that units and classes may take on one line: what layout and figures leave of 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Neighbouring units of one class with one layout."""

    units: tuple[int, ...]
    """Indices into the description."""
    label: str
    class_name: str
    layout: str


def plan_rows(plan: Plan, description: ModelDescription) -> tuple[PlanRow, ...]:
    """The plan's units, equal neighbours taken together: `transformer.h.0-5`."""

    def kind(index: int) -> tuple[str, str, int]:
        unit = description.units[index]
        return unit.class_name, plan.decision(unit.fqn).describe(plan.world_size), unit.numel

    rows = []
    for (class_name, layout, _), indices in groupby(range(len(description.units)), key=kind):
        units = tuple(indices)
        label = _range_label([description.units[i] for i in units])
        rows.append(PlanRow(units=units, label=label, class_name=class_name, layout=layout))
    return tuple(rows)


def plan_table(plan: Plan, description: ModelDescription, estimate: PlanEstimate) -> Table:
    """What each unit does, the memory that it holds on each device, and the seconds that it takes in a step.

    `held` is parameters, gradients and optimizer states; `exposed` is communication that compute waits for.
    """
    table = bare_table(
        f"OSDP plan {plan.fingerprint}: {plan.world_size} x {plan.micro_batch_size} samples x {plan.accumulation_steps} micro-steps"
        f" = {plan.global_batch_size} a step"
    )
    rows = plan_rows(plan, description)
    names = [(f"{row.label} ({len(row.units)})" if len(row.units) > 1 else row.label, row.class_name) for row in rows]
    short = sum(max(map(len, column)) for column in zip(*names, strict=True)) <= _NAMES_WIDTH
    for name in ("units", "class"):
        table.add_column(name, no_wrap=short, overflow="fold")
    table.add_column("layout", min_width=len("replicate,"))
    for name in ("params", "held", "compute", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, (label, class_name) in zip(rows, names, strict=True):
        table.add_row(label, class_name, row.layout, *_row_values(row, description, estimate))
    return table


def plan_caption(plan: Plan, estimate: PlanEstimate, hardware: Hardware | None = None) -> tuple[str, ...]:
    """Where the peak falls and what a step takes, as lines of text; the plan's peak holds what no tensor can have."""
    peak = estimate.memory.peak
    outside = {} if hardware is None else estimate.memory.outside(hardware)
    kept = "".join(f", {name} {format_bytes(nbytes)}" for name, nbytes in outside.items() if nbytes)
    limit = f" of {format_bytes(plan.memory_limit_bytes)}" if plan.memory_limit_bytes else ""
    if plan.memory_limit_bytes and hardware is not None and hardware.free_share:
        limit += f" (margin {format_bytes(plan.memory_limit_bytes - hardware.room_bytes(plan.memory_limit_bytes))})"
    lines = [
        f"Peak {format_bytes(plan.peak_bytes or peak.total_bytes)}{limit} in {peak.phase} of {peak.unit}: {describe_moment(peak)}{kept}."
    ]
    if estimate.reserved is not None:
        lines.append(reserved_text(estimate.reserved))
    if estimate.memory.host_bytes:
        lines.append(f"On the host: {format_bytes(estimate.memory.host_bytes)} of each rank.")
    if estimate.time is not None:
        time = estimate.time
        terms = (("compute", "compute_s"), ("exposed communication", "exposed_s"), ("copies", "copy_s"), ("optimizer", "optimizer_s"))
        parts = ", ".join(f"{name} {format_seconds(time.total(term))}" for name, term in terms)
        rate = f", {plan.global_batch_size / time.step_s:.1f} samples/s" if time.step_s else ""
        lines.append(f"Step {format_seconds(time.step_s)}{rate}: {parts}.")
    if not plan.split.is_none:
        lines.append(f"The model is split: {plan.split.describe()}.")
    if plan.accumulation_steps > 1:
        lines.append(f"Gradients are reduced {_when_reduced(plan)}.")
    if plan.strategy == "osdp" and plan.proven_optimal:
        lines.append(
            "Proven: no plan of the search space is faster under this limit, by the cost model (docs/planner.md has its equations)."
        )
    return tuple(lines)


def reserved_text(reserved: Reserved) -> str:
    """What torch's allocator takes for the tensors' peak, in a line."""
    allocated = reserved.peak_allocated_bytes
    text = f"Peak allocated / reserved by torch: {format_bytes(allocated)} / {format_bytes(reserved.peak_reserved_bytes)}"
    if not reserved.fits:
        text += "; more than the limit, however often the cache is emptied"
    elif reserved.alloc_retries:
        text += f"; more than the limit: the cache is emptied {reserved.alloc_retries} times in two steps"
    return text + ("." if reserved.traced else "; what was not traced counts as one tensor a term.")


def _when_reduced(plan: Plan) -> str:
    held = sum(not unit.reduce_every_micro_step for unit in plan.units)
    if not held:
        return "in every micro-step"
    if held < len(plan.units):
        return f"in every micro-step, but for {held} of {len(plan.units)} units, whose whole gradients are held and reduced once a step"
    return "once a step; whole gradients are held until then"


def comparison_table(rows: Sequence[StrategyResult], memory_limit_bytes: int) -> Table:
    """Each strategy at its own best batch."""
    table = bare_table(f"Strategies at their own best batch, estimated, limit {format_bytes(memory_limit_bytes)}")
    table.add_column("strategy", no_wrap=True)
    for name in ("batch", "peak", "step", "samples/s", "osdp gain"):
        table.add_column(name, justify="right", no_wrap=True)
    best = next((row.result.plan.samples_per_s for row in rows if row.strategy.value == "osdp" and row.result), None)
    for row in rows:
        if row.result is None:
            table.add_row(row.strategy.value, "-", row.reason, "-", "-", "-")
            continue
        plan = row.result.plan
        faster = f"{best / plan.samples_per_s:.2f}x" if best and row.strategy.value != "osdp" else "-"
        table.add_row(
            row.strategy.value, f"{plan.micro_batch_size} x {plan.accumulation_steps}", format_bytes(plan.peak_bytes),
            format_seconds(plan.step_s), f"{plan.samples_per_s:.1f}", faster,
        )  # fmt: skip
    return table


def outcome_table(
    *,
    estimated_peak: int | None,
    measured_peak: int | None,
    estimated_step_s: float | None,
    measured_step_s: float | None,
    estimated_reserved: int | None = None,
    measured_reserved: int | None = None,
    collectives: Sequence[tuple[str, float | None, float | None]] = (),
) -> Table:
    """Estimated beside measured; bytes and seconds on the slowest and fullest rank.

    The row of what the allocator reserved is there where either is known. `collectives` has a name, seconds of a step estimated and
    seconds measured for each kind.
    """
    table = bare_table("Estimated beside measured")
    for name in ("", "estimated", "measured", "estimate / measured"):
        table.add_column(name, justify="right" if name else "left")
    for name, estimated, measured, text in (
        ("peak memory", estimated_peak, measured_peak, format_bytes),
        *([("peak reserved", estimated_reserved, measured_reserved, format_bytes)] if estimated_reserved or measured_reserved else ()),
        ("step time", estimated_step_s, measured_step_s, format_seconds),
        *((name, estimated, measured, format_seconds) for name, estimated, measured in collectives),
    ):
        ratio = f"{estimated / measured:.2f}" if estimated and measured else "-"
        table.add_row(name, *("-" if value is None else text(value) for value in (estimated, measured)), ratio)
    return table


def describe_moment(moment: Moment) -> str:
    """The kinds of bytes at a moment, the largest first."""
    parts = sorted(((getattr(moment.breakdown, name), name) for name in moment.breakdown.__slots__), reverse=True)
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(nbytes)}" for nbytes, name in parts if nbytes)


def _row_values(row: PlanRow, description: ModelDescription, estimate: PlanEstimate) -> Iterator[str]:
    units = [estimate.units[i] for i in row.units]
    yield format_count(sum(description.units[i].numel for i in row.units))
    yield format_bytes(sum(u.held + u.gradients_after for u in units))
    for term in ("compute_s", "exposed_s"):
        yield "-" if estimate.time is None else format_seconds(sum(getattr(estimate.time.units[i], term) for i in row.units))


def _range_label(units: Sequence[UnitDescription]) -> str:
    first, last = units[0].label, units[-1].label
    if len(units) == 1:
        return first
    starts, ends = _NUMBER.findall(first), _NUMBER.findall(last)
    if _NUMBER.sub("#", first) != _NUMBER.sub("#", last) or not ends:
        return f"{first} ... {last}"
    changed = next(i for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if a != b)
    match = list(_NUMBER.finditer(first))[changed]
    return f"{first[: match.end()]}-{ends[changed]}{first[match.end() :]}"


def bare_table(title: str) -> Table:
    """A table with nothing but a rule under its head."""
    width = min(len(title), _WIDTH)  # or a narrow table would break its title
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), min_width=width)
