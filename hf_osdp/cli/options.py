"""The flags that commands share, each defined once, and how they become a command's signature."""

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


def option(metavar: str, text: str, **rules: Any) -> Any:  # noqa: ANN401  (typer's, too, says so)
    """Return an option with the name of its value and its help."""
    return typer.Option(metavar=metavar, help=text, **rules)


def count(text: str) -> Any:  # noqa: ANN401
    """Return an option of at least 1."""
    return option("N", text, min=1)


def switch(text: str, *flags: str) -> Any:  # noqa: ANN401
    """Return a switch, `--name/--no-name` unless it has other flags."""
    return typer.Option(*flags, help=text)


JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write the content for machines; - for stdout, with nothing else on it.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it, as .png, .svg or .html (needs the extra plot).")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A planning problem as the command line states it; each field is a flag."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local folder or config.json; no weights are needed.")]
    sequence_length: Annotated[int, count("Tokens of one sample.")]
    global_batch_size: Annotated[int, count("Samples of one optimizer step over all devices.")]
    memory_limit: Annotated[
        str | None, option("SIZE", "Bytes of each device that training may use, such as 8GiB; else all that it has.")
    ] = None
    margin: Annotated[float | None, option("SHARE", "Share of the limit that stays free; 0.06 on CUDA, 0 on the CPU, unless given.")] = None
    device: Annotated[str | None, option("NAME", f"Kind of device: {', '.join(preset_names())}. --profile can stand in for it.")] = None
    profile: Annotated[Path | None, option("FILE", "Measured hardware and block times, as `hf-osdp profile` writes them.")] = None
    num_nodes: Annotated[int | None, count("Machines; 1, or as the profile has it.")] = None
    devices_per_node: Annotated[int | None, count("Devices in each machine; 1, or as the profile has it.")] = None
    precision: Annotated[
        Literal["no", "bf16", "fp16"] | None,
        option(
            "NAME",
            "no, bf16 or fp16: mixed precision, as Accelerate names it; bf16 on GPUs whose hardware has it, else no, unless given.",
        ),
    ] = None
    optimizer: Annotated[
        Literal[
            "adamw", "momentum", "sgd", "adamw8bit", "adamwfp8", "adamw4bit", "adafactor", "adamw_bnb_8bit", "adamw_8bit", "lion_8bit",
            "lion_32bit", "rmsprop_bnb_8bit", "rmsprop_bnb", "rmsprop_bnb_32bit", "ademamix_8bit", "ademamix",
        ],
        option(
            "NAME",
            "adamw, momentum, sgd, adafactor, torchao's adamw8bit, adamwfp8 and adamw4bit, or bitsandbytes' by the Trainer's names. Its"
            " states count: AdamW keeps 8 bytes a parameter, AdamW8bit 2, Adafactor next to none, but it leaves what it trains replicated.",
        ),
    ] = "adamw"  # fmt: skip
    strategy: Annotated[Strategy, option("NAME", "osdp decides unit by unit; the others are one layout for all units.")] = Strategy.OSDP
    micro_batch_size: Annotated[int | None, count("Samples that one device runs at once; else the planner decides.")] = None
    activation_checkpointing: Annotated[
        bool, switch("Recompute blocks in backward instead of saving activations.", "--activation-checkpointing")
    ] = False
    recompute: Annotated[bool | None, switch("Recompute every block, or none; else the planner decides.")] = None
    host_offload: Annotated[bool | None, switch("Hold all states on the host, or none; else the planner decides.")] = None
    offload_optimizer: Annotated[
        bool | None, switch("Have all optimizer states wait on the host and step on the device, or none; else the planner decides.")
    ] = None
    offload_activations: Annotated[
        bool | None, switch("Have what every block saves for backward wait on the host, or of none; else the planner decides.")
    ] = None
    step_in_backward: Annotated[
        bool | None,
        switch(
            "Step each unit as soon as its gradients are reduced, which frees them; not for loops that clip, accumulate or scale.",
            "--step-in-backward",
        ),
    ] = None
    communication: Annotated[
        Literal["exact", "bf16", "int8", "int4"],
        option("NAME", "The coarsest form in which parameters and gradients may cross slow links; it changes the rounding of training."),
    ] = "exact"
    local_steps: Annotated[
        int | None, count("Steps that each machine takes by itself between synchronisations: another algorithm (DiLoCo), for slow links.")
    ] = None
    compile: Annotated[bool, switch("Compile each block with torch.compile before it is sharded.", "--compile")] = False
    operator_splitting: Annotated[bool, switch("Cut blocks into operator units, and operators into slices, where that pays.")] = True
    split_vocabulary: Annotated[
        bool, switch("Also the loss in pieces, or the vocabulary projection in slices: outputs.logits are computed where they are read.")
    ] = False
    lora_rank: Annotated[int | None, count("Train LoRA adapters of this rank, the rest frozen (needs the extra peft).")] = None
    lora_targets: Annotated[
        str | None,
        option("NAMES", "Projections that get an adapter, comma-separated; else every linear one but the head."),
    ] = None
    block_classes: Annotated[str | None, option("NAMES", "Classes that become units, comma-separated; else found from the model.")] = None
    auto_class: Annotated[
        str | None, option("CLASS", "Class to build, such as AutoModelForCausalLM; else found from the configuration.")
    ] = None


def with_flags(command: Callable[..., None], *names: str, make: Callable[..., object] = dict, leave_out: str = "") -> Callable[..., None]:
    """Return a command for typer that has shared flags beside its own options; its first parameter takes `make(**flags)`.

    The flags are all fields of `Request`, or those `names`; `leave_out` is no flag of this command and keeps its default.
    """
    hints = get_type_hints(Request, include_extras=True)
    kind, flags_of = inspect.Parameter.KEYWORD_ONLY, inspect.signature(Request).parameters.values()
    shared = [
        flag.replace(kind=kind, annotation=hints[flag.name])
        for flag in flags_of
        if flag.name != leave_out and (not names or flag.name in names)
    ]
    own = [parameter.replace(kind=kind) for parameter in inspect.signature(command, eval_str=True).parameters.values()][1:]

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
    """Return the flags that do not have their default, as they are written."""
    defaults = {field.name: field.default for field in fields(Request)}
    return [flag_of(name) for name, value in flags.items() if value != defaults[name]]
