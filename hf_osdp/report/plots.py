"""Charts of reports (`content.py`) as .png, .svg or .html, without a browser. Needs the extra `plot` (altair,
vl-convert-python).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from ..planner.hardware import GIB
from ..quantities import format_bytes, format_seconds
from .content import Content
from .tables import batch_cells

with suppress(ImportError):  # `check_plot_path` names the missing package
    import altair as alt

SUFFIXES = (".png", ".svg", ".html")
_WIDTH = 760
"""Width of a plot in pixels."""
_COLORS = {
    "reserved": "#bab0ac", "parameters": "#4c78a8", "optimizer": "#9ecae9", "gradients": "#f58518",
    "gathered": "#54a24b",
    "buffers": "#88d27a", "activations": "#b279a2", "model buffers": "#9d755d", "held outputs": "#e45756",
}  # fmt: skip
"""One colour for each kind of bytes, the same in every chart; bytes that stay for the whole step are at the bottom."""
_RED = "#d62728"
AnyChart: TypeAlias = "alt.VConcatChart | alt.LayerChart | alt.FacetChart"


class _InScript(json.JSONEncoder):
    """JSON for a page's script, escaped because a name with `</script>` would end the script."""

    def encode(self, o: object) -> str:
        return super().encode(o).replace("<", "\\u003c")


def check_plot_path(path: str | Path) -> None:
    """Raise ValueError, before anything is computed, if a chart cannot be written: unknown suffix or missing
    package.
    """
    if (suffix := Path(path).suffix) not in SUFFIXES:
        raise ValueError(f"Plot file {str(path)!r} ends in {suffix!r}; use one of {', '.join(SUFFIXES)}.")
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"Plots need {error.name}, which is not installed; run: pip install 'hf_osdp[plot]'."
        ) from None


def save_chart(chart: AnyChart, path: str | Path) -> None:
    """Write a chart in the format of the suffix; HTML includes all of its scripts and opens offline."""
    options: dict[str, Any] = {".html": {"inline": True, "json_kwds": {"cls": _InScript}}, ".png": {"scale_factor": 2}}
    chart.save(str(path), **options.get(Path(path).suffix, {}))


def report_chart(content: Content) -> AnyChart:
    """Return the chart of a report: of a comparison its front, of a plan the memory over the step with the limit, and
    below it, if the hardware is known, the time by stream.
    """
    if "front" in content:
        return _front_chart(content)
    plan, estimated = content["plan"], content["estimated"]
    charts = [_memory_chart(estimated, plan["memory_limit_bytes"])]
    charts += [_time_chart(estimated["streams"])] if estimated["streams"] else []
    chart = alt.vconcat(*charts).resolve_scale(color="independent")
    where = plan["hardware"] or f"{plan['world_size']} devices"
    return _styled(chart, f"{plan['model_name']}, {plan['strategy']} on {where}")


def _memory_chart(estimated: Content, limit_bytes: int | None) -> AnyChart:
    peak_bytes = estimated["peak_bytes"] + sum(estimated["outside"].values())
    most = max(limit_bytes or 0, peak_bytes)
    scale, unit = _size_unit(most)
    rows, top = moment_rows(estimated, scale), 1.12 * most / scale
    kinds = [kind for kind in _COLORS if any(row["kind"] == kind for row in rows)]
    hidden = alt.Axis(labels=False, ticks=False, grid=False)
    area = _chart(rows).mark_area(interpolate="step-after").encode(
        x=alt.X("moment:Q", title="moments of a step, in order", axis=hidden, scale=alt.Scale(nice=False)),
        y=alt.Y("size:Q", title=f"{unit} on one device", stack="zero", scale=alt.Scale(domain=[0, top], nice=False)),
        color=alt.Color("kind:N", title=None, scale=alt.Scale(domain=kinds, range=[_COLORS[k] for k in kinds])),
        order="order:Q",
        tooltip=["unit:N", "phase:N", "kind:N", "bytes:N", "total:N"],
    )  # fmt: skip
    phases = (moment["phase"].partition(":")[0] for moment in estimated["moments"])  # joins the parts of backward
    named = enumerate(name if name in ("forward", "earlier backward", "backward") else "" for name in phases)
    starts = [
        {"name": name, "start": next(group)[0], "top": 0.97 * top} for name, group in groupby(named, key=itemgetter(1))
    ]
    rules = _chart(starts).mark_rule(color="#555", strokeDash=[2, 3]).encode(x="start:Q")
    names = _chart(starts).mark_text(align="left", dx=4, color="#333").encode(x="start:Q", y="top:Q", text="name:N")
    limit = (
        _limit_rule(limit_bytes, scale, {"y": "size:Q"}, {"x": alt.value(4)}, align="left", dy=-7)
        if limit_bytes
        else []
    )
    where = f"{estimated['peak_phase']} of {estimated['peak_unit']}"
    title = f"Memory over the step: peak {format_bytes(peak_bytes)} in {where}"
    return alt.layer(area, rules, names, *limit).properties(width=_WIDTH, height=300, title=title)


def moment_rows(estimated: Content, scale: int) -> list[Content]:
    """Return a row for each moment and kind of bytes, sizes in `scale` bytes; the last moment is repeated to give
    it a width.
    """
    reserved, moments = sum(estimated["outside"].values()), estimated["moments"]
    drawn = [(moment, {**moment["bytes"], "reserved": reserved}) for moment in (*moments, moments[-1])]
    kinds = {kind for _, parts in drawn for kind, nbytes in parts.items() if nbytes}
    return [
        {
            "moment": index, "unit": moment["unit"], "phase": moment["phase"], "kind": name, "order": order,
            "size": parts.get(kind, 0) / scale, "bytes": format_bytes(parts.get(kind, 0)),
            "total": format_bytes(sum(parts.values())),
        }
        for index, (moment, parts) in enumerate(drawn)
        for order, name in enumerate(_COLORS)
        if (kind := name.replace(" ", "_")) in kinds
    ]  # fmt: skip


def _size_unit(nbytes: int) -> tuple[int, str]:
    """Return the unit of an axis up to `nbytes`: its bytes and its name."""
    return (GIB, "GiB") if nbytes >= GIB else (2**20, "MiB")


def _time_chart(streams: Sequence[Content]) -> AnyChart:
    step = sum(stream["exposed_s"] for stream in streams)
    colors = {"in the step's time": "#e45756", "hidden behind compute": "#bbbbbb"}
    scale, unit = (1.0, "s") if step >= 1 else (1e3, "ms")
    rows = [
        {"stream": stream["name"], "kind": kind, "time": scale * seconds, "text": format_seconds(seconds)}
        for stream in streams
        for kind, seconds in zip(colors, (stream["exposed_s"], stream["hidden_s"]), strict=True)
    ]
    totals = [
        {"stream": one["name"], "time": scale * max(one["total_s"], one["exposed_s"]),
         "text": format_seconds(one["total_s"])}
        for one in streams
    ]  # fmt: skip
    y = alt.Y("stream:N", title=None, sort=[stream["name"] for stream in streams])
    top = 1.1 * max(total["time"] for total in totals) or 1.0  # with room for its label
    bars = _chart(rows).mark_bar().encode(
        x=alt.X("time:Q", title=f"{unit} of one step", stack="zero", scale=alt.Scale(domain=[0, top], nice=False)),
        y=y,
        color=alt.Color("kind:N", title=None, scale=alt.Scale(domain=list(colors), range=list(colors.values()))),
        order=alt.Order("kind:N", sort="descending"),
        tooltip=["stream:N", "kind:N", "text:N"],
    )  # fmt: skip
    labels = _chart(totals).mark_text(align="left", dx=4).encode(y=y, x="time:Q", text="text:N")
    title = f"Time of a step by stream: {format_seconds(step)} in all"
    return alt.layer(bars, labels).properties(width=_WIDTH, height=170, title=title)


def _front_chart(content: Content) -> AnyChart:
    """Return throughput against peak memory: the Pareto front, each strategy at its own best batch as a point, and
    the limit.
    """
    found, limit_bytes = [row for row in content["strategies"] if "reason" not in row], content["room_bytes"]
    scale, unit = _size_unit(limit_bytes)
    sizes = [nbytes / scale for nbytes in (limit_bytes, *(row["peak_bytes"] for row in (*found, *content["front"])))]
    around = 0.05 * (max(sizes) - min(sizes) or max(sizes))
    near = alt.Scale(domain=[max(0.0, min(sizes) - around), max(sizes) + around], nice=False)
    where: dict[str, Any] = {
        "x": alt.X("size:Q", title=f"peak, {unit} on one device", scale=near),
        "y": alt.Y("rate:Q", title="samples/s", scale=alt.Scale(zero=True, nice=True)),
        "tooltip": ["name:N", "batch:N", "peak:N", "step:N", "rate:Q"],
    }
    line = _points(content["front"], scale).mark_line(interpolate="step-after", point={"color": "#888"}, color="#888")
    strategy: dict[str, Any] = {"title": "strategy", "scale": alt.Scale(domain=[row["strategy"] for row in found])}
    shown = _points(found, scale).mark_point(size=130, filled=True, opacity=0.9)
    shown = shown.encode(**where, color=alt.Color("name:N", **strategy), shape=alt.Shape("name:N", **strategy))
    less = "" if limit_bytes == content["memory_limit_bytes"] else " less margin:"
    limit = _limit_rule(limit_bytes, scale, {"x": "size:Q"}, {"y": alt.value(368)}, align="right", dx=-5, less=less)
    layers = alt.layer(line.encode(**where), *limit, shown).properties(width=_WIDTH, height=380)
    return _styled(layers, f"{content['model']} on {content['hardware']}: fastest plan for each amount of memory")


def _limit_rule(
    limit_bytes: int, scale: int, at: dict[str, Any], across: dict[str, Any], *, less: str = "", **place: Any
) -> list[alt.Chart]:
    chart = _chart([{"size": limit_bytes / scale, "text": f"limit{less} {format_bytes(limit_bytes)}"}])
    rule = chart.mark_rule(color=_RED, strokeWidth=2).encode(**at)
    return [rule, chart.mark_text(color=_RED, **place).encode(**at, **across, text="text:N")]


def _points(rows: Sequence[Content], scale: int) -> alt.Chart:
    keys = ("batch", "peak", "step")
    return _chart([
        {"name": row.get("strategy", "front"), "size": row["peak_bytes"] / scale, "rate": row["samples_per_s"],
         **dict(zip(keys, batch_cells(row), strict=False))}
        for row in rows
    ])  # fmt: skip


def _chart(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    return alt.Chart({"values": list(rows)})


def _styled(chart: AnyChart, title: str) -> AnyChart:
    axis, legend = {"labelFontSize": 12, "titleFontSize": 12}, {"labelFontSize": 12}
    titled = chart.properties(title=alt.TitleParams(title, anchor="start", fontSize=15))
    return titled.configure(axis=axis, legend=legend, view={"stroke": None})
