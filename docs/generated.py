"""Parts of pages that the program itself says, and code of files. `python docs/generated.py` writes them into the
pages, which are also read without the site.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from textwrap import dedent

import typer

from hf_osdp.cli.app import app
from hf_osdp.planner.description import DType
from hf_osdp.planner.presets import preset, preset_names
from hf_osdp.preparation.config import GROUPS, OSDPConfig, option_texts
from hf_osdp.quantities import format_bytes

MARK, END = "<!-- generated -->", "<!-- end of what is generated -->"
CODE = re.compile(r"(<!-- code: (.+?) -->)\n.*?(<!-- end of code -->)", re.DOTALL)
DOCS = Path(__file__).parent
Row = dict[str, str]
BLANK = re.compile(r"‹[^›]*›")
HOP = "; hop latency: NCCL 2.18 src/graph/tuning.cc, ring, Simple protocol"
"""What the sources of nearly all links end with; the page says it once."""


def cli_reference() -> str:
    """Each command with its help, its arguments and its options; options that `plan` has, too, only by name."""
    group = typer.main.get_command(app)
    plans = {option.name: option for option in group.commands["plan"].params}
    return "\n".join(line for name, command in group.commands.items() for line in _command(name, command, plans))


def _command(name: str, command: typer.core.TyperCommand, plans: dict[str, typer.core.TyperOption]) -> Iterator[str]:
    about, *examples = (command.help or "").strip().split("\n\n")
    yield f"## hf-osdp {name}\n\n{' '.join(about.split())}\n"
    for text in examples:
        is_command = text.startswith("hf-osdp ")
        yield f"```bash\n{' '.join(text.split())}\n```\n" if is_command else f"{' '.join(text.split())}\n"
    told = option_texts() if name == "plan" else {option.name: option.help for option in plans.values()}
    same = [option for option in command.params if (option.help or "").startswith(told.get(option.name) or "\0")]
    if own := [option for option in command.params if option not in same]:
        yield "| option | what it says |\n| --- | --- |"
        yield from (f"| {_flag(option)} | {_cell(option.help or '')} |" for option in own)
        yield ""
    if name == "plan":
        yield f"The others are [options of OSDPConfig](options.md): {', '.join(map(_flag, same))}.\n"
    elif not own:
        left_out = [option for option in plans.values() if option.name not in {other.name for other in same}]
        yield f"All options of [`plan`](#hf-osdp-plan) but {', '.join(map(_flag, left_out))}.\n"
    elif same:
        yield f"As in [`plan`](#hf-osdp-plan): {', '.join(map(_flag, same))}.\n"


def _flag(option: typer.core.TyperOption) -> str:
    """An option's names and the name of its value."""
    is_argument, metavar = option.param_type_name == "argument", _cell(option.metavar or "")
    names = [metavar] if is_argument else [*option.opts, *option.secondary_opts]
    value = "" if is_argument or option.is_flag or not metavar else f" {metavar}"
    return f"`{', '.join(names)}{value}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def preset_table() -> str:
    """Every preset, with its links; below the table where the figures are from."""
    lines = [
        "| `--device` | memory | inside a machine, GB/s | between machines, GB/s | TFLOP/s in fp16; in bf16 |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    devices: dict[str, list[str]] = {}
    links: dict[str, list[str]] = {}
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
        products = "; ".join(
            dict.fromkeys(" / ".join(f"{rate / 1e12:.4g}" if rate else "-" for rate in pair) for pair in rates)
        )
        lines.append(f"| {name} | {format_bytes(device.memory_bytes)} | {inside} | {between} | {products} |")
        devices.setdefault(device.source, []).append(name)
        for link in (hardware.intra_node, hardware.inter_node):
            links.setdefault(link.source.removesuffix(HOP), []).append(name)
    lines += ["", "## Where the figures of devices are from", "", *_by_source(devices)]
    return "\n".join([*lines, "", "## Where the rates of links are from", "", *_by_source(links)])


def _by_source(names: dict[str, list[str]]) -> Iterator[str]:
    return (f"- {', '.join(those)}: {_cell(source)}." for source, those in names.items())


def options_by_subject() -> str:
    """Every option of `OSDPConfig` with its default, by subject."""
    texts, lines = option_texts(), []
    defaults = {field.name: field.default for field in fields(OSDPConfig)}
    for subject, names in GROUPS.items():
        lines += [f"## {subject}\n", "| option | default | what it says |\n| --- | --- | --- |"]
        lines += [f"| `{name}` | `{defaults[name]!r}` | {_cell(texts[name])} |" for name in names]
        lines.append("")
    return "\n".join(lines)


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


def code_of(path: str, start: str = "", end: str = "") -> str:
    """A file's lines from the first with `start` on; with `end`, those between the two lines."""
    lines = (DOCS / path).read_text(encoding="utf-8").splitlines()
    begins = next(number for number, line in enumerate(lines) if start in line)
    kept = lines[begins:]
    if end:
        kept = lines[begins + 1 : next(number for number, line in enumerate(lines) if end in line)]
    return f"```{Path(path).suffix.strip('.').replace('py', 'python')}\n{dedent(chr(10).join(kept)).strip()}\n```"


def written(name: str, page: str) -> str:
    """The text of a page, its generated parts and its code made anew."""
    if name in PAGES:
        before, rest = page.split(MARK)
        page = f"{before}{MARK}\n\n{PAGES[name]()}\n{END}{rest.split(END)[1]}"
    return CODE.sub(lambda mark: f"{mark[1]}\n{code_of(*shlex.split(mark[2]))}\n{mark[3]}", page)


PAGES: dict[str, Callable[[], str]] = {
    "cli": cli_reference,
    "presets": preset_table,
    "options": options_by_subject,
    "troubleshooting": troubleshooting,
}
"""Page → what stands where its mark is."""

if __name__ == "__main__":
    for path in DOCS.glob("*.md"):
        path.write_text(written(path.stem, path.read_text(encoding="utf-8")), encoding="utf-8")
