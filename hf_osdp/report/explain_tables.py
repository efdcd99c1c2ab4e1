"""Tables for a terminal of 100 columns: an explanation, a Pareto front, answers to what-if questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from ..planner.cost.memory import MemoryBreakdown, Moment, SegmentBytes
from ..planner.decision import UnitLayout
from ..planner.plan import Plan
from ..planner.search.search import SearchResult
from ..planner.search.what_if import Answer
from ..quantities import format_bytes, format_count, format_seconds
from .explain import Alternative, Binding, Binds, Explanation, RowReason
from .tables import PlanRow, bare_table, plan_rows

_UNIT_TERMS = (
    ("compute", "compute_s"),
    ("communication", "communication_s"),
    ("exposed", "exposed_s"),
    ("copies", "copy_s"),
    ("optimizer", "optimizer_s"),
)


def peak_table(explanation: Explanation) -> Table:
    """Bytes at the highest moment by what they are, the largest first, with their share of the limit or of the peak."""
    peak, limit = explanation.estimate.memory.peak, explanation.plan.memory_limit_bytes
    total = peak.total_bytes + explanation.outside_bytes
    table = bare_table(f"Bytes at the peak: {peak.phase} of {peak.unit}")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("of the limit" if limit else "of the peak", justify="right")
    parts = [(name.replace("_", " "), getattr(peak.breakdown, name)) for name in peak.breakdown.__slots__]
    parts += explanation.outside.items()
    for name, nbytes in sorted(parts, key=lambda part: -part[1]):
        if nbytes:
            table.add_row(name, format_bytes(nbytes), _share(nbytes, limit or total))
    table.add_row("peak", format_bytes(total), _share(total, limit or total))
    if limit:
        left = limit - total - explanation.margin_bytes
        table.add_row("left under the limit", format_bytes(left), _share(left, limit))
        if explanation.margin_bytes:
            table.add_row("margin", format_bytes(explanation.margin_bytes), _share(explanation.margin_bytes, limit))
    return table


def stream_table(explanation: Explanation) -> Table:
    """Seconds of a step by kind of work; what is hidden runs beside compute."""
    step = sum(stream.exposed_s for stream in explanation.streams)
    table = bare_table(f"Seconds of a step: {format_seconds(step)}")
    table.add_column("")
    for name in ("in all", "hidden", "exposed", "of the step"):
        table.add_column(name, justify="right")
    for stream in explanation.streams:
        figures = (stream.total_s, stream.hidden_s, stream.exposed_s)
        table.add_row(stream.name, *(format_seconds(value) for value in figures), _share(stream.exposed_s, step))
    return table


def unit_bytes_table(explanation: Explanation) -> Table:
    """Bytes that each row of units has on one device.

    `activations` and `kept` lie between its forward and its backward; `while it runs` is the most that one unit of the row
    gathers and copies.
    """
    table = bare_table("Bytes on each device, by unit")
    table.add_column("units", overflow="fold")
    for name in ("parameters", "optimizer", "gradients", "activations", "kept", "while it runs"):
        table.add_column(name, justify="right", no_wrap=True)
    plan, description = explanation.plan, explanation.description
    forms = [
        SegmentBytes.of(s, description.units[s.unit].span, plan.micro_batch_size, plan.decision(description.units[s.unit].fqn).activations)
        for s in description.segments
    ]
    for row in plan_rows(explanation.plan, explanation.description):
        units = [explanation.estimate.units[i] for i in row.units]
        saved = sum(max(0, form.saved) for s, form in zip(description.segments, forms, strict=True) if s.unit in row.units)
        figures = (
            sum(unit.parameters for unit in units),
            sum(unit.optimizer for unit in units),
            sum(unit.gradients_held + unit.gradients_after + unit.gradients_settled for unit in units),
            saved,
            sum(unit.kept for unit in units),
            max(unit.gathered - unit.kept + unit.gather_buffer for unit in units),
        )
        table.add_row(row_label(row), *map(format_bytes, figures))
    return table


def unit_seconds_table(explanation: Explanation) -> Table:
    """Seconds of each row of units in a step; `exposed` is the communication that compute waits for."""
    table = bare_table("Seconds of a step, by unit")
    table.add_column("units", overflow="fold")
    for name, _ in _UNIT_TERMS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan_rows(explanation.plan, explanation.description):
        times = [explanation.estimate.time.units[i] for i in row.units]
        table.add_row(row_label(row), *(format_seconds(sum(getattr(time, term) for time in times)) for _, term in _UNIT_TERMS))
    return table


def reason_table(explanation: Explanation) -> Table:
    """Why each row is laid out as it is: what is quicker but does not fit, and the next best of what fits."""
    table = bare_table("Why this layout: what others would cost (the whole row changed, all else as it is)")
    table.add_column("units", overflow="fold")
    table.add_column("layout")
    table.add_column("quicker layout")
    table.add_column("next best that fits")
    for reason in explanation.reasons:
        table.add_row(row_label(reason.row), reason.row.layout, *reason_cells(reason, explanation.plan))
    return table


def reason_cells(reason: RowReason, plan: Plan) -> tuple[str, str]:
    """The two alternatives of a row as text."""
    if reason.quicker is None:
        first = "none: this is the quickest"
    else:
        other = reason.quicker
        first = f"{_layout(other, plan)}: {format_seconds(other.added_s)}, {_overrun(other, len(reason.row.units))}"
    if reason.next_fitting is None:
        return first, "none"
    other = reason.next_fitting
    sign = "+" if other.added_s >= 0 else ""
    return first, f"{_layout(other, plan)}: {sign}{format_seconds(other.added_s)}, peak {format_bytes(other.peak_bytes)}"


def binding_text(binding: Binding, plan: Plan) -> str:
    """What binds, as one sentence."""
    faster = f"{binding.gain:.2f}x the samples/s"
    match binding.kind:
        case Binds.MEMORY:
            return f"What binds: memory. Without a limit the peak would be {format_bytes(binding.peak_bytes)}, at {faster}."
        case Binds.MICRO_BATCH:
            return f"What binds: the micro-batch size that was asked for. {binding.batch_size} would give {faster}."
        case Binds.BATCH:
            return f"What binds: the global batch. {binding.batch_size} samples a step would give {faster} under the same limit."
        case Binds.NOTHING:
            return f"What binds: nothing. More memory or a larger batch would not make it faster; {plan.strategy} is at its best here."
    raise AssertionError(binding.kind)


def frontier_table(front: Sequence[SearchResult], memory_limit_bytes: int) -> Table:
    """Memory against throughput; `*` marks the fastest within the limit."""
    table = bare_table(f"Pareto front of memory and throughput (* the fastest within {format_bytes(memory_limit_bytes)})")
    for name in ("peak", "batch", "step", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layouts (units)")
    best = max((result.plan.peak_bytes for result in front if result.plan.peak_bytes <= memory_limit_bytes), default=None)
    for result in front:
        plan = result.plan
        mark = "* " if plan.peak_bytes == best else ""
        table.add_row(
            f"{mark}{format_bytes(plan.peak_bytes)}", f"{plan.micro_batch_size} x {plan.accumulation_steps}",
            format_seconds(plan.step_s), f"{plan.samples_per_s:.1f}", layouts_text(plan),
        )  # fmt: skip
    return table


def layouts_text(plan: Plan) -> str:
    """How many units have each layout, the most frequent first: `shard 8 (40), replicate (10)`."""
    counts = Counter(unit.describe(plan.world_size) for unit in plan.units)
    return ", ".join(f"{layout} ({count})" for layout, count in counts.most_common())


def what_if_table(answers: Sequence[Answer]) -> Table:
    """Answers side by side; the first row is how things are, which gains are counted from."""
    table = bare_table("What if")
    table.add_column("", min_width=len("twice the memory"))
    table.add_column("change")
    for name in ("batch", "peak", "step", "samples/s", "tokens/s", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    now = answers[0].tokens_per_s
    for row in answers:
        if row.result is None:
            table.add_row(row.question, "; ".join(filter(None, (row.change, row.reason))), *["-"] * 6)
            continue
        plan, rate = row.result.plan, row.tokens_per_s
        gain = "-" if not now or row is answers[0] else f"{rate / now:.2f}x"
        table.add_row(
            row.question, row.change, f"{plan.micro_batch_size} x {plan.accumulation_steps}", format_bytes(plan.peak_bytes),
            format_seconds(plan.step_s), f"{plan.samples_per_s:.1f}", format_count(rate), gain,
        )  # fmt: skip
    return table


def simulation_table(estimated: Moment, simulated_bytes: int, simulated: MemoryBreakdown) -> Table:
    """Bytes at the peak by kind: estimated beside what FSDP2's real step allocates on fake tensors."""
    table = bare_table("Peak of tensors, estimated beside simulated")
    table.add_column("")
    for name in ("estimated", "simulated", "error"):
        table.add_column(name, justify="right")
    rows = [(name.replace("_", " "), getattr(estimated.breakdown, name), getattr(simulated, name)) for name in simulated.__slots__]
    for name, ours, theirs in (*rows, ("peak", estimated.total_bytes, simulated_bytes)):
        if ours or theirs:
            table.add_row(name, format_bytes(ours), format_bytes(theirs), f"{100 * (ours / theirs - 1):+.1f} %" if theirs else "-")
    return table


def row_label(row: PlanRow) -> str:
    """The units of a row, with their number where there are several."""
    return f"{row.label} ({len(row.units)})" if len(row.units) > 1 else row.label


def layout_text(choice: UnitLayout, world_size: int) -> str:
    """A layout as the plan's tables write it."""
    return choice.describe(world_size)


def _layout(other: Alternative, plan: Plan) -> str:
    return layout_text(other.choice, plan.world_size)


def _overrun(other: Alternative, units: int) -> str:
    """By how much a quicker layout is over the limit."""
    if other.over_bytes <= 0:
        return f"fits, peak {format_bytes(other.peak_bytes)}"
    alone = ""
    if units > 1:
        one = other.single_over_bytes
        alone = f" (one unit: {format_bytes(one)} over)" if one > 0 else " (one unit fits)"
    return f"{format_bytes(other.over_bytes)} over the limit{alone}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
