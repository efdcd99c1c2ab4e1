"""The command line: `hf-osdp plan | explain | compare | what-if | profile | doctor | convert`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from .compare_command import compare
from .convert_command import convert
from .doctor_command import doctor
from .explain_command import explain
from .options import takes_request
from .plan_command import plan
from .profile_command import profile
from .what_if_command import what_if

_HELP = """Plan sharded training for Hugging Face models: the fastest FSDP2 layout that fits your memory limit.

Planning needs no GPU and no weights, only a model's configuration and the kind of device.
"""


class OneLineErrors(TyperGroup):
    """What typer refuses by itself, such as an option that there is not, is said in one line, as all else is."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **kwargs: Any) -> Any:
        """As typer's, but for errors of usage."""
        given = sys.argv[1:] if args is None else list(args)
        if not standalone_mode:
            return super().main(given, standalone_mode=False, **kwargs)
        try:
            code = super().main(given, standalone_mode=False, **kwargs)
        except Exception as error:  # newer versions of typer have a click of their own, so that there are two bases
            if not hasattr(error, "format_message"):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                typer.echo(f"hf-osdp: {_usage_line(error, given)}", err=True)
            sys.exit(error.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


def _usage_line(error: Any, given: Sequence[str]) -> str:
    """An error of usage with the value that was given, where it is about one."""
    text = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for name, value in itertools.pairwise(given):
            if name == option:
                rule = text.removeprefix(f"Invalid value for {option!r}: ").removeprefix(f"{value} ").removeprefix(f"{value!r} ")
                text = f"{option} {value}{' ' if rule.startswith('is not') else ': '}{rule}"
    return f"{text}{'' if text.endswith('?') else ';'} hf-osdp --help says what there is."


app = typer.Typer(cls=OneLineErrors, name="hf-osdp", help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("plan")(takes_request(plan))
app.command("explain")(explain)
app.command("compare")(takes_request(compare, leave_out=("strategy",)))
app.command("what-if")(takes_request(what_if))
app.command("profile")(profile)
app.command("convert")(convert)
app.command("doctor")(takes_request(doctor, leave_out=("optimizer",)))


def main() -> None:
    """Entry point of `hf-osdp`."""
    app()
