"""Charts of a plan: memory over the step, time by stream, the Pareto front. Saved as .png, .svg or .html without a browser.

Needs the extra `plot` (altair, vl-convert-python).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ..planner.cost.memory import MemoryBreakdown, MemoryEstimate
from ..planner.hardware import GIB
from ..planner.search.search import SearchResult, StrategyResult
from ..quantities import format_bytes, format_seconds
from .explain import StreamTime

SUFFIXES = (".png", ".svg", ".html")
_WIDTH, _PNG_SCALE = 760, 2
_COLORS = {
    "reserved": "#bab0ac", "parameters": "#4c78a8", "optimizer": "#9ecae9", "gradients": "#f58518", "gathered": "#54a24b",
    "buffers": "#88d27a", "activations": "#b279a2", "model buffers": "#9d755d", "correction": "#d8b5a5",
}  # fmt: skip
"""One colour a kind of bytes, the same in every chart; what is held throughout lies at the bottom."""


class _InScript(json.JSONEncoder):
    """JSON inside a page's script, which a name with `</script>` in it would end."""

    def encode(self, o: Any) -> str:
        return super().encode(o).replace("<", "\\u003c")


def check_plot_path(path: str | Path) -> Path:
    """Refuse a file that no chart can be written to, before anything is computed.

    Raises:
        ValueError: the suffix is none of `SUFFIXES`, the folder is missing, or the packages are not installed.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"Plot file {str(path)!r} ends in {path.suffix!r}; use one of {', '.join(SUFFIXES)}.")
    if not path.parent.is_dir():
        raise ValueError(f"Plot file {str(path)!r}: there is no folder {str(path.parent)!r}; make it, or name another.")
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise ValueError(f"Plots need {error.name}, which is not installed; run: pip install 'hf_osdp[plot]'.") from None
    return path


def save_chart(chart: Any, path: str | Path) -> Path:
    """Write a chart in the format that the suffix names; HTML holds all of its scripts and opens offline.

    Raises:
        ValueError: see `check_plot_path`.
    """
    path = check_plot_path(path)
    if path.suffix == ".html":
        chart.save(str(path), inline=True, json_kwds={"cls": _InScript})
    elif path.suffix == ".png":
        chart.save(str(path), scale_factor=_PNG_SCALE)
    else:
        chart.save(str(path))
    return path


def plan_chart(title: str, memory: MemoryEstimate, reserved_bytes: int, limit_bytes: int | None, streams: Sequence[StreamTime]) -> Any:
    """Memory over the step above time by stream.

    Args:
        title: what the plan is for.
        memory: its moments.
        reserved_bytes: device memory that no tensor can have.
        limit_bytes: drawn as a rule; None for none.
        streams: seconds by kind of work; empty where they are not known.
    """
    import altair as alt

    charts = [memory_chart(memory, reserved_bytes, limit_bytes)]
    if streams:
        charts.append(time_chart(streams))
    joined = alt.vconcat(*charts).resolve_scale(color="independent")
    return _styled(joined.properties(title=alt.TitleParams(title, anchor="start", fontSize=15)))


def memory_chart(memory: MemoryEstimate, reserved_bytes: int, limit_bytes: int | None) -> Any:
    """Stacked area of the kinds of bytes over the moments of a step, phases named above, the limit as a rule."""
    import altair as alt

    scale, unit = _size_unit(max(limit_bytes or 0, memory.peak_bytes + reserved_bytes))
    rows = moment_rows(memory, reserved_bytes, scale)
    kinds = [kind for kind in _COLORS if any(row["kind"] == kind for row in rows)]
    top = max(limit_bytes or 0, memory.peak_bytes + reserved_bytes) / scale * 1.12
    x = alt.X(
        "moment:Q", title="moments of a step, in order", axis=alt.Axis(labels=False, ticks=False, grid=False), scale=alt.Scale(nice=False)
    )
    y = alt.Y("size:Q", title=f"{unit} on one device", stack="zero", scale=alt.Scale(domain=[0, top], nice=False))
    color = alt.Color("kind:N", title=None, scale=alt.Scale(domain=kinds, range=[_COLORS[k] for k in kinds]))
    area = alt.Chart(alt.Data(values=rows)).mark_area(interpolate="step-after").encode(
        x=x, y=y, color=color, order="order:Q", tooltip=["unit:N", "phase:N", "kind:N", "bytes:N", "total:N"]
    )  # fmt: skip
    bands = alt.Data(values=_phase_bands(memory, top))
    start = alt.X("start:Q")
    rules = alt.Chart(bands).mark_rule(color="#555", strokeDash=[2, 3]).encode(x=start)
    names = alt.Chart(bands).mark_text(align="left", dx=4, color="#333").encode(x=start, y=alt.Y("top:Q"), text="name:N")
    layers = [area, rules, names]
    if limit_bytes:
        at = alt.Data(values=[{"size": limit_bytes / scale, "text": f"limit {format_bytes(limit_bytes)}"}])
        layers.append(alt.Chart(at).mark_rule(color="#d62728", strokeWidth=2).encode(y="size:Q"))
        layers.append(alt.Chart(at).mark_text(align="left", dy=-7, color="#d62728").encode(x=alt.value(4), y="size:Q", text="text:N"))
    title = f"Memory over the step: peak {format_bytes(memory.peak_bytes + reserved_bytes)} in {memory.peak.phase} of {memory.peak.unit}"
    return alt.layer(*layers).properties(width=_WIDTH, height=300, title=title)


def moment_rows(memory: MemoryEstimate, reserved_bytes: int, scale: int) -> list[dict]:
    """One row for each moment and kind of bytes that occurs, sizes in `scale` bytes; the last moment is drawn one moment wide."""
    kinds = [name for name in MemoryBreakdown.__slots__ if any(getattr(m.breakdown, name) for m in memory.moments)]
    order = list(_COLORS)
    rows = []
    for index, moment in enumerate((*memory.moments, memory.moments[-1])):
        parts = {name.replace("_", " "): getattr(moment.breakdown, name) for name in kinds}
        parts |= {"reserved": reserved_bytes} if reserved_bytes else {}
        rows += [
            {
                "moment": index, "unit": moment.unit, "phase": moment.phase, "kind": kind, "order": order.index(kind),
                "size": nbytes / scale, "bytes": format_bytes(nbytes), "total": format_bytes(moment.total_bytes + reserved_bytes),
            }
            for kind, nbytes in parts.items()
        ]  # fmt: skip
    return rows


def _phase_bands(memory: MemoryEstimate, top: float) -> list[dict]:
    """Where forward, backward and the end of the step begin. The parts of backward are one phase here."""

    def phase(pair) -> str:
        name = pair[1].phase.partition(":")[0]
        return name if name in ("forward", "backward") else "end"

    bands = [{"name": name, "start": next(group)[0], "top": 0.97 * top} for name, group in groupby(enumerate(memory.moments), key=phase)]
    return [band if band["name"] != "end" else {**band, "name": ""} for band in bands]


def _size_unit(nbytes: int) -> tuple[int, str]:
    """Bytes of the unit that an axis up to so many is read in."""
    return (GIB, "GiB") if nbytes >= GIB else (2**20, "MiB")


def time_chart(streams: Sequence[StreamTime]) -> Any:
    """Bars of seconds by kind of work: what the step waits for, and what is hidden behind compute."""
    import altair as alt

    step = sum(stream.exposed_s for stream in streams)
    exposed, hidden = "in the step's time", "hidden behind compute"
    longest = max(max(stream.total_s, stream.exposed_s) for stream in streams) or 1.0  # with room for its label
    scale, unit = (1.0, "s") if step >= 1 else (1e3, "ms")
    rows = [
        {"stream": stream.name, "kind": kind, "time": scale * seconds, "text": format_seconds(seconds)}
        for stream in streams
        for kind, seconds in ((exposed, stream.exposed_s), (hidden, stream.hidden_s))
    ]
    bars = alt.Chart(alt.Data(values=rows)).mark_bar().encode(
        y=alt.Y("stream:N", title=None, sort=[stream.name for stream in streams]),
        x=alt.X("time:Q", title=f"{unit} of one step", stack="zero", scale=alt.Scale(domain=[0, 1.1 * scale * longest], nice=False)),
        color=alt.Color("kind:N", title=None, scale=alt.Scale(domain=[exposed, hidden], range=["#e45756", "#bbbbbb"])),
        order=alt.Order("kind:N", sort="descending"),
        tooltip=["stream:N", "kind:N", "text:N"],
    )  # fmt: skip
    totals = [
        {"stream": s.name, "time": scale * max(s.total_s, s.exposed_s), "text": format_seconds(s.total_s)} for s in streams if s.total_s
    ]
    labels = alt.Chart(alt.Data(values=totals)).mark_text(align="left", dx=4).encode(
        y=alt.Y("stream:N", sort=[stream.name for stream in streams]), x="time:Q", text="text:N"
    )  # fmt: skip
    return (bars + labels).properties(width=_WIDTH, height=170, title=f"Time of a step by stream: {format_seconds(step)} in all")


def frontier_chart(title: str, front: Sequence[SearchResult], strategies: Sequence[StrategyResult], limit_bytes: int) -> Any:
    """Throughput against peak memory: the front as a line, each strategy at its own best batch as a point, the limit as a rule."""
    import altair as alt

    names = [row.strategy.value for row in strategies if row.result is not None]
    scale, unit = _size_unit(limit_bytes)
    points = [_point(result, "front", scale) for result in front]
    marks = [_point(row.result, row.strategy.value, scale) for row in strategies if row.result is not None]
    domain = _padded([p["size"] for p in (*points, *marks)] + [limit_bytes / scale]), _padded([p["rate"] for p in (*points, *marks)])
    x = alt.X("size:Q", title=f"peak, {unit} on one device", scale=alt.Scale(domain=domain[0], nice=False))
    y = alt.Y("rate:Q", title="samples/s", scale=alt.Scale(domain=domain[1], nice=False))
    tooltip = ["name:N", "batch:N", "peak:N", "step:N", "rate:Q"]
    line = (
        alt.Chart(alt.Data(values=points))
        .mark_line(interpolate="step-after", point={"color": "#888"}, color="#888")
        .encode(x=x, y=y, tooltip=tooltip)
    )
    shown = alt.Chart(alt.Data(values=marks)).mark_point(size=130, filled=True, opacity=0.9).encode(
        x=x, y=y, tooltip=tooltip,
        color=alt.Color("name:N", title="strategy", scale=alt.Scale(domain=names)),
        shape=alt.Shape("name:N", title="strategy", scale=alt.Scale(domain=names)),
    )  # fmt: skip
    at = alt.Data(values=[{"size": limit_bytes / scale, "text": f"limit {format_bytes(limit_bytes)}"}])
    rule = alt.Chart(at).mark_rule(color="#d62728", strokeWidth=2).encode(x="size:Q")
    text = alt.Chart(at).mark_text(align="left", dx=5, color="#d62728").encode(x="size:Q", y=alt.value(12), text="text:N")
    chart = alt.layer(line, rule, text, shown).properties(
        width=_WIDTH, height=380, title=alt.TitleParams(title, anchor="start", fontSize=15)
    )
    return _styled(chart)


def _point(result: SearchResult, name: str, scale: int) -> dict:
    plan = result.plan
    return {
        "name": name, "size": plan.peak_bytes / scale, "rate": plan.samples_per_s, "step": format_seconds(plan.step_s),
        "batch": f"{plan.micro_batch_size} x {plan.accumulation_steps}", "peak": format_bytes(plan.peak_bytes),
    }  # fmt: skip


def _padded(values: Sequence[float]) -> list[float]:
    """An axis that shows all values with a margin."""
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.1 * high
    return [max(0.0, low - margin), math.nextafter(high + margin, math.inf)]


def _styled(chart: Any) -> Any:
    return chart.configure_view(stroke=None).configure_axis(labelFontSize=12, titleFontSize=12).configure_legend(labelFontSize=12)
