"""Print text, write JSON and charts, and format errors."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import InfeasibleError, OSDPError, one_line
from ..report.content import Content
from ..report.plan_file import write_json

_WIDTH = 100
_MEANT = dict.fromkeys(("--gpus", "--num-gpus", "--devices", "--nproc-per-node"), "--devices-per-node")
"""Flags of other programs, with the one that says the same here."""


class Output:
    """Print tables on stdout, unless JSON goes there, and progress on stderr.

    JSON goes to a file, for `-` to stdout, for None nowhere. Paths of JSON, `plot` and `output` that cannot be written
    are refused at once.
    """

    def __init__(self, json_file: str | None = None, *, plot: Path | None = None, output: Path | None = None) -> None:
        from rich.console import Console

        self._json_file, self._plot = json_file, plot
        for option, path in {"--json": json_file, "--output": output, "--plot": plot}.items():
            if path is not None and not (folder := Path(path).parent).is_dir():
                raise ValueError(
                    f"{option} {path}: folder {str(folder)!r} does not exist; create it, or give another."
                )
        if plot is not None:
            from ..report.plots import check_plot_path

            check_plot_path(plot)
        # names come from models and files; rich would interpret `[bold]` or `:+1:` in them as markup
        width = None if sys.stdout.isatty() else _WIDTH
        self._console = Console(quiet=json_file == "-", width=width, markup=False, emoji=False, highlight=False)
        self._progress = Console(stderr=True, markup=False, emoji=False)

    def print(self, *parts: object) -> None:
        """Print tables and lines, each on a new line."""
        self._console.print(*parts, sep="\n")

    def working(self, text: str) -> AbstractContextManager[object]:
        """Show on a terminal's stderr what is done."""
        return self._progress.status(text, refresh_per_second=2)  # a thread redraws it while a machine is measured

    def write(self, content: Content) -> None:
        """Draw the chart of a report and write it as JSON, if asked for."""
        if self._plot is not None:
            from ..report.plots import report_chart, save_chart

            save_chart(report_chart(content), self._plot)
            self.print(f"Plot: {self._plot}")
        if self._json_file == "-":
            sys.stdout.write(json.dumps(content, indent=1) + "\n")
        elif self._json_file is not None:
            write_json(content, self._json_file)
            self.print(f"JSON: {self._json_file}")


def error_line(error: Exception) -> str | None:
    """Return a command's error as one line if the input, the model or a file caused it; None for other errors."""
    if isinstance(error, InfeasibleError):
        return one_line(error.on_command_line)
    if isinstance(error, (OSDPError, ValueError, OSError)):
        return one_line(error)
    if not hasattr(error, "format_message"):  # a usage error; the class differs between versions of typer
        return None
    context: Any = getattr(error, "ctx", None)
    command = "hf-osdp" if context is None else context.command_path
    if (unknown := getattr(error, "option_name", "")) in _MEANT:
        return f"There is no {unknown}; use {_MEANT[unknown]}, see {command} --help."
    said = one_line(error.format_message()).replace("Value error, ", "").rstrip(".")
    return f"{said}; see {command} --help."
