"""Parts of pages that the program itself says, made while the site is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import typer

from hf_osdp.cli.app import app
from hf_osdp.planner.presets import preset, preset_names
from hf_osdp.quantities import format_bytes

MARK = "<!-- generated -->"


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
        "| `--device` | memory | inside a machine | between machines | fp16, bf16, dense |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    sources = []
    for name in preset_names():
        hardware = preset(name, nodes=2, devices_per_node=8)
        device = hardware.device
        rates = {dtype.value: f"{rate / 1e12:.3g}" for dtype, rate in device.flops_per_s.items()}
        links = " | ".join(f"{link.bytes_per_s / 1e9:g} GB/s" for link in (hardware.intra_node, hardware.inter_node))
        products = f"{rates.get('float16', '-')}, {rates['bfloat16']} TFLOP/s"
        lines.append(f"| {name} | {format_bytes(device.memory_bytes)} | {links} | {products} |")
        sources.append(
            f"- {name}: {_cell(device.source)}. Links: {_cell(hardware.intra_node.source)};"
            f" {_cell(hardware.inter_node.source)}."
        )
    return "\n".join([*lines, "", "## Where the figures are from", "", *sources])


PAGES: dict[str, Callable[[], str]] = {"cli": cli_reference, "presets": preset_table}
"""Page → what stands where its mark is."""
