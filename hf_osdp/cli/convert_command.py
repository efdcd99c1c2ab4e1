"""`hf-osdp convert`: a checkpoint in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .output import Output, errors_in_one_line


def convert(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint, of any plan and number of ranks.")],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; it must not exist.")],
    to: Annotated[
        Literal["sharded", "whole", "single", "weights"],
        typer.Option(
            metavar="sharded|whole|single|weights",
            help="For Accelerate's FSDP2 (SHARDED_STATE_DICT or FULL_STATE_DICT), for one process, or safetensors alone.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Hub id, local folder or config.json; needed where one process wrote the optimizer's state."),
    ] = None,
) -> None:
    """Write a checkpoint again, for plain Accelerate, one process, or from_pretrained. The training script itself reads every layout."""
    with errors_in_one_line():
        from ..checkpoint.convert import Target
        from ..checkpoint.convert import convert as write

        output = Output(None)
        with output.working("Converting"):
            write(source, target, to=Target(to), model=_model(model, source))
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        output.print(f"{target}: {to}, {size / 2**20:.1f} MiB")


def _model(model: str | None, source: Path) -> object | None:
    """The model on the meta device, by name or by the configuration in the checkpoint; None where it is not known."""
    from ..modeling.build import build_on_meta
    from .cases import load_config

    if model is None and not (source / "config.json").is_file():
        return None
    return build_on_meta(load_config(model or str(source)))
