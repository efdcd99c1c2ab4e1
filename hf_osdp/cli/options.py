"""Flags that several commands share, each defined once, and their conversion to a command's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ..planner.presets import preset_names
from ..preparation.config import GROUPS, LEAST, OSDPConfig, option_texts


def option(metavar: str, text: str, **rules: Any) -> Any:  # noqa: ANN401  (like typer.Option)
    """Return an option with a name for its value and a help text."""
    return typer.Option(metavar=metavar, help=text, **rules)


def count(text: str) -> Any:  # noqa: ANN401
    """Return an integer option of at least 1."""
    return option("N", text, min=1)


JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - writes only JSON to stdout."),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Also draw a chart, as .png, .svg or .html (needs the extra plot)."),
]


_ONLY_RUNS = {
    "inputs", "also", "on_oom", "plan", "compare", "reduce_every_micro_step", "hardware", "nodes",
    "time_blocks", *GROUPS["Run"],
}  # fmt: skip
"""Options of a run that have no flag here."""
_REQUIRED = ("sequence_length", "global_batch_size")
_VALUES = {"memory_limit": "SIZE", "beside": "SHARE", "profile": "FILE", "block_classes": "NAMES"}
"""Names of values that are text, if they are not NAME."""
_WRITTEN = {
    "memory_margin": ("--margin",), "recompute": ("--recompute/--no-recompute", "--activation-checkpointing"),
    "compile": ("--compile",),
}  # fmt: skip
"""Flags that are not written as the name of their option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A planning problem from the command line: a run's configuration, its model and its devices."""

    config: OSDPConfig
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, local folder or config.json; no weights are needed.")
    ]
    device: Annotated[
        str | None, option("NAME", f"Kind of device: {', '.join(preset_names())}. Or give --profile.")
    ] = None
    host_memory: Annotated[
        str | None,
        option(
            "SIZE",
            "Memory of each machine's host, such as 256GiB, for states and activations; default: the profile's, that"
            " of the device's usual server; cards of workstations have none unless this, or an option, asks for it.",
        ),
    ] = None
    num_nodes: Annotated[int | None, count("Machines; default: the profile's number, or 1.")] = None
    devices_per_node: Annotated[int | None, count("Devices per machine; default: the profile's number, or 1.")] = None
    lengths: Annotated[
        Path | None,
        option("FILE", "Tokens of the data's samples, a number on each line: seconds are then those of such samples."),
    ] = None
    mean_length: Annotated[
        int | None,
        count("Tokens of a sample in the mean, in place of --lengths: log-normal, as in data of instructions."),
    ] = None
    precision: Annotated[
        Literal["no", "bf16", "fp16"] | None,
        option(
            "NAME",
            (
                "Mixed precision by Accelerate's names: no, bf16 or fp16; default: bf16 on GPUs with hardware for it,"
                " else no."
            ),
        ),
    ] = None
    optimizer: Annotated[
        str,
        option(
            "NAME",
            "adamw, momentum, sgd, adafactor, torchao's adamw8bit, adamwfp8 and adamw4bit, or a name of"
            " TrainingArguments(optim=...). Its states need memory: AdamW 8 bytes per parameter, AdamW8bit 2,"
            " Adafactor almost none, but the units it trains are replicated.",
        ),
    ] = "adamw"
    lora_rank: Annotated[
        int | None, count("Train LoRA adapters of this rank and freeze the rest (needs the extra peft).")
    ] = None
    lora_targets: Annotated[
        str | None,
        option("NAMES", "Projections that get an adapter, comma-separated; default: all linear ones except the head."),
    ] = None
    quantize: Annotated[
        Literal["nf4", "fp4"] | None,
        option(
            "NAME",
            "Freeze the base in 4 bits of bitsandbytes with double quantization (QLoRA): nf4 or fp4; needs --lora-rank"
            " and the extra bnb.",
        ),
    ] = None
    auto_class: Annotated[
        str | None,
        option("CLASS", "Model class to build, such as AutoModelForCausalLM; default: taken from the configuration."),
    ] = None

    @classmethod
    def of(cls, **flags: Any) -> Request:
        """Return the request of these flags; raise ValueError if some are missing."""
        missing = [flag_of(name) for name in _REQUIRED if flags.get(name) is None]
        if missing and flags.get("device") is None and flags.get("profile") is None:
            missing.append("--device (or --profile FILE)")
        if missing:
            listed = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
            raise ValueError(f"Missing {listed}; see --help.")
        own = {field.name: flags.pop(field.name) for field in fields(cls) if field.name in flags}
        return cls(config=OSDPConfig(**flags), **own)


@cache
def _flags() -> dict[str, inspect.Parameter]:
    """Return the flags that describe a planning problem: those of `Request`, and those of `OSDPConfig`'s options."""
    hints, texts, options = get_type_hints(OSDPConfig), option_texts(), inspect.signature(OSDPConfig).parameters
    _, *requested = inspect.signature(Request, eval_str=True).parameters.values()
    found = {parameter.name: parameter for parameter in requested}
    for panel, names in GROUPS.items():
        for name in (name for name in names if name not in _ONLY_RUNS):
            default, needed = options[name].default, " (required)" if name in _REQUIRED else ""
            flag = _flag(name, hints[name], default, help=f"{texts.get(name, '')}{needed}", rich_help_panel=panel)
            found[name] = options[name].replace(annotation=flag, default=default)
    return found


def _flag(name: str, allowed: Any, default: object, **shown: Any) -> Any:  # noqa: ANN401
    """Return the annotation of a flag for an option of `OSDPConfig`: type and form on a command line."""
    kinds = (allowed,) if get_origin(allowed) is Literal else get_args(allowed) or (allowed,)
    kind = str if str in kinds else kinds[0]
    metavar = {int: "N", float: "SHARE", bool: None}.get(kind, _VALUES.get(name, "NAME"))
    least = LEAST.get(name, 1) if kind is int else None
    flag = typer.Option(*_WRITTEN.get(name, ()), metavar=metavar, min=least, **shown)
    return Annotated[kind | None if default is None else kind, flag]


def with_flags(
    command: Callable[..., object], *names: str, make: Callable[..., object] = dict, leave_out: str = ""
) -> Callable[..., object]:
    """Return a typer command with shared flags in addition to its own options; its first parameter receives
    `make(**flags)`.

    The flags are all that describe a planning problem, or only `names`; the command has no flag `leave_out`, which
    keeps its default.
    """
    shared = [flag for name, flag in _flags().items() if name != leave_out and (not names or name in names)]
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @wraps(command)
    def run(**options: object) -> object:
        return command(make(**{flag.name: options.pop(flag.name) for flag in shared}), **options)

    parameters = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in (*shared, *own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {flag.name: flag.annotation for flag in parameters}
    return run


def flag_of(name: str) -> str:
    """`memory_limit` → `--memory-limit`."""
    return _WRITTEN.get(name, (f"--{name.replace('_', '-')}",))[0].partition("/")[0]
