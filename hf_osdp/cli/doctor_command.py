"""`hf-osdp doctor`: what would go wrong in a run, before there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import JsonFile, Request
from .output import Output

_RANKS = "missing ones, and those with other versions, models, plans or devices than rank 0: looked at when a run starts"
WRONG = 1
"""Exit code where a run would be stopped."""


def doctor(
    request: Request,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="adamw, momentum, sgd, or a name of TrainingArguments(optim=...).")
    ] = "adamw",
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="The plan that is to run; else one is searched for.")] = None,
    output_dir: Annotated[Path | None, typer.Option("--output-dir", metavar="DIR", help="Where the run will write.")] = None,
    save_total_limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Checkpoints that are kept in it; else all are.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Look for what would go wrong in a run, with the remedy. Exit code 1 where a run would be stopped.

    hf-osdp doctor gpt2-xl --memory-limit 16GiB --device a100-80 --devices-per-node 8 --sequence-length 1024
    --global-batch-size 64 --output-dir out
    """
    screen = Output(json_file)
    if save_total_limit is not None and output_dir is None:
        raise ValueError(f"--save-total-limit {save_total_limit} has no effect without --output-dir; give both, or neither.")
    with screen.working("Looking at model, devices, plan and folder"):
        from ..planning.preflight.folder import RunFolder
        from .examination import examine
        from .here import machine_line

        folder = None if output_dir is None else RunFolder(path=output_dir, limit=save_total_limit, adapters=request.lora_rank is not None)
        seen = examine(request, optimizer, plan, folder)
    from ..report.run_tables import checks_table

    rows = [
        ("this machine", "ok", machine_line()),
        *seen.rows(),
        ("ranks", "later", _RANKS),
    ]
    screen.print(checks_table(f"Before a run of {request.model}", rows))
    content = [{"check": name, "result": result, "text": text} for name, result, text in rows]
    screen.write({"model": request.model, "errors": sum(result == "error" for _, result, _ in rows), "checks": content})
    if seen.has_errors:
        raise typer.Exit(WRONG)
