"""The planner as a web page, for `hf-osdp app` and for a Space. Needs the extra `app`."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import vl_convert
from rich.table import Table

from ..modeling.catalogue import catalogue
from ..planner.hardware import GIB
from ..planner.presets import preset_names
from ..quantities import format_bytes
from ..report.plan_file import PlanInputs
from ..report.plots import NARROW, plan_chart
from ..report.tables import batch_cells, comparison_table, plan_caption, plan_table, rates_line, what_if_table
from .options import flag_of
from .output import error_line
from .question import Planned, Planner, Question

_NAMES = [field.name for field in fields(Question)]
_LABELS = {
    "model": "Model: a hub id", "device": "Devices", "num_nodes": "Machines", "devices_per_node": "Devices in each",
    "memory_limit": "Limit per device", "precision": "Precision", "sequence_length": "Tokens a sample",
    "global_batch_size": "Samples a step", "compile": "Compile blocks with torch.compile",
}  # fmt: skip
"""Field of a question → its name on the page."""
_FIELD_OF_FLAG = {flag_of(name): f'"{label}"' for name, label in _LABELS.items()}
_CONFIG_BYTES = 2**18
_KEEP_LINK = (
    "() => { const link = document.querySelector('#link a'); if (link) history.replaceState(null, '', link.href) }"
)
"""Writes the question into the browser's address."""
_KEYS = """() => {
    addEventListener('keydown', ({key, target}) => {
        const field = target.closest('#form input, #memory_limit textarea')
        if (key === 'Enter' && field) setTimeout(() => document.querySelector('#ask').click())
    })
    addEventListener('change', ({target}) => {
        const field = target.closest('#what-ifs input')
        field?.dispatchEvent(new Event(field.type === 'range' ? 'pointerup' : 'blur', {bubbles: true}))
    })
}"""
"""Enter in the form plans; a what-if changed by keys is answered as one that the mouse releases."""
_STYLE = Path(__file__).with_suffix(".css")
_TITLE = """# The fastest way to train a model on these devices
For each part of a model, hf_osdp decides how to shard it within the memory limit. Planning needs no GPU and no weights."""  # noqa: E501


def build() -> gr.Blocks:
    with gr.Blocks(title="hf_osdp", analytics_enabled=False) as page:
        gr.HTML(f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>")
        gr.Markdown(_TITLE)
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                form, opened = _form()
                ask = gr.Button("Plan", variant="primary", elem_id="ask")
                link = _place("link")
            with gr.Column(scale=3, min_width=320):
                error = _place("error", visible=False)
                with gr.Column(visible=False) as answers:
                    shown = _answers()
        asked = gr.State()
        _Page(form, opened, [asked, link, error, answers, *shown]).connect(page, ask)
    return page


def _form() -> tuple[list[Any], gr.Accordion]:
    """Return one input for each field of a question, in the same order, and what folds the config.json away."""
    start = Question()
    with gr.Group(elem_id="form"):
        model = _choice("model", list(catalogue()))
        with gr.Accordion("Or its config.json", open=False, elem_id="or_config") as opened:
            config = gr.Textbox(label="Text of the file", lines=2, max_lines=4, elem_id="config")
            file = gr.File(show_label=False, file_types=[".json"], height=130, elem_id="file")
        device = _choice("device", list(preset_names()))
        with gr.Row():
            nodes, devices = _number("num_nodes"), _number("devices_per_node")
        with gr.Row():
            limit = gr.Textbox(
                start.memory_limit, label=_LABELS["memory_limit"], placeholder="all, or 40GiB", min_width=100,
                elem_id="memory_limit",
            )  # fmt: skip
            precision = _choice("precision", [("default", ""), "bf16", "fp16", "no"])
        with gr.Row():
            length, batch = _number("sequence_length"), _number("global_batch_size")
        compiles = gr.Checkbox(start.compile, label=_LABELS["compile"], elem_id="compile")
    file.upload(_read, file, [model, config])
    model.input(None, [model, config], config, js="(model, config) => model ? '' : config")
    config.change(None, [model, config], model, js="(model, config) => config ? '' : model")
    return [model, config, device, devices, nodes, limit, length, batch, precision, compiles], opened


def _choice(name: str, choices: Sequence[str | tuple[str, str]]) -> gr.Dropdown:
    """Return a list that also accepts other values, so that the planner reports a wrong value of a link."""
    return gr.Dropdown(
        choices, value=getattr(Question(), name), label=_LABELS[name], allow_custom_value=True, min_width=100,
        elem_id=name,
    )  # fmt: skip


def _number(name: str) -> gr.Number:
    return gr.Number(getattr(Question(), name), label=_LABELS[name], min_width=100, elem_id=name)


def _place(name: str, *, visible: bool = True) -> gr.HTML:
    return gr.HTML(elem_id=name, elem_classes="place", apply_default_css=False, visible=visible)


def _read(path: str) -> tuple[str, str]:
    """Return an empty model name and the text of a config.json."""
    file = Path(path)
    if file.stat().st_size > _CONFIG_BYTES:
        raise gr.Error(
            f"The file has {format_bytes(file.stat().st_size)}; a config.json may have at most"
            f" {format_bytes(_CONFIG_BYTES)}."
        )
    return "", file.read_text(encoding="utf-8", errors="replace")


def _answers() -> list[Any]:
    """Return the elements that show the answers: those of `_shown`, then what-if and comparison."""
    plan = _place("plan")
    chart = _place("chart")
    comparison = _place("comparison")
    code: dict[str, Any] = {"interactive": False, "lines": 1, "show_line_numbers": False}
    script = gr.Code(label="In the script", language="python", elem_id="script", **code)
    launch = gr.Code(label="Or osdp.yaml, for an unchanged script", language="yaml", elem_id="launch", **code)
    command = gr.Textbox(
        label="The same plan on the command line", lines=2, interactive=False, buttons=["copy"], elem_id="command"
    )
    with gr.Row(elem_id="what-ifs"):
        limit = gr.Slider(1, 80, step=1, label="What if: GiB per device", elem_id="limit")
        devices = gr.Slider(1, 16, step=1, label="What if: devices per machine", elem_id="devices")
    changed = _place("what-if")
    return [plan, chart, script, launch, command, limit, devices, changed, comparison]


def _shown(planned: Planned) -> list[Any]:
    """Return the values of `_answers` for a plan, before a what-if and the comparison."""
    plan, hardware = planned.plan, planned.problem.hardware
    batch, peak, step, rate = batch_cells(plan)
    tiles = {"per step": step, "samples/s": rate, "peak": peak, "samples x micro-steps": batch}
    figures = "".join(f"<div><b>{escape(text)}</b>{name}</div>" for name, text in tiles.items())
    lines = (
        *plan_caption(plan, planned.estimate, hardware),
        rates_line(plan, planned.problem.description, hardware), planned.case.precision_line, *planned.warnings,
    )  # fmt: skip
    caption = "".join(f"<p>{escape(_with_fields(line))}</p>" for line in lines)
    table = _table(plan_table(plan, planned.problem.description, planned.estimate))
    most = hardware.device.memory_bytes // GIB
    return [
        _html(f'<div class="figures">{figures}</div>{table}{caption}'),
        _picture(planned),
        planned.script,
        planned.launch_file,
        planned.question.command,
        gr.update(maximum=most, value=min(most, round(planned.problem.memory_limit_bytes / GIB))),
        gr.update(maximum=max(16, 2 * hardware.devices_per_node), value=hardware.devices_per_node),
        _html("<p>Move a slider to plan with another limit or number of devices.</p>"),
        _html("<p>Comparing strategies.</p>"),
    ]


class _Page:
    """Handlers of the page's events: opening it, asking for a plan, moving a slider.

    Outputs are the question, its link, an error, the answers as a whole, and each of `_answers`.
    """

    def __init__(self, form: list[Any], opened: gr.Accordion, outputs: list[Any]) -> None:
        self._planner, self._form, self._opened, self._outputs = Planner(), form, opened, outputs

    def connect(self, blocks: gr.Blocks, ask: gr.Button) -> None:
        """Register all events; one runs at a time, because each occupies a CPU core."""
        asked, link, error, answers, *_, limit, devices, changed, comparison = self._outputs
        one_at_a_time: dict[str, Any] = {"concurrency_id": "planner", "concurrency_limit": 1}
        one_at_a_time["trigger_mode"] = "always_last"  # what is asked meanwhile is answered next
        reset = [asked, error, answers]
        loaded = blocks.load(self.open, None, [*self._form, self._opened, *reset])
        for event in (ask.click(self.submit, self._form, reset, trigger_mode="always_last"), loaded):
            answered = event.then(self.answer, asked, self._outputs, show_progress_on=[error, link], **one_at_a_time)
            answered.then(None, js=_KEEP_LINK)
            answered.then(self.compare, asked, comparison, **one_at_a_time)
        gr.on([limit.release, devices.release], self.change, [asked, limit, devices], changed, **one_at_a_time)
        blocks.load(None, js=_KEYS)

    def open(self, request: gr.Request) -> list[Any]:
        if not request.query_params:
            return [gr.skip()] * (len(self._form) + 4)
        try:
            question = Question.of_link(request.query_params)
        except ValueError as error:
            shown = gr.update(value=_error(error, Question()), visible=True)
            return [*[gr.skip()] * (len(self._form) + 1), None, shown, gr.skip()]
        values = [getattr(question, name) for name in _NAMES]
        return [*values, gr.update(open=bool(question.config)), *self.submit(*values)]

    def submit(self, *values: Any) -> list[Any]:
        """Return the question in the form, and hide earlier answers."""
        shown = gr.update(value=_html("<p>Planning.</p>"), visible=True)
        return [Question(**dict(zip(_NAMES, values, strict=True))), shown, gr.update(visible=False)]

    def answer(self, question: Question | None) -> list[Any]:
        if question is None:
            return [gr.skip()] * len(self._outputs)
        try:
            planned = self._planner.plan(question)
        except Exception as error:
            return [None, _link(question), _error(error, question), *[gr.skip()] * (len(self._outputs) - 3)]
        return [question, _link(question), gr.update(visible=False), gr.update(visible=True), *_shown(planned)]

    def compare(self, question: Question | None) -> str:
        """Compare strategies for the answered question, if there is one."""
        if question is None:
            return ""
        planned = self._planner.plan(question)
        return _html(_table(comparison_table(planned.compared, planned.problem.memory_limit_bytes)))

    def change(self, question: Question, gib: float, devices: int) -> str:
        try:
            return _html(_table(what_if_table(self._planner.what_if(question, f"{gib:g}GiB", devices))))
        except Exception as error:
            return _error(error, question)


def _error(error: Exception, question: Question) -> str:
    """Return the command line's error message, with the page's fields in place of flags; raise errors that the input
    did not cause.
    """
    if (line := error_line(error, ["plan", *question.options])) is None:
        raise error
    line = _with_fields(line.partition("; see hf-osdp ")[0])
    if " --" in line or "(--" in line:
        line = f"{line.rstrip('.')}. Flags with -- are those of hf-osdp plan."
    return _html(f'<div class="error">{escape(line)}</div>')


def _with_fields(line: str) -> str:
    return re.sub("--[a-z-]+", lambda flag: _FIELD_OF_FLAG.get(flag[0], flag[0]), line)


def _link(question: Question) -> str:
    if not question.link:
        return _html("<p>The config.json is too long for a link to this question.</p>")
    return _html(f'<p><a href="{escape(question.link)}">Link to this question</a></p>')


def _picture(planned: Planned) -> str:
    """Return the plan's chart as an SVG image, with a narrow one for narrow pages."""

    def source(**size: int) -> str:
        chart = plan_chart(planned.plan, PlanInputs.of(planned.problem), planned.estimate, **size)
        svg = vl_convert.vegalite_to_svg(chart.to_dict())
        return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"

    return _html(
        f'<picture><source media="(max-width: 600px)" srcset="{source(width=NARROW)}"><img src="{source()}"'
        ' alt="Memory of one device over a step, and time by stream"></picture>'
    )


def _table(table: Table) -> str:
    """Return a table of the terminal as HTML, with its caption below."""

    def row(tag: str, cells: Iterable[object]) -> str:
        named = zip(cells, table.columns, strict=True)
        return (
            "<tr>"
            + "".join(
                f'<{tag} class="{column.justify}" data-name="{escape(str(column.header))}">{escape(str(cell))}</{tag}>'
                for cell, column in named
            )
            + "</tr>"
        )

    head = row("th", (column.header for column in table.columns))
    body = "".join(row("td", cells) for cells in zip(*(column.cells for column in table.columns), strict=True))
    below = "".join(f"<p>{escape(line)}</p>" for line in str(table.caption or "").splitlines())
    return f"<table><caption>{escape(str(table.title))}</caption>{head}{body}</table>{below}"


def _html(content: str) -> str:
    return f'<div class="osdp">{content}</div>'
