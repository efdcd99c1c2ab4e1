"""Where text, JSON and errors go."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from ..errors import InfeasibleError, OSDPError
from ..report.plan_file import write_json

INFEASIBLE, WRONG = 1, 2
"""Exit codes: no plan fits; wrong input, or a model or file that cannot be read."""
_WIDTH = 100
"""Columns where the output is no terminal."""

_AS_WRITTEN = {"markup": False, "emoji": False}
"""Names come from models and files; rich would take `[bold]` or `:+1:` in them for its own."""


class Output:
    """Tables on stdout unless JSON goes there; what is under way on stderr.

    Args:
        json_file: where JSON is to go: a file, `-` for stdout, None for nowhere.

    Raises:
        ValueError: the file's folder does not exist.
    """

    def __init__(self, json_file: str | None):
        from rich.console import Console

        self._json_file = json_file
        if json_file not in (None, "-"):
            check_folder(Path(json_file), "--json")
        console = Console(quiet=json_file == "-", **_AS_WRITTEN)
        self.console = console if console.is_terminal else Console(quiet=json_file == "-", width=_WIDTH, **_AS_WRITTEN)
        self.progress = Console(stderr=True, **_AS_WRITTEN)

    def print(self, *parts: object) -> None:
        """Tables and lines, each on its own."""
        for part in parts:
            self.console.print(part, highlight=False)

    def write(self, content: dict) -> None:
        """The JSON, where it was asked for."""
        if self._json_file == "-":
            sys.stdout.write(json.dumps(content, indent=1) + "\n")
        elif self._json_file is not None:
            write_json(content, self._json_file)
            self.print(f"JSON: {self._json_file}")

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """A line on a terminal's stderr while something takes time."""
        if not self.progress.is_terminal:
            yield
            return
        with self.progress.status(text):
            yield


def check_folder(path: Path, option: str) -> None:
    """Refuse a file whose folder is missing, before anything is computed.

    Raises:
        ValueError: there is no such folder.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {str(path.parent)!r}; make it, or name another.")


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End a command with one line on stderr where the user or the model is at fault; other errors keep their traceback.

    Raises:
        typer.Exit: with code 1 where no plan fits, 2 for everything else.
    """
    try:
        yield
    except InfeasibleError as error:
        _end(error, INFEASIBLE)
    except (OSDPError, ValueError, OSError) as error:
        _end(error, WRONG)


def _end(error: Exception, code: int) -> None:
    text = " ".join(str(error).split())
    typer.echo(f"hf-osdp: {text}", err=True)
    raise typer.Exit(code) from error
