"""Tables of an explanation, for a terminal of 100 columns."""

from __future__ import annotations

from rich.table import Table

from ..planner.cost.timing import TimeEstimate
from ..planner.plan import Plan
from ..quantities import format_bytes, format_seconds
from .explain import Alternative, Binding, Binds, Explanation, RowReason
from .tables import PlanRow, bytes_by_kind, make_table, plan_rows

_UNIT_TERMS = {
    "compute": "compute_s", "communication": "communication_s", "exposed": "exposed_s", "copies": "copy_s", "optimizer": "optimizer_s",
}  # fmt: skip


def explanation_tables(explanation: Explanation) -> list[Table | str]:
    """Return all tables of an explanation; without hardware there are no seconds and no alternatives."""
    parts: list[Table | str] = [peak_table(explanation), unit_bytes_table(explanation)]
    if (time := explanation.estimate.time) is None:
        return [*parts, "The hardware is not known, so there are no seconds and no alternatives."]
    parts += [stream_table(explanation), _unit_seconds_table(explanation, time), reason_table(explanation)]
    return parts if explanation.binding is None else [*parts, binding_text(explanation.binding, explanation.plan)]


def peak_table(explanation: Explanation) -> Table:
    """Return bytes at the highest moment by kind, the largest first, with their share of the limit or of the peak."""
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
    """Return seconds of a step by kind of work; what is hidden runs beside compute."""
    step = sum(stream.exposed_s for stream in explanation.streams)
    rows = [[s.name, *map(format_seconds, (s.total_s, s.hidden_s, s.exposed_s)), _share(s.exposed_s, step)] for s in explanation.streams]
    figures = ["in all", "hidden", "exposed", "of the step"]
    return make_table(f"Seconds of a step: {format_seconds(step)}", rows, text=[""], figures=figures)


def unit_bytes_table(explanation: Explanation) -> Table:
    """Return the bytes that each row of units has on one device: activations and what is kept between its forward and its backward.

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
            max(unit.gathered - unit.kept + unit.gather_buffer for unit in units),
        )
        return [row.label, *map(format_bytes, figures)]

    figures = ["parameters", "optimizer", "gradients", "activations", "kept", "while it runs"]
    return make_table("Bytes on each device, by unit", map(cells, plan_rows(plan, description)), text=["units"], figures=figures)


def _unit_seconds_table(explanation: Explanation, time: TimeEstimate) -> Table:
    """Return seconds of each row of units in a step; `exposed` is the communication that compute waits for."""
    rows = [
        [row.label, *(format_seconds(row.seconds(time, term)) for term in _UNIT_TERMS.values())]
        for row in plan_rows(explanation.plan, explanation.description)
    ]
    return make_table("Seconds of a step, by unit", rows, text=["units"], figures=list(_UNIT_TERMS))


def reason_table(explanation: Explanation) -> Table:
    """Return why each row is laid out as it is: what is quicker but does not fit, and the next best of what fits."""
    world_size = explanation.plan.world_size

    def cells(reason: RowReason) -> list[str]:
        first, second = "none: this is the quickest", "none"
        if (other := reason.quicker) is not None:
            overrun = _overrun(other, len(reason.row.units))
            first = f"{other.choice.describe(world_size)}: {format_seconds(other.added_s)}, {overrun}"
        if (other := reason.next_fitting) is not None:
            sign = "+" if other.added_s >= 0 else ""
            second = f"{other.choice.describe(world_size)}: {sign}{format_seconds(other.added_s)}, peak {format_bytes(other.peak_bytes)}"
        return [reason.row.label, reason.row.layout, first, second]

    title = "Why this layout: what others would cost (the whole row changed, all else as it is)"
    return make_table(title, map(cells, explanation.reasons), text=["units"], notes=["layout", "quicker layout", "next best that fits"])


def _overrun(other: Alternative, units: int) -> str:
    if other.over_bytes <= 0:
        return f"fits, peak {format_bytes(other.peak_bytes)}"
    one = other.single_over_bytes
    alone = "" if units == 1 else f" (one unit: {format_bytes(one)} over)" if one > 0 else " (one unit fits)"
    return f"{format_bytes(other.over_bytes)} over the limit{alone}"


def binding_text(binding: Binding, plan: Plan) -> str:
    faster = f"{binding.gain:.2f}x the samples/s"
    if binding.kind is Binds.MEMORY:
        assert binding.peak_bytes is not None
        return f"What binds: memory. Without a limit the peak would be {format_bytes(binding.peak_bytes)}, at {faster}."
    return {
        Binds.MICRO_BATCH: f"What binds: the micro-batch size that was asked for. {binding.batch_size} would give {faster}.",
        Binds.BATCH: f"What binds: the global batch. {binding.batch_size} samples a step would give {faster} under the same limit.",
        Binds.NOTHING: f"What binds: nothing. More memory or a larger batch would not make it faster; {plan.strategy} is at its best here.",
    }[binding.kind]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
