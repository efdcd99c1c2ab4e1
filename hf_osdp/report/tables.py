"""Reports (`content.py`) as tables and lines for a terminal of 100 columns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from rich import box
from rich.table import Column, Table

from ..planner.plan import Plan
from ..planner.profile import Profile
from ..quantities import format_bytes, format_count, format_seconds
from .content import Content

Part: TypeAlias = "Table | str"
_LONG_WAIT = 0.2
"""Share of a step from which on it is said that the GPUs wait for the CPU."""
_LITTLE_GAIN = 0.5
"""Share of the devices up to which it is said how little faster they are than one."""
_WIDTH, _NAMES_WIDTH, _CLASS_WIDTH = 100, 46, 18
"""Width of a table, of units and classes on one line, since layout and figures need the rest, and of classes alone."""
_BREAKS = re.compile(r"(?<=[._+])|(?<=[a-z])(?=[A-Z])")
"""Where a long name may go on in the next line."""
_LEGEND = {
    "keep": "gathered parameters stay from forward to backward",
    "hold gradients": "whole gradients wait for the last micro-step",
}  # fmt: skip
_STEP_TERMS = {
    "compute": "compute_s", "exposed communication": "exposed_s", "copies": "copy_s", "optimizer": "optimizer_s"
}  # fmt: skip


def make_table(
    title: str,
    rows: Iterable[Sequence[str]] = (),
    *,
    text: Sequence[str | Column] = (),
    figures: Sequence[str | Column] = (),
) -> Table:
    """Return a table that folds long text in its first columns, but not in `figures` after them."""
    columns = [_column(name, overflow="fold") for name in text]
    columns += [_column(name, justify="right", no_wrap=True) for name in figures]
    shape: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    shape["min_width"] = min(max(map(len, title.splitlines())), _WIDTH)  # a narrower table would break its title
    table = Table(*columns, title=title, title_justify="left", caption_justify="left", **shape)
    for row in rows:
        table.add_row(*row)
    return table


def _column(name: str | Column, **shape: Any) -> Column:
    return name if isinstance(name, Column) else Column(name, **shape)


def plan_of(content: Content) -> Plan:
    return Plan.from_content(content["plan"], "the report")


def plan_parts(content: Content) -> list[Part]:
    """Return what is printed of a plan whose hardware is known."""
    return [plan_table(content), *plan_lines(content), _rates_line(content)]


def plan_table(content: Content) -> Table:
    """Return each row of units with layout, memory per device and seconds per step; the caption lists the saved
    outputs of recomputed units.

    `host`, shown only if used, is the host's memory per device; `exposed` is communication for which compute waits.
    """
    rows, plan = content["estimated"]["units"], plan_of(content)
    memory = ["held", *(["host"] if any(row["bytes"]["host"] for row in rows) else [])]

    def cells(row: Content) -> list[str]:
        policy = row["recomputation"] or ""
        layout = row["layout"].replace(policy, policy.partition(":")[0])
        nbytes = [format_bytes(row["bytes"][kind]) for kind in memory]
        seconds = [_seconds(row["seconds"].get(term)) for term in ("compute_s", "exposed_s")]
        return [row["label"], row["class"], layout, format_count(row["parameters"]), *nbytes, *seconds]

    room = _NAMES_WIDTH - 10 * ("host" in memory)
    widths = [max(len(row[part]) for row in rows) for part in ("label", "class")]
    if sum(widths) > room:
        widths[1] = min(widths[1], max(_CLASS_WIDTH, room - widths[0]))
        widths[0] = max(_CLASS_WIDTH, room - widths[1])
        rows = [{**row, "label": _broken(row["label"], widths[0]), "class": _broken(row["class"], widths[1])}
                for row in rows]  # fmt: skip
    names = [Column(head, no_wrap=True) for head in ("units", "class")]
    layout = Column("layout", min_width=len("replicate,"))
    name = plan.model_name or content["model"]["class"]
    title = f"{name.rpartition('/')[2]}: {batch_text(plan)}\nOSDP plan {plan.fingerprint}"
    figures = ["params", *memory, "compute", "exposed"]
    table = make_table(title, map(cells, rows), text=[*names, layout], figures=figures)
    said = [f"{word}: {text}." for word, text in _LEGEND.items() if any(word in row["layout"] for row in rows)]
    policies = dict.fromkeys(row["recomputation"] for row in rows)
    said += [f"{policy}." for policy in policies if policy and ":" in policy]
    table.caption = "\n".join(said) or None
    return table


def _broken(name: str, width: int) -> str:
    """Return a name in lines of this width, each of whole words where there are any."""
    lines = [""]
    for word in (part[at : at + width] for part in _BREAKS.split(name) for at in range(0, len(part), width)):
        if len(lines[-1] + word) > width and lines[-1]:
            lines.append("")
        lines[-1] += word
    return "\n".join(lines)


def plan_lines(content: Content, *, proof: bool = True) -> list[str]:
    """Return what the lines below a plan's table say: peak, host, step, splits, rounding, and what was proven."""
    plan, estimated, hardware = plan_of(content), content["estimated"], content["hardware"]
    lines, (trained, every) = [], [content["model"][kind] for kind in ("trained_parameters", "parameters")]
    if trained < every:
        lines.append(f"Trained: {format_count(trained)} of {format_count(every)} parameters.")
    lines += [_peak_line(plan, estimated), *_beside_line(plan, estimated, hardware)]
    if host_bytes := estimated["host_bytes"]:
        line = f"On the host: {format_bytes(host_bytes)} per rank"
        if hardware is not None and (host := hardware["host"]) is not None:
            ranks = hardware["devices_per_node"]
            line += f", {format_bytes(ranks * host_bytes)} of {format_bytes(ranks * host['memory_bytes'])} per machine"
            line += f" ({host['source']})" if host["source"].startswith("assumed") else ""
        lines.append(f"{line}.")
    if (terms := estimated["step_breakdown"]) is not None:
        lines += [_step_line(plan, estimated, terms), *_waits_line(plan, estimated["step_s"], terms)]
        lines += _gain_line(plan, estimated["step_s"], terms)
    if not plan.split.is_none:
        lines.append(f"How the model is cut: {plan.split.describe()}.")
    if formats := {form.value for unit in plan.units for form in unit.formats.values()}:
        sent = f"{sum(bool(unit.formats) for unit in plan.units)} of {len(plan.units)} units send"
        lines.append(f"{sent} {' and '.join(sorted(formats))}: the rounding differs from exact training.")
    return [*lines, *(_proof(plan) if proof else ())]


def _peak_line(plan: Plan, estimated: Content) -> str:
    limit, margin = plan.memory_limit_bytes, estimated["margin_bytes"]
    of = f" of {format_bytes(limit)}" if limit else ""
    of += f" (margin {format_bytes(margin)})" if margin else ""
    parts = [*named(estimated["peak_breakdown"]), *named(estimated["outside"])]
    listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts)
    peak = format_bytes(plan.peak_bytes or estimated["peak_bytes"])
    return f"Peak {peak}{of} in {estimated['peak_phase']} of {estimated['peak_unit']}: {listed}."


def _beside_line(plan: Plan, estimated: Content, hardware: Content | None) -> Iterator[str]:
    """Yield what the plan leaves to the other programs for which it makes room."""
    if hardware is not None and hardware["beside_bytes"]:
        whole = hardware["memory_bytes"]
        needed = (plan.peak_bytes or 0) + estimated["margin_bytes"]
        yield (
            f"Beside it: other programs have {format_bytes(hardware['beside_bytes'])},"
            f" {hardware['beside_bytes'] / whole:.2f} of each device; this plan leaves them up to"
            f" {math.floor(100 * (whole - needed) / whole) / 100:.2f}."
        )


def _step_line(plan: Plan, estimated: Content, terms: Content) -> str:
    step_s, expected = estimated["step_s"], estimated["expected"]
    samples = plan.global_batch_size / step_s if step_s else 0.0
    of_sample, without = (expected["sample_tokens"], " without padding") if expected else (plan.sequence_length, "")
    tokens = f", {samples * of_sample:,.0f} tokens/s{without}" if plan.sequence_length > 1 else ""
    parts = ", ".join(f"{name} {format_seconds(terms[term])}" for name, term in _STEP_TERMS.items())
    gathers = terms["update_gathers_s"]
    of_it = f", of which gathers of whole updates {format_seconds(gathers)}" if gathers else ""
    step = f"Step {format_seconds(step_s)}, {samples:.1f} samples/s{tokens}: {parts}{of_it}."
    if expected is None:
        return step
    return (
        f"{step} Samples have {of_sample:.0f} of {plan.sequence_length} tokens in the mean: a step is expected to run"
        f" {expected['micro_steps']:.1f} micro-batches of {expected['tokens']:,.0f} tokens, padding included."
    )


def _waits_line(plan: Plan, step_s: float, terms: Content) -> Iterator[str]:
    """Yield what would help if the GPUs wait for the CPU for long, without what the plan has."""
    if terms["waits_s"] <= _LONG_WAIT * step_s:
        return
    helps = {
        "a larger micro-batch": plan.accumulation_steps > 1,
        "a larger batch": plan.accumulation_steps == 1,
        "compiled blocks": not plan.compiled_classes,
        "replicated units, where they fit": not all(unit.is_replica for unit in plan.units),
    }
    listed = " or ".join(name for name, is_left in helps.items() if is_left)
    yield f"The GPUs wait for the CPU for {terms['waits_s'] / step_s:.0%} of the step: {listed} would help."


def _proof(plan: Plan) -> Iterator[str]:
    """Yield what the search proved, and what a simpler plan than the fastest costs."""
    if plan.simplified:
        yield f"Took a simpler plan than the fastest: {plan.simplified} (simplicity 0 takes the fastest)."
    if plan.strategy == "osdp" and (plan.proven_optimal or plan.gap is not None):
        what = "The fastest is proven" if plan.simplified else "Proven fastest"
        within = "" if plan.proven_optimal else f" within {100 * (plan.gap or 0.0):.2g} %"
        yield f"{what}{within} by the cost model."


def _gain_line(plan: Plan, step_s: float, terms: Content) -> Iterator[str]:
    """Yield how little faster the devices are than one would be that held the whole step, if they mostly wait."""
    gain = plan.world_size * terms["compute_s"] / step_s if step_s else math.inf
    if gain <= _LITTLE_GAIN * plan.world_size and terms["exposed_s"] > terms["waits_s"]:
        yield (
            f"The devices wait for communication for {terms['exposed_s'] / step_s:.0%} of the step: {plan.world_size}"
            f" train {gain:.1f}x as fast as one that had the memory would."
        )


def _rates_line(content: Content) -> str:
    """Return where the rates of an estimate come from, and the share of the devices' peak that it reaches."""
    source, reached = content["hardware"]["source"].partition(";")[0], content["estimated"]["utilisation"]
    rates = source if source.startswith("measured") else "of published trainings and data sheets (docs/rates.md)"
    if reached is not None:
        rates += f"; utilisation {reached['share']:.0%} of {reached['flops_per_s'] / 1e12:,.0f} TFLOP/s"
        rates += f" in {reached['dtype']}"
    return f"Rates of the devices: {rates}."


def batch_text(plan: Plan) -> str:
    """Return the samples of a step as a product: `4 devices x 2 samples x 1 micro-step = 8 samples a step`."""
    counts = {"device": plan.world_size, "sample": plan.micro_batch_size, "micro-step": plan.accumulation_steps}
    product = " x ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())
    return f"{product} = {plan.global_batch_size} samples a step"


def batch_cells(outcome: Content) -> list[str]:
    """Return batch, peak, step and samples/s of a plan's outcome."""
    return [
        f"{outcome['micro_batch_size']} x {outcome['accumulation_steps']}", format_bytes(outcome["peak_bytes"]),
        format_seconds(outcome["step_s"]), f"{outcome['samples_per_s']:.1f}",
    ]  # fmt: skip


def comparison_table(content: Content) -> Table:
    """Return each strategy at its own best batch."""
    rows = content["strategies"]
    best = next((row["samples_per_s"] for row in rows if row["strategy"] == "osdp" and "reason" not in row), None)

    def cells(row: Content) -> list[str]:
        if "reason" in row:
            return [row["strategy"], "-", row["reason"], "-", "-", "-"]
        gain = f"{best / row['samples_per_s']:.2f}x" if best and row["strategy"] != "osdp" else "-"
        return [row["strategy"], *batch_cells(row), gain]

    peak = Column("peak", justify="right", overflow="fold")  # or the reason, in lines
    title = f"Strategies at their own best batch, estimated, limit {format_bytes(content['memory_limit_bytes'])}"
    figures: list[str | Column] = ["batch", peak, "step", "samples/s", "osdp gain"]
    return make_table(title, map(cells, rows), text=["strategy"], figures=figures)


def outcome_table(content: Content) -> Table:
    """Return estimates and measurements of a run; times of the slowest rank, memory of the fullest."""
    estimated, measured = content["estimated"], content["measured"]
    step_s = estimated["step_s"] or content["plan"]["step_s"]
    reserved = measured["reserved_bytes"]

    def cells(name: str, text: Callable[[float], str], expected: float | None, found: float | None) -> list[str]:
        texts = ("-" if value is None else text(value) for value in (expected, found))
        return [name, *texts, f"{expected / found:.2f}" if expected and found else "-"]

    rows = [
        cells("peak memory", format_bytes, estimated["peak_bytes"], measured["peak_bytes"]),  # of tensors
        *([cells("peak reserved", format_bytes, None, reserved)] if reserved else []),
        cells("step time", format_seconds, step_s, measured["median_step_s"]),
        cells("first step", format_seconds, None, measured["first_step_s"]),
    ]
    heads = ["estimated", "measured", "estimate / measured"]
    return make_table("Estimated and measured", rows, text=[""], figures=heads)


def profile_parts(profile: Profile) -> list[Part]:
    """Return tables and lines of a profile: the device, collectives, and times of segments."""
    hardware, device, host = profile.hardware, profile.hardware.device, profile.hardware.host
    rates = ", ".join(f"{dtype.value} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in device.flops_per_s.items())
    parts: list[Part] = [
        f"{hardware.summary}: {format_bytes(device.memory_bytes)} each, memory"
        f" {device.memory_bytes_per_s / 1e9:.1f} GB/s, {rates}."
    ]
    if host is not None:
        to, back, update = (
            f"{rate / 1e9:.1f} GB/s"
            for rate in (host.to_device_bytes_per_s, host.to_host_bytes_per_s, host.update_bytes_per_s)
        )
        memory = format_bytes(host.memory_bytes)
        parts.append(f"Host to device {to}, back {back}; {memory} per device, optimizer steps at {update}.")
    if (own := hardware.fsdp_overhead) is not None:
        parts.append(
            f"FSDP2's own work, from {format_seconds(device.operator_s)} an operator:"
            f" {format_seconds(own.gather.call_s)} to gather a unit, {format_seconds(own.reduce.call_s)} to reduce it."
        )
    collectives = [
        [
            timing.collective.value.replace("_", "-"),
            f"{timing.group_size}, {'across nodes' if timing.crosses_nodes else 'inside a node'}",
            format_seconds(timing.latency_s),
            f"{1e-9 / timing.seconds_per_byte:.2f} GB/s" if timing.seconds_per_byte else "-",
        ]
        for timing in hardware.timings
    ]
    title = "Collectives: time = latency + bytes of the whole tensor / rate"
    if collectives:
        parts.append(make_table(title, collectives, text=["collective", "group"], figures=["latency", "rate"]))
    if profile.segments:
        sizes = profile.micro_batch_sizes
        times = [
            {p.samples: f"{format_seconds(p.forward_s)} / {format_seconds(p.backward_s)}" for p in segment.points}
            for segment in profile.segments
        ]
        rows = [
            [
                segment.class_name,
                f"{sum(map(math.prod, segment.parameter_shapes)):,}",
                *(at.get(n, "-") for n in sizes),
            ]
            for segment, at in zip(profile.segments, times, strict=True)
        ]
        title = f"{profile.model}: forward / backward of each kind of segment, by samples"
        parts.append(make_table(title, rows, text=["unit"], figures=["parameters", *map(str, sizes)]))
    return parts


def named(amounts: dict[str, int]) -> list[tuple[str, int]]:
    """Return the amounts above zero with their readable names, largest first."""
    ranked = sorted(amounts.items(), key=itemgetter(1), reverse=True)
    return [(name.replace("_", " "), nbytes) for name, nbytes in ranked if nbytes]


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
