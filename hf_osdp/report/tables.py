"""Tables for a terminal of 100 columns: a plan, strategies side by side, the Pareto front, answers to what-if
questions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from rich import box
from rich.table import Column, Table

from ..planner.cost.evaluate import PlanEstimate
from ..planner.cost.memory import MemoryEstimate, Moment
from ..planner.cost.moments import MemoryBreakdown
from ..planner.cost.timing import TimeEstimate
from ..planner.description import ModelDescription, UnitDescription
from ..planner.hardware import Hardware
from ..planner.plan import Plan
from ..planner.presets import peak_rate
from ..planner.problem import PlanningProblem
from ..planner.search.compare import StrategyResult
from ..planner.search.search import SearchResult
from ..quantities import format_bytes, format_count, format_seconds

_NUMBER = re.compile(r"\d+")
_WIDTH = 100
_NAMES_WIDTH = 46
"""Width of units and classes on one line; layout and figures need the rest of 100 columns."""
_HOST_WIDTH, _LEAST_CLASS = 10, 12
"""Width of the column `host`, and least width of a folded class name."""
_LEAST_WIDTHS = {"batch": 8, "peak": 9, "step": 8, "samples/s": 9, "tokens/s": 8, "gain": 5}
"""Widths of figures, by column, that hold those of most rows, so that a table need not change as it grows."""


def make_table(
    title: str,
    rows: Iterable[Sequence[str]] = (),
    *,
    text: Sequence[str | Column] = (),
    figures: Sequence[str | Column] = (),
    notes: Sequence[str] = (),
) -> Table:
    """Return a table that folds long text in its first (`text`) and last (`notes`) columns, but not in `figures`
    between them.
    """
    columns = [column if isinstance(column, Column) else Column(column, overflow="fold") for column in text]
    columns += [
        column
        if isinstance(column, Column)
        else Column(column, justify="right", no_wrap=True, min_width=_LEAST_WIDTHS.get(column))
        for column in figures
    ]
    columns += [Column(name, overflow="fold") for name in notes]
    width = min(len(title), _WIDTH)  # a narrower table would break its title
    table = Table(
        *columns,
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        min_width=width,
    )
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Neighbouring units of one class with one layout."""

    units: tuple[int, ...]
    """Indices into the description."""
    name: str
    """Names of the units as a range: `transformer.h.0-5`."""
    class_name: str
    layout: str

    @property
    def label(self) -> str:
        """The name, with the number of units if there are several."""
        return f"{self.name} ({len(self.units)})" if len(self.units) > 1 else self.name

    def seconds(self, time: TimeEstimate, term: str) -> float:
        """Return one term of the units' time in a step, such as `exposed_s`."""
        return float(sum(getattr(time.units[i], term) for i in self.units))


def plan_rows(plan: Plan, description: ModelDescription) -> tuple[PlanRow, ...]:
    """Return the plan's units, with equal neighbours in one row."""

    def kind(index: int) -> tuple[str, str, int]:
        unit = description.units[index]
        return unit.class_name, plan.decision(unit.fqn).describe(plan.world_size), unit.numel

    rows = []
    for (class_name, layout, _), indices in groupby(range(len(description.units)), key=kind):
        units = tuple(indices)
        rows.append(
            PlanRow(
                units=units,
                name=_range_label([description.units[i] for i in units]),
                class_name=class_name,
                layout=layout,
            )
        )
    return tuple(rows)


def _range_label(units: Sequence[UnitDescription]) -> str:
    first, last = units[0].label, units[-1].label
    if len(units) == 1:
        return first
    starts, ends = list(_NUMBER.finditer(first)), _NUMBER.findall(last)
    if _NUMBER.sub("#", first) != _NUMBER.sub("#", last) or not ends:
        return f"{first} ... {last}"
    start, end = next((start, end) for start, end in zip(starts, ends, strict=True) if start[0] != end)
    return f"{first[: start.end()]}-{end}{first[start.end() :]}"


def plan_table(plan: Plan, description: ModelDescription, estimate: PlanEstimate) -> Table:
    """Return each unit's layout, memory per device and seconds per step; the caption lists the saved outputs of
    recomputed units.

    `held` is parameters, gradients and optimizer states; `host`, shown only if used, is the host's memory per device,
    including offloaded activations; `exposed` is communication for which compute waits.
    """
    host = host_bytes_of_units(description, estimate.memory)

    def cells(row: PlanRow) -> list[str]:
        held = sum(estimate.memory.units[i].held + estimate.memory.units[i].gradients_after for i in row.units)
        waiting = sum(host[i] for i in row.units)
        memory = [format_bytes(held), *([format_bytes(waiting) if waiting else "-"] if any(host) else [])]
        seconds = ["-", "-"]
        if (time := estimate.time) is not None:
            seconds = [format_seconds(row.seconds(time, term)) for term in ("compute_s", "exposed_s")]
        numel = sum(description.units[i].numel for i in row.units)
        policy = plan.decision(description.units[row.units[0]].fqn).activations.recomputation
        layout = (
            row.layout
            if policy is None
            else row.layout.replace(policy.describe(), policy.describe().partition(":")[0])
        )
        return [row.label, row.class_name, layout, format_count(numel), *memory, *seconds]

    rows = plan_rows(plan, description)
    label, name = (max(len(getattr(row, part)) for row in rows) for part in ("label", "class_name"))
    room = _NAMES_WIDTH - _HOST_WIDTH * any(host)
    wide = {"units": label <= room - _LEAST_CLASS, "class": label + name <= room}
    title = f"OSDP plan {plan.fingerprint}: {batch_text(plan)}"
    names = [Column(head, no_wrap=fits, overflow="fold") for head, fits in wide.items()]
    layout = Column("layout", min_width=len("replicate,"))
    figures = ["params", "held", *(["host"] if any(host) else []), "compute", "exposed"]
    table = make_table(title, map(cells, rows), text=[*names, layout], figures=figures)
    policies = dict.fromkeys(
        policy.describe() for unit in plan.units if (policy := unit.activations.recomputation) is not None
    )
    table.caption = "\n".join(f"{policy}." for policy in policies if ":" in policy) or None
    table.caption_justify = "left"
    return table


def host_bytes_of_units(description: ModelDescription, memory: MemoryEstimate) -> list[int]:
    """Return each unit's bytes on the host for one device: states, and activations that are offloaded until
    backward.
    """
    held = [unit.host for unit in memory.units]
    for segment, terms in zip(description.segments, memory.segments, strict=True):
        held[segment.unit] += terms.host
    return held


def plan_caption(plan: Plan, estimate: PlanEstimate, hardware: Hardware | None = None) -> tuple[str, ...]:
    """Return lines about the peak and the time of a step; the plan's peak includes memory that is not available to
    tensors.
    """
    lines = [_peak_line(plan, estimate, hardware)]
    if host := estimate.memory.host_bytes:
        line = f"On the host: {format_bytes(host)} per rank"
        if hardware is not None and hardware.host is not None:
            ranks = hardware.devices_per_node
            line += f", {format_bytes(ranks * host)} of {format_bytes(ranks * hardware.host.memory_bytes)} per machine"
            line += f" ({hardware.host.source})" if hardware.host.source.startswith("assumed") else ""
        lines.append(f"{line}.")
    if (time := estimate.time) is not None:
        terms = {
            "compute": "compute_s",
            "exposed communication": "exposed_s",
            "copies": "copy_s",
            "optimizer": "optimizer_s",
        }
        parts = ", ".join(f"{name} {format_seconds(time.total(term))}" for name, term in terms.items())
        rate = f", {_rates(plan, time.step_s)}" if time.step_s else ""
        lines.append(f"Step {format_seconds(time.step_s)}{rate}: {parts}.")
        if gathers := time.total("update_gathers_s"):
            lines.append(
                f"The optimizer gathers whole updates of sharded matrices, which takes {format_seconds(gathers)} of"
                " its time."
            )
    if not plan.split.is_none:
        lines.append(f"The model is split: {plan.split.describe()}.")
    if plan.accumulation_steps > 1:
        held = sum(not unit.reduce_every_micro_step for unit in plan.units)
        some = (
            f", except for {held} of {len(plan.units)} units, whose whole gradients are kept and reduced once per step"
            if held
            else ""
        )
        every = (
            "once per step; whole gradients are kept until then"
            if held == len(plan.units)
            else f"in every micro-step{some}"
        )
        lines.append(f"Gradients are reduced {every}.")
    lines += _other_arithmetic(plan)
    return (*lines, *_proof(plan))


def _proof(plan: Plan) -> Iterator[str]:
    """Yield what the search proved, and what a simpler plan than the fastest costs."""
    proof = "no plan of the search space is faster under this limit"
    if plan.simplified:
        yield f"Simpler than the fastest plan: {plan.simplified}."
        proof = "no plan of the search space is faster than the fastest found"
    if plan.strategy == "osdp" and not plan.proven_optimal and plan.gap is not None:
        proof = f"{proof} by more than {100 * plan.gap:.2g} %"
    if plan.simplified and plan.proven_simplest:
        proof = f"{proof}, none near it is simpler than this one, and none as simple is faster"
    if plan.strategy == "osdp" and (plan.proven_optimal or plan.gap is not None):
        yield f"Proven: {proof}, by the cost model (docs/planner.md has its equations)."
    if plan.proven_simplest is False:
        yield "Not proven: that no plan near the fastest is simpler, or as simple and faster."


def _rates(plan: Plan, step_s: float) -> str:
    samples = plan.global_batch_size / step_s
    tokens = f", {samples * plan.sequence_length:,.0f} tokens/s" if plan.sequence_length > 1 else ""
    return f"{samples:.1f} samples/s{tokens}"


def rates_line(plan: Plan, description: ModelDescription, hardware: Hardware) -> str:
    """Return where the rates of an estimate come from, and the share of the devices' peak that the model's own
    operations reach in it, without those that are computed again (model FLOPs utilisation).
    """
    device = hardware.device
    if device.source.startswith("measured"):
        text = f"Rates of the devices: {device.source.partition(';')[0]}"
    else:
        text = "Rates of the devices: of published trainings and data sheets (docs/rates.md)"
    peak = peak_rate(device, description.compute_dtype)
    if peak is None or not plan.step_s:
        return f"{text}."
    phases = (phase for segment in description.segments for phase in (segment.forward, segment.backward))
    flops = plan.accumulation_steps * sum(phase.flops(plan.micro_batch_size) for phase in phases)
    share = flops / plan.step_s / peak
    return f"{text}; utilisation {share:.0%} of {peak / 1e12:,.0f} TFLOP/s in {description.compute_dtype.value}."


def _other_arithmetic(plan: Plan) -> Iterator[str]:
    """Yield a line for each difference of the plan from exact data parallel training."""
    if formats := {form.value for unit in plan.units for form in unit.formats.values()}:
        sent = sum(bool(unit.formats) for unit in plan.units)
        yield f"{sent} of {len(plan.units)} units send {' and '.join(sorted(formats))}: the rounding differs from exact training."  # noqa: E501


def batch_text(plan: Plan) -> str:
    """Return the samples of an optimizer step as a product: `4 x 2 samples x 1 micro-steps = 8 per step`."""
    product = f"{plan.world_size} x {plan.micro_batch_size} samples x {plan.accumulation_steps} micro-steps"
    return f"{product} = {plan.global_batch_size} per step"


def _peak_line(plan: Plan, estimate: PlanEstimate, hardware: Hardware | None) -> str:
    peak, limit = estimate.memory.peak, plan.memory_limit_bytes
    outside: Mapping[str, int] = {} if hardware is None else estimate.memory.outside(hardware)
    kept = "".join(f", {name} {format_bytes(nbytes)}" for name, nbytes in outside.items() if nbytes)
    of = f" of {format_bytes(limit)}" if limit else ""
    if limit and hardware is not None and hardware.free_share:
        of += f" (margin {format_bytes(limit - hardware.room_bytes(limit))})"
    return f"Peak {format_bytes(plan.peak_bytes or peak.total_bytes)}{of} in {peak.phase} of {peak.unit}: {describe_moment(peak)}{kept}."  # noqa: E501


def describe_moment(moment: Moment) -> str:
    """Return the kinds of bytes at a moment, largest first."""
    parts = sorted(
        ((nbytes, name) for name, nbytes in bytes_by_kind(moment.breakdown).items() if nbytes), reverse=True
    )
    return ", ".join(f"{name} {format_bytes(nbytes)}" for nbytes, name in parts)


def bytes_by_kind(breakdown: MemoryBreakdown) -> dict[str, int]:
    """Return the bytes of a breakdown by the readable name of their kind."""
    return {name.replace("_", " "): nbytes for name, nbytes in asdict(breakdown).items()}


def batch_cells(plan: Plan, *, peak_mark: str = "") -> list[str]:
    """Return batch, peak, step and samples/s of a plan from the search."""
    assert plan.peak_bytes is not None and plan.step_s is not None and plan.samples_per_s is not None
    return [
        f"{plan.micro_batch_size} x {plan.accumulation_steps}", f"{peak_mark}{format_bytes(plan.peak_bytes)}",
        format_seconds(plan.step_s), f"{plan.samples_per_s:.1f}",
    ]  # fmt: skip


def comparison_table(rows: Sequence[StrategyResult], memory_limit_bytes: int) -> Table:
    """Return each strategy at its own best batch."""
    best = next((row.result.plan.samples_per_s for row in rows if row.label == "osdp" and row.result), None)

    def cells(row: StrategyResult) -> list[str]:
        if row.result is None:
            return [row.label, "-", row.reason, "-", "-", "-"]
        plan = row.result.plan
        gain = f"{best / plan.samples_per_s:.2f}x" if best and plan.samples_per_s and row.label != "osdp" else "-"
        return [row.label, *batch_cells(plan), gain]

    title = f"Strategies at their own best batch, estimated, limit {format_bytes(memory_limit_bytes)}"
    strategy = Column("strategy", min_width=len("fsdp, eager, all recomputed"), overflow="fold")
    peak = Column("peak", justify="right", overflow="fold", min_width=len("needs 999.9 GiB"))  # or a reason, in lines
    figures: list[str | Column] = ["batch", peak, "step", "samples/s", "osdp gain"]
    return make_table(title, map(cells, rows), text=[strategy], figures=figures)


def frontier_table(front: Sequence[SearchResult], memory_limit_bytes: int) -> Table:
    """Return memory against throughput; `*` marks the fastest within the limit."""
    peaks = [result.plan.peak_bytes or 0 for result in front]
    best = max((peak for peak in peaks if peak <= memory_limit_bytes), default=None)

    def cells(result: SearchResult) -> list[str]:
        plan = result.plan
        batch, peak, *rates = batch_cells(plan, peak_mark="* " if plan.peak_bytes == best else "")
        sharded = [unit for unit in plan.units if unit.shard_size > 1]
        kept = sum(not unit.reshard_after_forward for unit in sharded)
        recomputed = sum(unit.activations.recomputes for unit in plan.units)
        offloaded = sum(unit.uses_host for unit in plan.units)
        counts = (len(plan.units) - len(sharded), kept, len(sharded) - kept, recomputed, offloaded)
        return [peak, batch, *rates, *(str(count) if count else "-" for count in counts)]

    title = f"Pareto front of memory and throughput (* the fastest within {format_bytes(memory_limit_bytes)}), with units by layout"  # noqa: E501
    units = ["replicated", "kept", "freed", "recomputed", "offloaded"]
    return make_table(title, map(cells, front), figures=["peak", "batch", "step", "samples/s", *units])


def layouts_text(plan: Plan) -> str:
    """Return the number of units of each layout, most frequent first: `shard 8 (40), replicate (10)`."""
    counts = Counter(unit.describe(plan.world_size) for unit in plan.units)
    return ", ".join(f"{layout} ({count})" for layout, count in counts.most_common())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a change: a plan, or the reason why there is none."""

    question: str
    change: str
    problem: PlanningProblem | None = None
    plan: Plan | None = None
    reason: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        rate = None if self.plan is None else self.plan.samples_per_s
        return None if self.plan is None or rate is None else rate * self.plan.sequence_length


def what_if_table(answers: Sequence[Answer]) -> Table:
    """Return answers as rows; gains are relative to the first row, which has no change."""
    now = answers[0].tokens_per_s

    def cells(row: Answer) -> list[str]:
        if row.plan is None or row.tokens_per_s is None:
            return [row.question, "; ".join(filter(None, (row.change, row.reason))), *["-"] * 5]
        gain = "-" if not now or row is answers[0] else f"{row.tokens_per_s / now:.2f}x"
        return [row.question, row.change, *batch_cells(row.plan)[:3], format_count(row.tokens_per_s), gain]

    text = [Column("", min_width=len("half the sequence")), Column("change", min_width=30, overflow="fold")]
    return make_table("What if", map(cells, answers), text=text, figures=["batch", "peak", "step", "tokens/s", "gain"])
