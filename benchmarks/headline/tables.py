"""Tables of 100 columns, verdicts, and the JSON and Markdown files of results."""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_osdp.quantities import format_bytes, format_seconds
from hf_osdp.report.tables import make_table

from .cases import Case
from .rows import Row, ratios

WIDTH = 100
NEAR_FASTEST = 1.05
"""Largest allowed ratio of OSDP's measured step to that of the fastest other contender that fits."""
OURS = "OSDP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An aim, and whether it was met."""

    text: str
    met: bool


def groups(rows: Iterable[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield case, batch rule and rows, in order."""
    for (case, rule), members in itertools.groupby(rows, key=lambda row: (row.case, row.rule)):
        yield case, rule, list(members)


def was_measured(rows: Iterable[Row]) -> bool:
    return any(row.measured_step_s is not None or row.out_of_memory for row in rows)


def table_of(case: Case, rule: str, rows: Sequence[Row], link: str) -> Table:
    """Return a table with one line per contender: estimates, and measurements if there are any."""
    unit = "tokens/s" if case.tokens else "samples/s"
    measured = was_measured(rows)
    table = make_table(f"{case.name}; {format_bytes(rows[0].limit_bytes)} on each of {case.devices}; {rule}. {link}")
    table.add_column("contender", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    names = ("est. peak", *(("peak",) if measured else ()), "est. step", *(("step",) if measured else ()))
    rates = (f"est. {unit}", "x") if not measured else (unit, "est. x", "x")
    for name in (*names, *rates):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.contender, *_figures(row, case, measured))
    return table


def _figures(row: Row, case: Case, measured: bool) -> list[str]:
    if row.run is None:
        return ["-", f"> {_bytes(row.needs_bytes)}"]
    batch = f"{row.micro_batch_size}" + (f" x {row.accumulation_steps}" if row.accumulation_steps != 1 else "")
    scale = case.sequence_length if case.tokens else 1
    if not measured:
        rate = row.rate(row.estimated_step_s)
        return [
            batch,
            _bytes(row.estimated_peak_bytes),
            format_seconds(row.estimated_step_s),
            _rate(rate, scale),
            _times(row.estimated_gain),
        ]
    estimated = row.estimated_step_s if row.measured_estimate_s is None else row.measured_estimate_s
    peaks = [_bytes(row.estimated_peak_bytes), "OUT OF MEM" if row.out_of_memory else _bytes(row.measured_peak_bytes)]
    steps = [format_seconds(estimated), "-" if row.measured_step_s is None else format_seconds(row.measured_step_s)]
    rate = _rate(row.rate(row.measured_step_s), scale)
    return [batch, *peaks, *steps, rate, _times(row.estimated_gain), _times(row.measured_gain)]


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _rate(rate: float | None, scale: int) -> str:
    return "-" if rate is None else f"{rate * scale:.{0 if rate * scale >= 1000 else 2 if rate * scale < 100 else 1}f}"


def _times(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f}"


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return lines with the layouts and the bytes on the host; they may be long."""
    lines = [f"{row.contender}: {row.layout}" for row in rows if row.contender.startswith(OURS) and row.layout]
    lines += [f"{row.contender}: {format_bytes(row.host_bytes)} on the host" for row in rows if row.host_bytes]
    return lines


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return a verdict on every aim over all rows."""
    found = [_by_estimate(rows)]
    if was_measured(rows):
        over = [row for row in rows if row.out_of_memory or (row.measured_peak_bytes or 0) > row.limit_bytes]
        runs = {(row.case, row.run) for row in rows if row.run}
        named = ", ".join(sorted({f"{row.contender} of {row.case}" for row in over}))
        found.append(
            Verdict(text=f"{len({(r.case, r.run) for r in over})} of {len(runs)} plans needed more than their limit"
                         f"{f': {named}' if named else ''}; aim 0", met=not over)
        )  # fmt: skip
        found.append(_by_measurement(rows))
    return found


def _by_estimate(rows: Sequence[Row]) -> Verdict:
    worst, where = _behind(
        rows, lambda own, other: other.rate(other.estimated_step_s) / own.rate(own.estimated_step_s)
    )
    if not worst:
        return Verdict(text=f"by estimate nothing but {OURS} fits", met=True)
    text = f"by estimate {OURS} takes at most {worst:.3f} times the step of the best other that fits{where}; aim 1"
    return Verdict(text=text, met=worst <= 1.0 + 1e-6)


def _by_measurement(rows: Sequence[Row]) -> Verdict:
    worst, where = _behind([row for row in rows if row.run is None or row.steps_s], _step_over)
    if not worst:
        return Verdict(text="measured, nothing but OSDP fits", met=True)
    text = f"measured, OSDP takes at most {worst:.2f} times the step of the fastest other that fits{where}; aim {NEAR_FASTEST}"  # noqa: E501
    return Verdict(text=text, met=worst <= NEAR_FASTEST)


def _step_over(own: Row, other: Row) -> float:
    """Return the time per sample under one plan divided by that under another, from steps of the same rounds if
    there are any.
    """
    return other.global_batch_size / own.global_batch_size * statistics.median(ratios(own.steps_s, other.steps_s))


def _behind(rows: Sequence[Row], over: Callable[[Row, Row], float]) -> tuple[float, str]:
    """Return the worst ratio of OSDP's time to the best other's, and where it occurs; 0 without another contender."""
    worst, where = 0.0, ""
    for case, rule, members in groups(rows):
        own = next((row for row in members if row.contender == OURS and row.run), None)
        others = [row for row in members if row.contender != OURS and row.run]
        found = max((float("inf") if own is None else over(own, other) for other in others), default=0.0)
        if found > worst:
            worst, where = found, f" ({case}, {rule})"
    return worst, where


def markdown(sections: Sequence[tuple[Case, Sequence[Row]]], head: dict[str, Any], link: str) -> str:
    """Return all tables as Markdown, with the command and versions that made them.

    Args:
        sections: rows by case.
        head: `title`, `command`, `date`, `commit`, `versions`, `hardware`, `remarks`.
        link: kind of link, as in the tables' titles.
    """
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    made = f"`{head['command']}` on {head['hardware']}, {head['date']}; commit {head['commit']}; {versions}."
    lines = [f"# Headline experiments: {head['title']}", "", made, "", *head["remarks"], ""]
    for case, rows in sections:
        for _, rule, members in groups(rows):
            lines += ["```", _text(table_of(case, rule, members, link)).rstrip(), "```", ""]
            lines += [*(f"- {line}" for line in remarks(members)), ""]
        lines += [case.remark, ""] if case.remark else []
    rows = [row for _, members in sections for row in members]
    lines += [f"- {'met' if verdict.met else 'MISSED'}: {verdict.text}" for verdict in verdicts(rows)]
    return "\n".join(lines) + "\n"


def _text(table: Table) -> str:
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(table)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())
