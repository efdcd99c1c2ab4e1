"""The command line: `hf-osdp plan | explain | compare | what-if | profile | convert | doctor`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import InfeasibleError, OSDPError
from .commands import compare, convert, doctor, explain, plan
from .options import Request, with_flags
from .profile_command import profile
from .what_if import what_if

INFEASIBLE, WRONG = 1, 2
"""Exit codes: no plan fits; wrong input, or a model or file that cannot be read."""
_HELP = """Plan sharded training for Hugging Face models: the fastest FSDP2 layout that fits your memory limit.

Planning needs no GPU and no weights, only a model's configuration and the kind of device.
"""


class OneLineErrors(TyperGroup):
    """Commands whose errors are one line on stderr, where the user, the model or a file is at fault; other errors keep their traceback."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: ANN401
        """Run a command as typer does, then exit."""
        words = sys.argv[1:] if args is None else list(args)
        if not standalone_mode:
            return super().main(words, standalone_mode=False, **kwargs)
        with _one_line(words):
            code = super().main(words, standalone_mode=False, **kwargs)
            sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _one_line(words: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except InfeasibleError as error:
        _end(str(error), INFEASIBLE)
    except (OSDPError, ValueError, OSError) as error:
        _end(str(error), WRONG)
    except Exception as error:  # newer versions of typer have a click of their own, so that usage errors have two bases
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(error.exit_code)  # type: ignore[attr-defined]
        _end(_usage_line(error, words), error.exit_code)  # type: ignore[attr-defined]


def _end(text: str, code: int) -> None:
    typer.echo(f"hf-osdp: {' '.join(text.split())}", err=True)
    sys.exit(code)


def _usage_line(error: Any, words: Sequence[str]) -> str:  # noqa: ANN401  (click's UsageError, of one of two packages)
    """Return an error of usage with the value that is wrong, where it is about one."""
    text = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for name, value in itertools.pairwise(words):
            if name == option:
                rule = text.removeprefix(f"Invalid value for {option!r}: ").removeprefix(f"{value} ").removeprefix(f"{value!r} ")
                text = f"{option} {value}{' ' if rule.startswith('is not') else ': '}{rule}"
    return f"{text}{'' if text.endswith('?') else ';'} hf-osdp --help says what there is."


app = typer.Typer(cls=OneLineErrors, name="hf-osdp", help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("plan")(with_flags(plan, make=Request))
app.command("explain")(
    with_flags(
        explain,
        "device", "profile", "num_nodes", "margin", "precision", "optimizer", "activation_checkpointing", "block_classes", "auto_class",
    )
)  # fmt: skip
app.command("compare")(with_flags(compare, make=Request, leave_out="strategy"))
app.command("what-if")(with_flags(what_if, make=Request))
app.command("profile")(with_flags(profile, "precision", "activation_checkpointing", "compile", "block_classes", "auto_class"))
app.command("convert")(convert)
app.command("doctor")(with_flags(doctor, make=Request, leave_out="optimizer"))


def main() -> None:
    """Run `hf-osdp`."""
    app()
