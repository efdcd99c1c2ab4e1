"""`OSDPConfig`: all options of OSDP, validated at construction."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..errors import refuse_first, shown
from ..planner.hardware import Hardware, check_margin
from ..planner.placement import HOST_OPTIONS
from ..planner.plan import Plan
from ..planner.problem import check_simplicity
from ..planner.profile import Profile
from ..planner.split import ModelSplit
from ..planner.training_job import Communication, Decisions
from ..quantities import parse_limit, parse_share

_TYPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "plan": ((Plan, str, Path), "a Plan or the path of a plan file"),
    "hardware": ((Hardware, str), "a Hardware or the name of a preset"),
    "profile": ((Profile, str, Path), "a Profile or the path of a profile file"),
    "also": ((tuple, list), "a tuple of models, which no file holds: OSDPConfig(also=...) in the script"),
    "inputs": (
        (Callable,),
        (
            "a function from a number of samples to forward's keyword arguments, which no file holds:"
            " OSDPConfig(inputs=...) in the script"
        ),
    ),
}
GROUPS = {
    "Batch": ("sequence_length", "images", "global_batch_size", "micro_batch_size", "batch_by_tokens", "inputs"),
    "Devices": ("hardware", "nodes", "profile", "time_blocks"),
    "Memory": ("memory_limit", "memory_margin", "beside", "also", *HOST_OPTIONS, "recompute", "on_oom"),
    "Layout": (
        "strategy", "simplicity", "block_classes", "operator_splitting", "blocks_per_unit", "split_vocabulary",
        "compile", "plan", "compare",
    ),
    "Communication": ("communication", "reduce_every_micro_step"),
    "Run": ("report", "async_save", "resume_after_restart", "save_on_sigterm"),
}  # fmt: skip
"""All options by subject, for help texts and the page of options."""
LEAST = {"images": 0}
"""Least values of whole numbers, if they are not 1."""
_IGNORED_WITH_PLAN = (
    "strategy", "operator_splitting", "blocks_per_unit", "on_oom", "hardware", "profile", "nodes", "memory_margin",
    "simplicity", "recompute", "beside", *HOST_OPTIONS, "split_vocabulary", "compile", "compare", "time_blocks",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OSDPConfig(Decisions):
    """Options of OSDP: what to plan for, and which decisions to leave to the planner.

    Switches are True or False; None is the default that their text names.

    Raises:
        ValueError: at construction, if a value cannot be used; the message gives value, limit and remedy.
    """

    sequence_length: int | None = None
    """Tokens of one sample.

    None takes it from the data.
    """
    images: int | None = None
    """Pictures of one sample, 0 for only text; default: one for models that take them, whose placeholders count as
    tokens.

    It is for batches that are derived from the model; those of the data, or of `inputs`, have their own pictures.
    """
    global_batch_size: int | None = None
    """Samples of one optimizer step over all processes.

    None takes it from the training arguments or the DataLoader.
    """
    batch_by_tokens: bool | None = None
    """Sort each rank's samples of a step by length and cut them into micro-batches of at most the plan's tokens, so
    that little is padded. None: where the Trainer's loss and model allow it, and it saves time."""
    inputs: Callable[[int], Mapping[str, Any]] | None = None
    """A function from a number of samples to forward's keyword arguments with labels, for a model whose batch cannot
    be derived; Python only."""
    beside: int | float | str | None = None
    """Memory of each device that another program takes, such as vLLM: a share (0.3) or bytes (24GiB). Default: what
    others have when planning starts; of vLLM inside TRL, what is configured there."""
    also: tuple[Any, ...] = ()
    """Models that run forward beside the trained one, such as a teacher; Python only. The plan leaves them room and
    moves them to the device, in shards where that is faster. The Trainer knows its own."""
    hardware: Hardware | str | None = None
    """A description or the name of a preset; default: this machine is measured when the run starts."""
    nodes: int | None = None
    """Number of machines of the run; default: as found.

    Leave it out with a hardware description, profile or plan, which states it.
    """
    profile: Profile | str | Path | None = None
    """Measured hardware and block times, written by hf-osdp profile.

    They are then not measured again. In Python also the `Profile` itself.
    """
    time_blocks: bool = True
    """Time a few of the model's blocks on the devices before planning; False estimates them from the rates of the
    hardware. Not if `hardware`, `profile` or `plan` is given."""
    memory_limit: int | float | str | None = None
    """Memory of each device that training may use, such as 8GiB; default: all of it.

    A number is bytes; text has a unit.
    """
    memory_margin: float | None = None
    """Share of the limit that the plan leaves free; default: 0.02 and 128 MiB on CUDA, whose allocator holds more than
    tensors, and 0 on the CPU.
    """
    on_oom: Literal["raise", "replan"] = "raise"
    """If a device runs out of memory in spite of the plan: `raise` reports where, and a lower limit; `replan` lets the
    launcher (`torchrun --max-restarts 3`) restart under that limit, from the last checkpoint."""
    strategy: Literal["osdp", "fsdp", "ddp", "zero2", "hsdp", "two_stage"] = "osdp"
    """`osdp` decides for each unit; the others use one layout for all units."""
    simplicity: float = 0.001
    """Price of each further layout, group of ranks and use of the host, as a share of a step's time; 0 takes the
    fastest plan.

    A plan that gives up some of them states how much slower it is.
    """
    block_classes: tuple[str, ...] | str | None = None
    """Classes that become units, as one comma-separated text; default: found in the model.

    In Python also as a sequence of names.
    """
    operator_splitting: bool = True
    """Split blocks into operator units, and operators into slices, if memory is short and that makes steps faster."""
    blocks_per_unit: int | None = None
    """Most equal blocks in a unit, which are gathered and reduced together: fewer messages, but more memory. Default:
    1, 2, 4 or 8, whichever trains fastest; 1 for models that leave out layers at random."""
    split_vocabulary: bool | None = None
    """Compute the loss in chunks where that pays; outputs.logits are then computed when they are read. Default: where
    the Trainer trains with the model's own loss."""
    compile: bool = False
    """Compile the forward of each block with Inductor before it is sharded.

    Elementwise operators run as one kernel, and less is saved for backward. The first steps take longer, seconds to
    minutes. Blocks are not split. On a GPU, compiled blocks are measured before planning; elsewhere they are counted
    as not compiled.
    """
    plan: Plan | str | Path | None = None
    """A plan, or the path of a plan file, to run unchanged instead of searching."""
    compare: bool = False
    """Also estimate DDP, ZeRO-2, FSDP and HSDP at the start, and print them beside the plan."""
    communication: Communication = "exact"
    """Coarsest format in which parameters and gradients may be sent over slow links; it changes the rounding of
    training.

    `int8` has a scale for each block, `int4` is for gradients only, `exact` changes nothing. The planner chooses a
    format for each unit and direction if it saves time; sums are computed in float32. docs/several_machines.md shows
    the effect on the loss.
    """
    report: bool = True
    """Write `osdp_report.json`, the plan with its estimate and measurement, into the run's output folder."""
    async_save: bool = False
    """Write checkpoints in shards (`state_dict_type="SHARDED_STATE_DICT"`) while training continues."""
    resume_after_restart: bool = True
    """After a restart by `torchrun --max-restarts` or a SLURM requeue, the Trainer continues from the last complete
    checkpoint.
    """
    save_on_sigterm: bool = True
    """On SIGTERM at any rank, the Trainer finishes its step, saves a checkpoint and exits."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "block_classes", _names("block_classes", self.block_classes, "class", "GPT2Block,BertLayer")
        )
        self._check_values()
        self._check_combinations()

    def _check_values(self) -> None:
        """Refuse values of the wrong type or out of range."""
        if self.memory_limit is not None:
            parse_limit(self.memory_limit)
        if self.beside is not None:
            parse_share(self.beside, 2**40, name="beside")
        if self.memory_margin is not None:
            check_margin(self.memory_margin)
        check_simplicity(self.simplicity)
        for name, hint in _HINTS.items():
            if (problem := _problem(name, getattr(self, name), hint)) is not None:
                raise ValueError(f"{name}={shown(getattr(self, name))} {problem}.")
        ModelSplit(blocks_per_unit=self.blocks_per_unit or 1)  # refuses too many

    def _check_combinations(self) -> None:
        """Refuse options that have no effect together with others."""
        defaults = {field.name: field.default for field in fields(self)}
        ignored = next((name for name in _IGNORED_WITH_PLAN if getattr(self, name) != defaults[name]), "plan")
        described = "hardware" if self.hardware is not None else "nodes"
        unsplit = "strategy" if self.operator_splitting else "operator_splitting"
        pairs = {
            f"plan runs a given plan as it is, so {self._shown(ignored)} would have no effect":
                self.plan is not None and ignored != "plan",
            f"profile already describes the hardware, so {self._shown(described)} would have no effect":
                self.profile is not None and getattr(self, described) is not None,
            f"offload_activations=True has no effect with blocks_per_unit={self.blocks_per_unit}":
                self.offload_activations and (self.blocks_per_unit or 1) > 1,
            f"split_vocabulary=True has no effect with {self._shown(unsplit)}":
                self.split_vocabulary and (not self.operator_splitting or self.strategy != "osdp"),
        }  # fmt: skip
        refuse_first({f"{pair}; leave one of the two out.": holds for pair, holds in pairs.items()})
        if self.nodes is not None and isinstance(self.hardware, Hardware):
            raise ValueError(
                f"nodes={self.nodes} was given with a hardware description of {self.hardware.nodes}; leave nodes out."
            )

    def _shown(self, name: str) -> str:
        """Return an option for a message, without values that may be long."""
        return name if name in ("hardware", "profile") else f"{name}={getattr(self, name)!r}"

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit in bytes; None for all of the device's memory."""
        return None if self.memory_limit is None else parse_limit(self.memory_limit)

    def beside_bytes(self, device_bytes: int) -> int:
        """Return what another program takes of a device with so much memory."""
        return 0 if self.beside is None else parse_share(self.beside, device_bytes, name="beside")

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> OSDPConfig:
        """Make a configuration from the options of a YAML file or a dict, which may contain `osdp: true`, as the
        accelerate file does.

        Raises:
            ValueError: an option is not known, or its value cannot be used.
        """
        known = [field.name for field in fields(cls)]
        if options.get("osdp", True) is not True:
            raise ValueError(
                f"osdp: {shown(options['osdp'])} cannot be combined with other options of OSDP; use osdp: true or"
                " leave it out."
            )
        options = {name: value for name, value in options.items() if name != "osdp"}
        unknown = sorted(str(name) for name in options if name not in known)
        if unknown:
            raise ValueError(
                f"OSDP has no option {', '.join(map(repr, unknown))}; its options are {', '.join(known)}."
            )
        return cls(**options)  # type: ignore[arg-type]


_HINTS = get_type_hints(OSDPConfig)


def _problem(name: str, value: object, hint: Any) -> str | None:  # noqa: ANN401
    """Return the reason why an option cannot have a value; None if it can."""
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    if get_origin(hint) is Literal:
        return None if value in kinds else f"is not known; use one of {', '.join(kinds)}"
    if bool in kinds:
        return None if isinstance(value, bool) else "must be true or false"
    if kinds[:2] == (int, type(None)) and (
        isinstance(value, bool) or not isinstance(value, int) or value < LEAST.get(name, 1)
    ):
        return f"must be a whole number of at least {LEAST.get(name, 1)}, or left out"
    if name in _TYPES and not isinstance(value, _TYPES[name][0]):
        return f"is of type {type(value).__name__}; use {_TYPES[name][1]}"
    return None


def option_texts() -> dict[str, str]:
    """Return the first paragraph of each option's docstring, which is its help text on command lines."""
    texts = {}
    with suppress(OSError):  # without source files, options have no texts
        for cls in OSDPConfig.__mro__[-2::-1]:
            (tree,) = ast.parse(inspect.getsource(cls)).body
            assert isinstance(tree, ast.ClassDef)
            for option, text in pairwise(tree.body):
                if isinstance(option, ast.AnnAssign) and isinstance(text, ast.Expr):
                    first = ast.literal_eval(text.value).partition("\n\n")[0]
                    texts[ast.unparse(option.target)] = " ".join(first.replace("`", "").split())
    return texts


def stated_options(osdp: OSDPConfig | Mapping[str, object] | None) -> dict[str, object]:
    """Return the options that the caller set: every key of a mapping; the fields of a configuration that differ
    from their default.
    """
    if osdp is not None and not isinstance(osdp, (OSDPConfig, Mapping)):
        raise ValueError(
            f"osdp={shown(osdp)} is of type {type(osdp).__name__}; use an OSDPConfig or a mapping of its fields."
        )
    if isinstance(osdp, OSDPConfig):
        return {field.name: value for field in fields(osdp) if (value := getattr(osdp, field.name)) != field.default}
    return dict(osdp or {})


def merged_config(*places: OSDPConfig | Mapping[str, object] | None) -> OSDPConfig:
    """Merge the options of several places, of which earlier ones override later ones; `stated_options` says what each
    sets.

    Errors are those of `from_options`.
    """
    merged: dict[str, object] = {}
    for place in reversed(places):
        merged.update(stated_options(place))
    return OSDPConfig.from_options(merged)


def _names(option: str, names: Iterable[str] | None, kind: str, example: str) -> tuple[str, ...] | None:
    """Return an option's names as a tuple; they were given as a sequence or as one string, `"GPT2Block,
    BertLayer"`.
    """
    if names is None:
        return None
    parts = names.split(",") if isinstance(names, str) else list(names)
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{option}={shown(names)} must hold {kind} names, for example {example}.")
    cleaned = tuple(part.strip() for part in parts if part.strip())
    if not cleaned:
        raise ValueError(
            f"{option}={shown(names)} names no {kind}; give names such as {example.partition(',')[0]}, or leave it"
            " out."
        )
    return cleaned
