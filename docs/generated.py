"""Parts of pages that the program itself says, made while the site is built.

`python docs/generated.py` writes those of troubleshooting.md, which is also read without the site.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import typer

from hf_osdp.cli.app import app
from hf_osdp.planner.description import DType
from hf_osdp.planner.presets import preset, preset_names
from hf_osdp.preparation.config import GROUPS
from hf_osdp.quantities import format_bytes

MARK, END = "<!-- generated -->", "<!-- end of what is generated -->"
DOCS = Path(__file__).parent
Row = dict[str, str]
BLANK = re.compile(r"‹[^›]*›")


def cli_reference() -> str:
    """Each command with its help, its arguments and its options."""
    group = typer.main.get_command(app)
    return "\n".join(line for name, command in group.commands.items() for line in _command(name, command))


def _command(name: str, command: typer.core.TyperCommand) -> Iterator[str]:
    about, *examples = (command.help or "").strip().split("\n\n")
    yield f"## hf-osdp {name}\n\n{' '.join(about.split())}\n"
    for text in examples:
        is_command = text.startswith("hf-osdp ")
        yield f"```bash\n{' '.join(text.split())}\n```\n" if is_command else f"{' '.join(text.split())}\n"
    yield "| option | what it says |\n| --- | --- |"
    for option in command.params:
        is_argument, metavar = option.param_type_name == "argument", _cell(option.metavar or "")
        names = [metavar] if is_argument else [*option.opts, *option.secondary_opts]
        value = "" if is_argument or option.is_flag or not metavar else f" {metavar}"
        yield f"| `{', '.join(names)}{value}` | {_cell(option.help or '')} |"
    yield ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def preset_table() -> str:
    """Every preset, with its links; below the table where the figures are from."""
    lines = [
        "| `--device` | memory | inside a machine, GB/s | between machines, GB/s | fp16, TFLOP/s | bf16, TFLOP/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    sources = []
    for name in preset_names():
        hardware, sheet = (preset(name, nodes=2, devices_per_node=8, data_sheet=flag) for flag in (False, True))
        device = hardware.device
        inside, between = (
            f"{own.bytes_per_s / 1e9:.3g} / {line.bytes_per_s / 1e9:.4g}"
            for own, line in ((hardware.intra_node, sheet.intra_node), (hardware.inter_node, sheet.inter_node))
        )
        if (shared := hardware.intra_node.shared_bytes_per_s) is not None:
            inside += f"; {shared / 1e9:.3g} for all devices"
        low = (DType.FLOAT16, DType.BFLOAT16)
        rates = [tuple(part.device.flops_per_s.get(dtype) for part in (hardware, sheet)) for dtype in low]
        products = " | ".join(" / ".join(f"{rate / 1e12:.3g}" if rate else "-" for rate in pair) for pair in rates)
        lines.append(f"| {name} | {format_bytes(device.memory_bytes)} | {inside} | {between} | {products} |")
        sources.append(
            f"- {name}: {_cell(device.source)}. Links: {_cell(hardware.intra_node.source)};"
            f" {_cell(hardware.inter_node.source)}."
        )
    return "\n".join([*lines, "", "## Where the figures are from", "", *sources])


def options_by_subject() -> str:
    """Every option of `OSDPConfig`, by subject."""
    return "\n".join(line for subject, names in GROUPS.items() for line in _subject(subject, names))


def _subject(subject: str, names: tuple[str, ...]) -> Iterator[str]:
    yield f"## {subject}\n\n```{{eval-rst}}"
    yield from (f".. autoattribute:: hf_osdp.OSDPConfig.{name}" for name in names)
    yield "```\n"


def rows_of(name: str) -> list[Row]:
    """The rows of a file of `docs/data`."""
    with (DOCS / "data" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def says(text: str, message: str) -> bool:
    """Whether a text has the message's fixed parts, in their order; ‹...› stands for any others."""
    at = 0
    for part in BLANK.split(message):
        if (found := text.find(part, at)) < 0:
            return False
        at = found + len(part)
    return True


def troubleshooting() -> str:
    """Messages with their remedies: a heading for each section, and a definition list of its rows."""
    lines = []
    for section, part in groupby(rows_of("troubleshooting"), lambda row: row["section"]):
        lines.append(f"## {section}\n")
        lines += [f"{_code(row['message'])}\n: {row['remedy']}\n" for row in part]
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def written(page: str) -> str:
    """The text of troubleshooting.md, its generated part made anew."""
    before, rest = page.split(MARK)
    return f"{before}{MARK}\n\n{troubleshooting()}\n{END}{rest.split(END)[1]}"


PAGES: dict[str, Callable[[], str]] = {
    "cli": cli_reference,
    "presets": preset_table,
    "options": options_by_subject,
}
"""Page → what stands where its mark is."""

if __name__ == "__main__":
    path = DOCS / "troubleshooting.md"
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
