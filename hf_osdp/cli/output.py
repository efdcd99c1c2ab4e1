"""Where text and JSON go."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..report.plan_file import write_json

_WIDTH = 100
"""Columns where the output is no terminal."""


class Output:
    """Tables on stdout unless JSON goes there; progress on stderr.

    Args:
        json_file: where JSON is to go: a file, `-` for stdout, None for nowhere.
        plot: a file that a chart will be drawn to; as for `output`, wrong ones are refused before anything is computed.
        output: a file that will be written.
    """

    def __init__(self, json_file: str | None = None, *, plot: Path | None = None, output: Path | None = None) -> None:
        from rich.console import Console

        self._json_file = json_file
        for option, path in (("--json", None if json_file in (None, "-") else Path(str(json_file))), ("--output", output)):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{option} {path}: there is no folder {str(path.parent)!r}; make it, or name another.")
        if plot is not None:
            from ..report.plots import check_plot_path

            check_plot_path(plot)
        # names come from models and files; rich would take `[bold]` or `:+1:` in them for its own
        width = None if sys.stdout.isatty() else _WIDTH
        self.console = Console(quiet=json_file == "-", width=width, markup=False, emoji=False)
        self.progress = Console(stderr=True, markup=False, emoji=False)

    def print(self, *parts: object) -> None:
        """Print tables and lines, each on its own."""
        for part in parts:
            self.console.print(part, highlight=False)

    def write(self, content: dict[str, Any]) -> None:
        """Write the JSON, where it was asked for."""
        if self._json_file == "-":
            sys.stdout.write(json.dumps(content, indent=1) + "\n")
        elif self._json_file is not None:
            write_json(content, self._json_file)
            self.print(f"JSON: {self._json_file}")

    @contextmanager
    def working(self, text: str, steps: int | None = None) -> Iterator[Callable[[str], None]]:
        """Show a bar and the time on a terminal's stderr; what it yields is called where the next of the steps begins, with its name."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.progress, transient=True, disable=not self.progress.is_terminal) as bar:
            task = bar.add_task(text, total=steps)
            yield lambda text: bar.update(task, advance=1, description=text)
