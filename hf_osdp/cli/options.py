"""Flags that several commands share, each defined once, and their conversion to a command's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ..planner.presets import preset_names
from ..planner.problem import Strategy


def option(metavar: str, text: str, **rules: Any) -> Any:  # noqa: ANN401  (like typer.Option)
    """Return an option with a name for its value and a help text."""
    return typer.Option(metavar=metavar, help=text, **rules)


def count(text: str) -> Any:  # noqa: ANN401
    """Return an integer option of at least 1."""
    return option("N", text, min=1)


def switch(text: str, *flags: str) -> Any:  # noqa: ANN401
    """Return a switch, `--name/--no-name` unless it has other flags."""
    return typer.Option(*flags, help=text)


JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - writes only JSON to stdout."),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Also draw a chart, as .png, .svg or .html (needs the extra plot)."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A planning problem from the command line; each field is a flag."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, local folder or config.json; no weights are needed.")
    ]
    sequence_length: Annotated[int, count("Tokens per sample.")]
    global_batch_size: Annotated[int, count("Samples per optimizer step, over all devices.")]
    images: Annotated[
        int | None,
        option(
            "N",
            "Pictures per sample; default: one for models that take them, whose placeholders count as tokens.",
            min=0,
        ),
    ] = None
    memory_limit: Annotated[
        str | None, option("SIZE", "Memory of each device that training may use, such as 8GiB; default: all of it.")
    ] = None
    margin: Annotated[
        float | None,
        option("SHARE", "Share of the limit to keep free; default: 0.02 and 128 MiB on CUDA, 0 on the CPU."),
    ] = None
    simplicity: Annotated[
        float,
        option("SHARE", "Share of a step's time that a simpler plan may cost, such as 0.01; 0 takes the fastest."),
    ] = 0.0
    device: Annotated[
        str | None, option("NAME", f"Kind of device: {', '.join(preset_names())}. Or give --profile.")
    ] = None
    profile: Annotated[
        Path | None, option("FILE", "Measured hardware and block times, written by `hf-osdp profile`.")
    ] = None
    host_memory: Annotated[
        str | None,
        option(
            "SIZE",
            "Memory of each machine's host, such as 256GiB, for offloading; default: the profile's, that of the"
            " device's usual server, or for cards of workstations an assumed one.",
        ),
    ] = None
    num_nodes: Annotated[int | None, count("Machines; default: the profile's number, or 1.")] = None
    devices_per_node: Annotated[int | None, count("Devices per machine; default: the profile's number, or 1.")] = None
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
    strategy: Annotated[
        Strategy, option("NAME", "osdp decides for each unit; the others use one layout for all units.")
    ] = Strategy.OSDP
    micro_batch_size: Annotated[
        int | None, count("Samples that one device processes at once; default: the planner decides.")
    ] = None
    recompute: Annotated[
        bool | None,
        switch(
            "Recompute every block in backward (activation checkpointing), or none; default: the planner decides.",
            "--recompute/--no-recompute",
            "--activation-checkpointing",
        ),
    ] = None
    host_offload: Annotated[
        bool | None, switch("Keep all states on the host, or none; default: the planner decides.")
    ] = None
    offload_optimizer: Annotated[
        bool | None,
        switch(
            "Keep all optimizer states on the host, or none, and step on the device; default: the planner decides."
        ),
    ] = None
    offload_activations: Annotated[
        bool | None,
        switch("Offload the saved activations of every block to the host, or of none; default: the planner decides."),
    ] = None
    communication: Annotated[
        Literal["exact", "bf16", "int8", "int4"],
        option(
            "NAME",
            "Lowest precision of parameters and gradients sent over slow links; it changes the rounding of training.",
        ),
    ] = "exact"
    compile: Annotated[bool, switch("Compile each block with torch.compile before it is sharded.", "--compile")] = (
        False
    )
    operator_splitting: Annotated[
        bool, switch("Split blocks into operator units, and operators into slices, if that is faster.")
    ] = True
    split_vocabulary: Annotated[
        bool | None,
        switch(
            "Compute the loss in pieces, or split the vocabulary projection, where that pays; outputs.logits are then"
            " computed when read. Default: as under the Trainer, which allows it; other loops need"
            " OSDPConfig(split_vocabulary=True)."
        ),
    ] = None
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
    block_classes: Annotated[
        str | None, option("NAMES", "Classes that become units, comma-separated; default: found in the model.")
    ] = None
    auto_class: Annotated[
        str | None,
        option("CLASS", "Model class to build, such as AutoModelForCausalLM; default: taken from the configuration."),
    ] = None


def with_flags(
    command: Callable[..., None], *names: str, make: Callable[..., object] = dict, leave_out: str = ""
) -> Callable[..., None]:
    """Return a typer command with shared flags in addition to its own options; its first parameter receives
    `make(**flags)`.

    The flags are all fields of `Request`, or only `names`; the command has no flag `leave_out`, which keeps its
    default.
    """
    hints = get_type_hints(Request, include_extras=True)
    kind, flags_of = inspect.Parameter.KEYWORD_ONLY, inspect.signature(Request).parameters.values()
    shared = [
        flag.replace(kind=kind, annotation=hints[flag.name])
        for flag in flags_of
        if flag.name != leave_out and (not names or flag.name in names)
    ]
    own = [
        parameter.replace(kind=kind) for parameter in inspect.signature(command, eval_str=True).parameters.values()
    ][1:]

    @wraps(command)
    def run(**options: object) -> None:
        flags = {parameter.name: options.pop(parameter.name) for parameter in shared}
        command(make(**flags), **options)

    run.__signature__ = inspect.Signature([*own, *shared] if names else [*shared, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*shared, *own)}
    return run


def flag_of(name: str) -> str:
    """`memory_limit` → `--memory-limit`."""
    return f"--{name.replace('_', '-')}"


def stated(flags: Mapping[str, Any]) -> list[str]:
    """Return the flags that do not have their default value, as written on the command line."""
    defaults = {field.name: field.default for field in fields(Request)}
    return [flag_of(name) for name, value in flags.items() if value != defaults[name]]
