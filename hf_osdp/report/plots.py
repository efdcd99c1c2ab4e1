"""Charts of a plan as .png, .svg or .html, without a browser. Needs the extra `plot` (altair, vl-convert-python)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from ..planner.cost.evaluate import PlanEstimate
from ..planner.cost.memory import MemoryEstimate
from ..planner.hardware import GIB
from ..planner.plan import Plan
from ..planner.search.compare import StrategyResult
from ..planner.search.search import SearchResult
from ..quantities import format_bytes, format_seconds
from .explain import StreamTime, stream_times
from .plan_file import PlanInputs
from .tables import batch_cells, bytes_by_kind

with suppress(ImportError):  # `check_plot_path` names the missing package
    import altair as alt

SUFFIXES = (".png", ".svg", ".html")
_WIDTH, NARROW, _PNG_SCALE = 760, 360, 2
"""Widths of a plot in pixels, on a page and on a phone; resolution of a PNG."""
_COLORS = {
    "reserved": "#bab0ac", "parameters": "#4c78a8", "optimizer": "#9ecae9", "gradients": "#f58518",
    "gathered": "#54a24b",
    "buffers": "#88d27a", "activations": "#b279a2", "model buffers": "#9d755d", "held outputs": "#e45756",
    "correction": "#d8b5a5",
}  # fmt: skip
"""One colour for each kind of bytes, the same in every chart; bytes that stay for the whole step are at the bottom."""
_RED = "#d62728"
AnyChart: TypeAlias = "alt.VConcatChart | alt.LayerChart | alt.FacetChart"


class _InScript(json.JSONEncoder):
    """JSON for a page's script, escaped because a name with `</script>` would end the script."""

    def encode(self, o: object) -> str:
        return super().encode(o).replace("<", "\\u003c")


def check_plot_path(path: str | Path) -> Path:
    """Raise ValueError, before anything is computed, if a chart cannot be written: unknown suffix, missing folder
    or missing package.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"Plot file {str(path)!r} ends in {path.suffix!r}; use one of {', '.join(SUFFIXES)}.")
    if not path.parent.is_dir():
        raise ValueError(
            f"Plot file {str(path)!r}: folder {str(path.parent)!r} does not exist; create it, or give another."
        )
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"Plots need {error.name}, which is not installed; run: pip install 'hf_osdp[plot]'."
        ) from None
    return path


def save_chart(chart: AnyChart, path: str | Path) -> Path:
    """Write a chart in the format of the suffix; HTML includes all of its scripts and opens offline."""
    path = check_plot_path(path)
    options: dict[str, Any] = {
        ".html": {"inline": True, "json_kwds": {"cls": _InScript}},
        ".png": {"scale_factor": _PNG_SCALE},
    }
    chart.save(str(path), **options.get(path.suffix, {}))
    return path


def plan_chart(plan: Plan, inputs: PlanInputs, estimate: PlanEstimate, *, width: int = _WIDTH) -> AnyChart:
    """Return a chart of memory over the step with the limit, and, if the hardware is known, of time by stream below
    it. If it is narrower than usual, legends are below.
    """
    hardware, memory, charts = inputs.hardware, estimate.memory, []
    if hardware is not None:
        charts.append(_time_chart(stream_times(estimate), width))
    reserved = 0 if hardware is None else hardware.outside_bytes(memory.communicators)
    chart = alt.vconcat(_memory_chart(memory, reserved, plan.memory_limit_bytes, width), *charts).resolve_scale(
        color="independent"
    )
    styled = _styled(chart, f"{plan.model_name}, {plan.strategy} on {plan.hardware or f'{plan.world_size} devices'}")
    below: dict[str, Any] = {"orient": "bottom", "columns": 3, "labelFontSize": 12}
    return styled.configure_legend(**below) if width < _WIDTH else styled


def _memory_chart(memory: MemoryEstimate, reserved_bytes: int, limit_bytes: int | None, width: int) -> AnyChart:
    highest = max(limit_bytes or 0, memory.peak_bytes + reserved_bytes)
    scale, unit = _size_unit(highest)
    top = highest / scale * 1.12
    rows = moment_rows(memory, reserved_bytes, scale)
    kinds = [kind for kind in _COLORS if any(row["kind"] == kind for row in rows)]
    hidden = alt.Axis(labels=False, ticks=False, grid=False)
    x = alt.X("moment:Q", title="moments of a step, in order", axis=hidden, scale=alt.Scale(nice=False))
    y = alt.Y("size:Q", title=f"{unit} on one device", stack="zero", scale=alt.Scale(domain=[0, top], nice=False))
    color = alt.Color("kind:N", title=None, scale=alt.Scale(domain=kinds, range=[_COLORS[k] for k in kinds]))
    tooltip = ["unit:N", "phase:N", "kind:N", "bytes:N", "total:N"]
    area = (
        _chart(rows)
        .mark_area(interpolate="step-after")
        .encode(x=x, y=y, color=color, order="order:Q", tooltip=tooltip)
    )
    phases = (
        moment.phase.partition(":")[0] for moment in memory.moments
    )  # joins the parts of backward; the end has no name
    named = enumerate(name if name in ("forward", "backward") else "" for name in phases)
    starts = [
        {"name": name, "start": next(group)[0], "top": 0.97 * top} for name, group in groupby(named, key=itemgetter(1))
    ]
    rules = _chart(starts).mark_rule(color="#555", strokeDash=[2, 3]).encode(x="start:Q")
    names = _chart(starts).mark_text(align="left", dx=4, color="#333").encode(x="start:Q", y="top:Q", text="name:N")
    layers = [area, rules, names]
    if limit_bytes:
        layers += _limit_rule(limit_bytes, scale, {"y": "size:Q"}, {"x": alt.value(4)}, dy=-7)
    title = f"Memory over the step: peak {format_bytes(memory.peak_bytes + reserved_bytes)} in {memory.peak.phase} of {memory.peak.unit}"  # noqa: E501
    return alt.layer(*layers).properties(width=width, height=300, title=title)


def moment_rows(memory: MemoryEstimate, reserved_bytes: int, scale: int) -> list[dict[str, Any]]:
    """Return a row for each moment and kind of bytes, sizes in `scale` bytes; the last moment is repeated to give
    it a width.
    """
    drawn = [
        (moment, {**bytes_by_kind(moment.breakdown), "reserved": reserved_bytes})
        for moment in (*memory.moments, memory.moments[-1])
    ]
    kinds = {kind for _, parts in drawn for kind, nbytes in parts.items() if nbytes}
    order = list(_COLORS)
    return [
        {
            "moment": index, "unit": moment.unit, "phase": moment.phase, "kind": kind, "order": order.index(kind),
            "size": nbytes / scale, "bytes": format_bytes(nbytes),
            "total": format_bytes(moment.total_bytes + reserved_bytes),
        }
        for index, (moment, parts) in enumerate(drawn)
        for kind, nbytes in parts.items()
        if kind in kinds
    ]  # fmt: skip


def _size_unit(nbytes: int) -> tuple[int, str]:
    """Return the unit of an axis up to `nbytes`: its bytes and its name."""
    return (GIB, "GiB") if nbytes >= GIB else (2**20, "MiB")


def _time_chart(streams: Sequence[StreamTime], width: int) -> AnyChart:
    step = sum(stream.exposed_s for stream in streams)
    exposed, hidden = "in the step's time", "hidden behind compute"
    longest = max(max(stream.total_s, stream.exposed_s) for stream in streams) or 1.0  # with room for its label
    scale, unit = (1.0, "s") if step >= 1 else (1e3, "ms")
    rows = [
        {"stream": stream.name, "kind": kind, "time": scale * seconds, "text": format_seconds(seconds)}
        for stream in streams
        for kind, seconds in ((exposed, stream.exposed_s), (hidden, stream.hidden_s))
    ]
    y = alt.Y("stream:N", title=None, sort=[stream.name for stream in streams])
    bars = _chart(rows).mark_bar().encode(
        y=y,
        x=alt.X("time:Q", title=f"{unit} of one step", stack="zero",
                scale=alt.Scale(domain=[0, 1.1 * scale * longest], nice=False)),
        color=alt.Color("kind:N", title=None, scale=alt.Scale(domain=[exposed, hidden], range=["#e45756", "#bbbbbb"])),
        order=alt.Order("kind:N", sort="descending"),
        tooltip=["stream:N", "kind:N", "text:N"],
    )  # fmt: skip
    totals = [
        {"stream": s.name, "time": scale * max(s.total_s, s.exposed_s), "text": format_seconds(s.total_s)}
        for s in streams
        if s.total_s
    ]
    labels = _chart(totals).mark_text(align="left", dx=4).encode(y=y, x="time:Q", text="text:N")
    chart: AnyChart = (bars + labels).properties(
        width=width, height=170, title=f"Time of a step by stream: {format_seconds(step)} in all"
    )
    return chart


def frontier_chart(
    title: str, front: Sequence[SearchResult], strategies: Sequence[StrategyResult], limit_bytes: int
) -> AnyChart:
    """Return throughput against peak memory: the Pareto front, each strategy at its own best batch as a point, and
    the limit.
    """
    names = [row.label for row in strategies if row.result is not None]
    scale, unit = _size_unit(limit_bytes)
    points = [_point(result, "front", scale) for result in front]
    marks = [_point(row.result, row.label, scale) for row in strategies if row.result is not None]
    near = alt.Scale(zero=False, padding=30)
    x, y = (
        alt.X("size:Q", title=f"peak, {unit} on one device", scale=near),
        alt.Y("rate:Q", title="samples/s", scale=near),
    )
    where: dict[str, Any] = {"x": x, "y": y, "tooltip": ["name:N", "batch:N", "peak:N", "step:N", "rate:Q"]}
    line = _chart(points).mark_line(interpolate="step-after", point={"color": "#888"}, color="#888").encode(**where)
    domain = alt.Scale(domain=names)
    color, shape = (
        alt.Color("name:N", title="strategy", scale=domain),
        alt.Shape("name:N", title="strategy", scale=domain),
    )
    shown = _chart(marks).mark_point(size=130, filled=True, opacity=0.9).encode(**where, color=color, shape=shape)
    limit = _limit_rule(limit_bytes, scale, {"x": "size:Q"}, {"y": alt.value(12)}, dx=5)
    return _styled(alt.layer(line, *limit, shown).properties(width=_WIDTH, height=380), title)


def _limit_rule(
    limit_bytes: int, scale: int, at: dict[str, Any], across: dict[str, Any], **offset: Any
) -> list[alt.Chart]:
    chart = _chart([{"size": limit_bytes / scale, "text": f"limit {format_bytes(limit_bytes)}"}])
    rule = chart.mark_rule(color=_RED, strokeWidth=2).encode(**at)
    return [rule, chart.mark_text(align="left", color=_RED, **offset).encode(**at, **across, text="text:N")]


def _point(result: SearchResult, name: str, scale: int) -> dict[str, Any]:
    batch, peak, step, _ = batch_cells(result.plan)
    return {
        "name": name,
        "size": result.peak_bytes / scale,
        "rate": result.plan.samples_per_s,
        "step": step,
        "batch": batch,
        "peak": peak,
    }


def _chart(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    return alt.Chart({"values": list(rows)})


def _styled(chart: AnyChart, title: str) -> AnyChart:
    sizes: dict[str, Any] = {
        "axis": {"labelFontSize": 12, "titleFontSize": 12},
        "legend": {"labelFontSize": 12},
        "view": {"stroke": None},
    }
    styled: AnyChart = chart.properties(title=alt.TitleParams(title, anchor="start", fontSize=15)).configure(**sizes)
    return styled
