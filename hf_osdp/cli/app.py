"""The command line: `hf-osdp plan | explain | compare | profile | config | app`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import InfeasibleError
from .commands import compare, explain, plan
from .machine_commands import config, profile
from .options import Request, option, with_flags
from .output import error_line

INFEASIBLE, WRONG = 1, 2
"""Exit codes: no plan fits; wrong input, or a model or file that cannot be read."""
_HELP = """Plan sharded training for Hugging Face models: the fastest FSDP2 layout that fits your memory limit.

Planning needs no GPU and no weights, only a model's configuration and the kind of device.
"""


class OneLineErrors(TyperGroup):
    """Commands that print errors of the input, the model or a file as one line on stderr; other errors keep their
    traceback.
    """

    def main(self, args: Sequence[str] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: ANN401
        try:
            code = super().main(args, prog_name="hf-osdp", standalone_mode=False)
        except Exception as error:
            if (line := error_line(error)) is None:
                raise
            typer.echo(f"hf-osdp: {line}", err=True)
            code = INFEASIBLE if isinstance(error, InfeasibleError) else WRONG
        sys.exit(code)


def browser(
    host: Annotated[str, option("ADDRESS", "Address to listen on; 0.0.0.0 for the whole network.")] = "127.0.0.1",
    port: Annotated[int, option("N", "Port to listen on.", min=1, max=65535)] = 7860,
) -> None:
    """Serve the planner as a web page: the plan, memory over the step, a comparison, and code to copy."""
    try:
        from .browser import build
    except ImportError as error:
        raise ValueError(
            f"The page needs {error.name}, which is not installed; run: pip install 'hf_osdp[app]'."
        ) from None
    build().launch(server_name=host, server_port=port, share=False, footer_links=[], max_file_size="256kb")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hf-osdp {version('hf_osdp')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


app = typer.Typer(
    cls=OneLineErrors,
    callback=_options,
    context_settings={"help_option_names": ["-h", "--help"]},
    name="hf-osdp",
    help=_HELP,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_TO_PLAN = (
    "gpt2-xl --device a100-80 --devices-per-node 8 --memory-limit 16GiB --sequence-length 1024 --global-batch-size 64"
)
_COMMANDS: dict[str, tuple[Callable[..., object], str]] = {
    "plan": (with_flags(plan, make=Request.of), f"{_TO_PLAN} --output plan.json"),
    "explain": (explain, "plan.json"),
    "compare": (with_flags(compare, make=Request.of, leave_out="strategy"), _TO_PLAN),
    "profile": (
        with_flags(profile, "precision", "recompute", "compile", "block_classes", "auto_class"),
        "gpt2-xl --sequence-length 1024 --output profile.json",
    ),
    "config": (with_flags(config, "memory_limit", "precision"), "--memory-limit 16GiB"),
    "app": (browser, "--port 7860"),
}
"""Each command with the arguments of the example at the end of its help page."""
for _name, (_command, _example) in _COMMANDS.items():
    app.command(_name, epilog=f"Example: hf-osdp {_name} {_example}")(_command)


def main() -> None:
    """Run `hf-osdp`."""
    gc.set_threshold(
        100_000, 50, 1000
    )  # collecting garbage among the objects of torch and transformers takes a fifth of a plan's time
    app()
