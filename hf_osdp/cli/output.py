"""Print text, write JSON, and format errors."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InfeasibleError, OSDPError, nearest, one_line
from ..report.plan_file import write_json

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")
_WIDTH = 100
_ALIASES = {
    "zero3": "fsdp", "zero-3": "fsdp", "full_shard": "fsdp", "shard_grad_op": "zero2", "zero-2": "zero2",
    "hybrid_shard": "hsdp", "no_shard": "ddp", "bfloat16": "bf16", "float16": "fp16", "float32": "no", "fp32": "no",
}  # fmt: skip
"""Names of other programs for values of ours."""


class Output:
    """Print tables on stdout, unless JSON goes there, and progress on stderr.

    JSON goes to a file, for `-` to stdout, for None nowhere. Paths of JSON, `plot` and `output` that cannot be written
    are refused at once.
    """

    def __init__(self, json_file: str | None = None, *, plot: Path | None = None, output: Path | None = None) -> None:
        from rich.console import Console

        self._json_file = json_file
        for option, path in (
            ("--json", None if json_file in (None, "-") else Path(str(json_file))),
            ("--output", output),
        ):
            if path is not None and not path.parent.is_dir():
                raise ValueError(
                    f"{option} {path}: folder {str(path.parent)!r} does not exist; create it, or give another."
                )
        if plot is not None:
            from ..report.plots import check_plot_path

            check_plot_path(plot)
        # names come from models and files; rich would interpret `[bold]` or `:+1:` in them as markup
        width = None if sys.stdout.isatty() else _WIDTH
        self.console = Console(quiet=json_file == "-", width=width, markup=False, emoji=False)
        self.progress = Console(stderr=True, markup=False, emoji=False)

    def print(self, *parts: object) -> None:
        """Print tables and lines, each on a new line."""
        for part in parts:
            self.console.print(part, highlight=False)

    def growing(self, table_of: Callable[[Sequence[T]], Table], rows: Iterable[T]) -> list[T]:
        """Print a table whose rows appear as they are found; return them.

        The columns' least widths should hold for all rows, since lines that were printed stay.
        """
        from rich.segment import Segments

        found, printed = list[T](), 0
        for row in rows:
            found.append(row)
            lines = self.console.render_lines(table_of(found), pad=False, new_lines=True)
            self.print(*map(Segments, lines[printed:-1]))
            printed = len(lines) - 1
        self.print("")
        return found

    def write(self, content: dict[str, Any]) -> None:
        if self._json_file == "-":
            sys.stdout.write(json.dumps(content, indent=1) + "\n")
        elif self._json_file is not None:
            write_json(content, self._json_file)
            self.print(f"JSON: {self._json_file}")

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show on a terminal's stderr what is done, and for how long; what is printed meanwhile stands above it."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(
            *columns, console=self.progress, transient=True, disable=not self.progress.is_terminal,
            redirect_stdout=self.console.is_terminal,
        ) as bar:  # fmt: skip
            bar.add_task(text, total=None)
            yield


def error_line(error: Exception, words: Sequence[str]) -> str | None:
    """Return a command's error as one line if the input, the model or a file caused it; None for other errors."""
    text = str(error)
    if hasattr(
        error, "format_message"
    ):  # a usage error; newer versions of typer bundle click, so that its class differs
        text = _usage_line(error, words)
    elif not isinstance(error, (OSDPError, ValueError, OSError)):
        return None
    elif isinstance(error, InfeasibleError):
        text = error.on_command_line
    return one_line(text)


def _usage_line(error: Any, words: Sequence[str]) -> str:  # noqa: ANN401  (click's UsageError, of one of two packages)
    """Return a usage error with the wrong value, if it is about a value."""
    text = one_line(error.format_message().replace("Value error, ", "")).rstrip(".")
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for name, value in itertools.pairwise(words):
            if name == option:
                rule = (
                    text.removeprefix(f"Invalid value for {option!r}: ")
                    .removeprefix(f"{value} ")
                    .removeprefix(f"{value!r} ")
                )
                text = f"{option} {value}{' ' if rule.startswith('is not') else ': '}{rule}"
    if (asked := re.fullmatch(r"(?:--\S+) (\S+) is not one of (.*)", text)) is not None:
        names = re.findall("'([^']*)'", asked[2])
        alias = _ALIASES.get(asked[1].lower(), "")
        text += f" (nearest: {alias})" if alias in names else nearest(asked[1], names)
    in_command = words and not words[0].startswith("-") and not text.startswith("No such command")
    command = f"hf-osdp {words[0]}" if in_command else "hf-osdp"
    return f"{text}{' See' if text.endswith('?') else '; see'} {command} --help."
