"""The command line: `hf-osdp plan | explain | compare | what-if | profile | doctor | convert`."""

from __future__ import annotations

import typer

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

app = typer.Typer(name="hf-osdp", help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
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
