"""The planner as a web page, for `hf-osdp app` and for a Space. Needs the extra `app`.

A question is the words of `hf-osdp plan`; the answer is what that command and `hf-osdp compare` print and draw.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import typer
import vl_convert
from rich.console import Console

from ..modeling.catalogue import catalogue
from ..planner.presets import preset_names
from ..preparation.cache import warnings_of_package
from ..report.content import comparison_content, report_content
from ..report.plan_file import PlanInputs
from ..report.plots import report_chart
from ..report.tables import Part, comparison_table, plan_parts
from .cases import Case
from .options import Request, flag_of, with_flags
from .output import error_line

_START: dict[str, Any] = {
    "device": "a100-80", "num_nodes": 1, "devices_per_node": 8, "memory_limit": "", "precision": "",
    "sequence_length": 4096, "global_batch_size": 64, "compile": False,
}  # fmt: skip
"""Flags of `hf-osdp plan` in the form, with the values that it opens with."""
_CHOICES = {"device": list(preset_names()), "precision": ["", "bf16", "fp16", "no"]}
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_ALT = "Memory of one device over a step, and time by stream"
_STYLE = Path(__file__).with_suffix(".css")
_TITLE = """# The fastest way to train a model on these devices
For each part of a model, hf_osdp decides how to shard it within the memory limit. Planning needs no GPU and no weights."""  # noqa: E501


def build() -> gr.Blocks:
    with gr.Blocks(title="hf_osdp", analytics_enabled=False) as page:
        gr.HTML(f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>")
        gr.Markdown(_TITLE)
        with gr.Row():
            with gr.Column(scale=1, min_width=300), gr.Group(elem_id="form"):
                hub_id = gr.Dropdown(
                    list(catalogue()), label="Model: a hub id", allow_custom_value=True, elem_id="model"
                )
                file = gr.File(label="Or its config.json", file_types=[".json"], height=130, elem_id="config")
                form = [hub_id, file, *(_field(name, start) for name, start in _START.items())]
                ask = gr.Button("Plan", variant="primary", elem_id="ask")
                cancel = gr.Button("Cancel", visible=False, elem_id="cancel")
            with gr.Column(scale=3, min_width=320):
                plan, picture, comparison = (
                    gr.HTML(elem_id=name, apply_default_css=False) for name in ("plan", "chart", "comparison")
                )
                script = gr.Code(label="To copy", language="python", interactive=False, elem_id="script")
        entered = [field.submit for field in form if isinstance(field, (gr.Number, gr.Textbox))]
        shown = [plan, picture, script, comparison, ask, cancel]
        asking = gr.on(
            [ask.click, *entered], _waiting_for, form, shown, trigger_mode="multiple"
        )  # answered one by one
        asking.then(lambda: _buttons(waits=False), None, [ask, cancel], queue=False)
        cancelled = (_html("Cancelled."), "", "", "", *_buttons(waits=False))
        cancel.click(lambda: cancelled, None, shown, cancels=[asking], queue=False)
    return page


def _buttons(*, waits: bool) -> tuple[gr.Button, gr.Button]:
    return gr.Button("Planning ..." if waits else "Plan", interactive=not waits), gr.Button(visible=waits)


def _waiting_for(*form: Any) -> Iterator[tuple[Any, ...]]:
    for shown in answer(*form):
        yield *shown, *_buttons(waits=True)


def _label(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _field(name: str, start: str | int) -> gr.components.FormComponent:
    shown: dict[str, Any] = {"label": _label(name), "elem_id": name, "min_width": 100}
    if isinstance(start, bool):
        return gr.Checkbox(start, **shown)
    if isinstance(start, int):
        return gr.Number(start, **shown)
    if name in _CHOICES:
        return gr.Dropdown(_CHOICES[name], value=start, allow_custom_value=True, **shown)
    return gr.Textbox(start, placeholder="all, or 40GiB", **shown)


def answer(hub_id: str | None, file: str | None, *values: object) -> Iterator[tuple[str, str, str, str]]:
    """Yield what the page shows: plan or error, chart, script, and last the comparison of strategies."""
    asked = dict(zip(_START, values, strict=True))
    words = ["--compile"] if (compiles := bool(asked.pop("compile"))) else []
    words += [f"{flag_of(name)}={value}" for name, value in asked.items() if value not in (None, "")]
    yield _html("Planning."), "", "", ""
    try:
        with warnings_of_package() as warnings:
            case = _case(hub_id or "", file, words)
            found, problem = case.found.plan, case.found.problem
    except Exception as error:
        if (line := error_line(error)) is None:
            raise
        yield _html(_in_words_of_form(line.replace(str(file), "config.json"))), "", "", ""
        return
    content = report_content(found, PlanInputs.of(problem))
    svg = vl_convert.vegalite_to_svg(report_chart(content).to_dict())
    command = shlex.join(["hf-osdp", "plan", "config.json" if file else str(hub_id), *words])
    options = f"OSDPConfig(memory_limit={asked['memory_limit'] or None!r}, compile={compiles})"
    script = (
        f"# {command}\nfrom hf_osdp import OSDPConfig, Trainer\n\n"
        f"# in the arguments: per_device_train_batch_size={found.micro_batch_size},"
        f" gradient_accumulation_steps={found.accumulation_steps}, precision {case.precision}\n"
        f"osdp = {options}\n"
        "trainer = Trainer(model=model, args=args, train_dataset=dataset, osdp=osdp)\n"
    )
    shown = _html(*plan_parts(content), *warnings), f'<div role="img" aria-label="{_ALT}">{svg}</div>', script
    yield *shown, _html("Comparing strategies.")
    yield *shown, _html(comparison_table(comparison_content(problem, list(case.found.compared()))))


def _case(hub_id: str, file: str | None, words: list[str]) -> Case:
    """Return the run that the form describes, from an uploaded file or a hub id; no other file is read."""
    if file is None and (not _HUB_ID.fullmatch(hub_id) or Path(hub_id).exists()):
        raise ValueError(f"MODEL {hub_id!r} is not a hub id; upload its config.json to the page instead.")
    command = typer.Typer(add_completion=False)
    command.command()(with_flags(lambda request: request, make=Request.of))
    parse = typer.main.get_command(command).main
    case = Case(parse([*words, file or hub_id], prog_name="hf-osdp plan", standalone_mode=False))
    if file is not None:
        case.model_config._name_or_path = case.model_config.model_type  # a folder of the server has no meaning
    return case


def _in_words_of_form(line: str) -> str:
    """Return an error with the form's labels in place of flags and options."""
    for name in _START:
        line = re.sub(rf"{flag_of(name)}\b|\b{name}(?==)", _label(name), line)
    return re.sub(r"; see [\w -]*--help", "", line)


def _html(*parts: Part) -> str:
    """Return tables and lines as a terminal shows them."""
    console = Console(record=True, width=100, file=io.StringIO(), markup=False, emoji=False, highlight=False)
    console.print(*parts, sep="\n")
    return console.export_html(code_format='<pre class="osdp">{code}</pre>', inline_styles=True)
