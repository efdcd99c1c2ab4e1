"""Tables of an explanation, for a terminal of 100 columns."""

from __future__ import annotations

from rich.table import Table

from ..planner.cost.timing import TimeEstimate
from ..planner.plan import Plan
from ..quantities import format_bytes, format_seconds
from .explain import Alternative, Bottleneck, BottleneckKind, Explanation, RowReason
from .tables import PlanRow, bytes_by_kind, make_table, plan_rows

_UNIT_TERMS = {
    "compute": "compute_s", "communication": "communication_s", "exposed": "exposed_s", "copies": "copy_s",
    "optimizer": "optimizer_s",
}  # fmt: skip


def explanation_tables(explanation: Explanation) -> list[Table | str]:
    """Return all tables of an explanation; without hardware there are no seconds and no alternatives."""
    parts: list[Table | str] = [peak_table(explanation), unit_bytes_table(explanation)]
    if (time := explanation.estimate.time) is None:
        return [*parts, "The hardware is not known, so there are no seconds and no alternatives."]
    parts += [stream_table(explanation), _unit_seconds_table(explanation, time), reason_table(explanation)]
    return (
        parts
        if explanation.bottleneck is None
        else [*parts, bottleneck_text(explanation.bottleneck, explanation.plan)]
    )


def peak_table(explanation: Explanation) -> Table:
    """Return the bytes at the peak by kind, largest first, with their share of the limit or of the peak."""
    peak, limit = explanation.estimate.memory.peak, explanation.plan.memory_limit_bytes
    total = peak.total_bytes + explanation.outside_bytes
    parts = [*bytes_by_kind(peak.breakdown).items(), *explanation.outside.items()]
    lines = [part for part in sorted(parts, key=lambda part: -part[1]) if part[1]]
    lines.append(("peak", total))
    if limit:
        lines.append(("left under the limit", limit - total - explanation.margin_bytes))
        lines += [("margin", explanation.margin_bytes)] if explanation.margin_bytes else []
    rows = [(name, format_bytes(nbytes), _share(nbytes, limit or total)) for name, nbytes in lines]
    figures = ["bytes", "of the limit" if limit else "of the peak"]
    return make_table(f"Bytes at the peak: {peak.phase} of {peak.unit}", rows, text=[""], figures=figures)


def stream_table(explanation: Explanation) -> Table:
    """Return seconds of a step by kind of work; hidden work runs while compute runs."""
    step = sum(stream.exposed_s for stream in explanation.streams)
    rows = [
        [s.name, *map(format_seconds, (s.total_s, s.hidden_s, s.exposed_s)), _share(s.exposed_s, step)]
        for s in explanation.streams
    ]
    figures = ["total", "hidden", "exposed", "of the step"]
    return make_table(f"Seconds of a step: {format_seconds(step)}", rows, text=[""], figures=figures)


def unit_bytes_table(explanation: Explanation) -> Table:
    """Return the bytes of each row of units on one device; `kept` are gathered parameters between forward and
    backward.

    `while it runs` is the most that one unit of the row gathers and copies.
    """
    plan, description, memory = explanation.plan, explanation.description, explanation.estimate.memory
    saved = [0] * len(description.units)
    for segment, terms in zip(description.segments, memory.segments, strict=True):
        saved[segment.unit] += max(0, terms.saved)

    def cells(row: PlanRow) -> list[str]:
        units = [memory.units[i] for i in row.units]
        figures = (
            sum(unit.parameters for unit in units),
            sum(unit.optimizer for unit in units),
            sum(unit.gradients_held + unit.gradients_after + unit.gradients_settled for unit in units),
            sum(saved[i] for i in row.units),
            sum(unit.kept for unit in units),
            max(unit.gathered - unit.kept + unit.gather_buffer + unit.copy_out for unit in units),
        )
        return [row.label, *map(format_bytes, figures)]

    figures = ["parameters", "optimizer", "gradients", "activations", "kept", "while it runs"]
    return make_table(
        "Bytes on each device, by unit", map(cells, plan_rows(plan, description)), text=["units"], figures=figures
    )


def _unit_seconds_table(explanation: Explanation, time: TimeEstimate) -> Table:
    """Return seconds of each row of units in a step; `exposed` is communication for which compute waits."""
    rows = [
        [row.label, *(format_seconds(row.seconds(time, term)) for term in _UNIT_TERMS.values())]
        for row in plan_rows(explanation.plan, explanation.description)
    ]
    return make_table("Seconds of a step, by unit", rows, text=["units"], figures=list(_UNIT_TERMS))


def reason_table(explanation: Explanation) -> Table:
    """Return the reason for the layout of each row: the fastest other layout, and the next best layout that fits."""
    world_size = explanation.plan.world_size

    def cells(reason: RowReason) -> list[str]:
        first, second = "none: this is the fastest", "none"
        if (other := reason.faster) is not None:
            overrun = _overrun(other, len(reason.row.units))
            first = f"{other.choice.describe(world_size)}: {format_seconds(other.added_s)}, {overrun}"
        if (other := reason.next_fitting) is not None:
            sign = "+" if other.added_s >= 0 else ""
            second = f"{other.choice.describe(world_size)}: {sign}{format_seconds(other.added_s)}, peak {format_bytes(other.peak_bytes)}"  # noqa: E501
        return [reason.row.label, reason.row.layout, first, second]

    title = "Cost of other layouts (the whole row changed, everything else unchanged)"
    return make_table(
        title,
        map(cells, explanation.reasons),
        text=["units"],
        notes=["layout", "faster layout", "next best that fits"],
    )


def _overrun(other: Alternative, units: int) -> str:
    if other.over_bytes <= 0:
        return f"fits, peak {format_bytes(other.peak_bytes)}"
    one = other.single_over_bytes
    single = "" if units == 1 else f" (one unit: {format_bytes(one)} over)" if one > 0 else " (one unit fits)"
    return f"{format_bytes(other.over_bytes)} over the limit{single}"


def bottleneck_text(bottleneck: Bottleneck, plan: Plan) -> str:
    faster, size = f"{bottleneck.gain:.2f}x the samples/s", bottleneck.batch_size
    if bottleneck.kind is BottleneckKind.MEMORY:
        assert bottleneck.peak_bytes is not None
        return f"Bottleneck: memory. Without a limit the peak would be {format_bytes(bottleneck.peak_bytes)}, at {faster}."  # noqa: E501
    return {
        BottleneckKind.MICRO_BATCH: f"Bottleneck: the requested micro-batch size. {size} would give {faster}.",
        BottleneckKind.BATCH: f"Bottleneck: the global batch. {size} samples per step would give {faster} under the same limit.",  # noqa: E501
        BottleneckKind.NOTHING: f"Bottleneck: none. Neither more memory nor a larger batch would make {plan.strategy} faster.",  # noqa: E501
    }[bottleneck.kind]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
