"""`OSDPConfig`: all options of OSDP, validated at construction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..planner.hardware import Hardware, check_margin
from ..planner.plan import Plan
from ..planner.problem import Strategy, check_simplicity
from ..planner.profile import Profile
from ..planner.wire import EXACT, WireFormat
from ..quantities import parse_limit

STRATEGIES = tuple(strategy.value for strategy in Strategy)
COMMUNICATIONS = (EXACT, *(wire.value for wire in WireFormat))
_ALLOWED_VALUES = {"strategy": STRATEGIES, "on_oom": ("raise", "replan"), "communication": COMMUNICATIONS}
_TYPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "plan": ((Plan, str, Path), "a Plan or the path of a plan file"),
    "hardware": ((Hardware, str), "a Hardware or the name of a preset"),
    "profile": ((Profile, str, Path), "a Profile or the path of a profile file"),
    "inputs": (
        (Callable,),
        (
            "a function from a number of samples to forward's keyword arguments, which no file holds:"
            " OSDPConfig(inputs=...) in the script"
        ),
    ),
}
_LEAST = {"images": 0}
"""Least values of whole numbers, if they are not 1."""
_IGNORED_WITH_PLAN = (
    "strategy", "operator_splitting", "on_oom", "recalibrate", "hardware", "profile", "nodes", "memory_margin",
    "simplicity",
    "recompute", "host_offload", "offload_optimizer", "offload_activations", "split_vocabulary", "compile",
    "time_blocks",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OSDPConfig:
    """Options of OSDP: what to plan for, and which decisions to leave to the planner.

    Raises:
        ValueError: at construction, if a value cannot be used; the message gives value, limit and remedy.
    """

    memory_limit: int | float | str | None = None
    """Bytes that training may use on each device, as a number or as text such as `"8GiB"`; None allows all of the
    device's memory.
    """
    memory_margin: float | None = None
    """Share of the limit that the plan leaves free; None is 0.02 and 128 MiB on CUDA, whose allocator holds more than
    tensors, and 0 on the CPU.
    """
    simplicity: float = 0.0
    """Share of a step's time that a simpler plan may cost, such as 0.01; 0 takes the fastest plan. Among the plans
    within the share, the planner takes the one of fewest different layouts, groups of ranks and uses of the host, and
    states what the fastest plan would have gained."""
    strategy: str = "osdp"
    """`osdp` decides for each unit; `fsdp`, `ddp`, `zero2`, `hsdp` and `two_stage` apply that one strategy to every
    unit.
    """
    block_classes: tuple[str, ...] | str | None = None
    """Classes that become units, as names or one comma-separated string; None finds them in the model."""
    sequence_length: int | None = None
    """Tokens of one sample; None takes it from the data."""
    images: int | None = None
    """Pictures of one sample, if the batch is derived from the model: 0 for only text, None for one if the model takes
    pictures. Batches of the data, or `inputs`, have their own."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over all processes; None takes it from the training arguments or the
    DataLoader.
    """
    micro_batch_size: int | None = None
    """Samples that one process runs at once; None lets the planner decide."""
    reduce_every_micro_step: bool | None = None
    """True reduce-scatters gradients in each micro-step, and replicas all-reduce once, in the last; False reduces only
    in the last; None lets the planner decide."""
    recompute: bool | None = None
    """True recomputes the activations of every block in backward, False of no block; None lets the planner decide
    for each.
    """
    host_offload: bool | None = None
    """True keeps the states of every unit in the host's memory, False of no unit; None lets the planner decide for
    each.
    """
    offload_optimizer: bool | None = None
    """True keeps the optimizer states of every unit in the host's memory and copies them to the device for the step,
    False of no unit; None lets the planner decide for each. Parameters and gradients stay on the device."""
    offload_activations: bool | None = None
    """True keeps every block's saved activations in the host's memory until backward, False those of none; None
    lets the planner decide.
    """
    communication: str = EXACT
    """The coarsest format in which parameters and gradients may be sent over slow links: `bf16`, `int8` with a scale
    for each block, or `int4`, for gradients only; `exact` changes nothing. The planner chooses a format for each unit
    and direction if it saves time; sums are computed in float32. This changes the rounding of training:
    docs/communication.md shows the effect on the loss."""
    compile: bool | str = False
    """Compile the forward of each block with Inductor before it is sharded: elementwise operators run as one kernel,
    and less is saved for backward. The first steps take longer, seconds to minutes. Blocks that do not compile as one
    graph run eager; blocks are not split. `"auto"` compiles if that saves time within the run by the estimate, and
    logs the reason if it does not."""
    operator_splitting: bool = True
    """The planner may split blocks into operator units, and operators into slices, if memory is short and the split
    makes steps faster.
    """
    split_vocabulary: bool | None = None
    """The loss may be computed in pieces, or together with the vocabulary projection in slices; `outputs.logits` are
    then computed only when they are read. None allows it if the Trainer takes the loss from the model, and in no other
    loop."""
    inputs: Callable[[int], Mapping[str, Any]] | None = None
    """A function from a number of samples to forward's keyword arguments, including labels, for a model whose batch
    cannot be derived; Python only. None makes a batch from the model."""
    plan: Plan | str | Path | None = None
    """A plan, or the path of a plan file, to run unchanged instead of searching."""
    hardware: Hardware | str | None = None
    """A description or the name of a preset; None measures this machine when the run starts."""
    nodes: int | None = None
    """Number of machines of the run; None detects it.

    Leave it out with a hardware description, profile or plan, which states it.
    """
    profile: Profile | str | Path | None = None
    """The result of `hf-osdp profile` on this machine, or its file: hardware and block times, which are then not
    measured again.
    """
    time_blocks: bool = True
    """Time a few of the model's blocks on the devices before planning, a second or two the first time and then kept on
    disk; False estimates them from the rates of the hardware. Not if `hardware`, `profile` or `plan` is given."""
    recalibrate: bool = False
    """Before training starts, try the plan for a few steps on a temporary copy of the model, correct the estimates by
    the measurements, and plan again, until the plan no longer changes (at most 3 rounds). The plan that runs was tried
    and fits."""
    compare: bool = True
    """Also estimate DDP, ZeRO-2, FSDP and HSDP, to compare them with the plan."""
    report: bool = True
    """Write `osdp_report.json`, the plan with its estimate and measurement, into the run's output folder; False keeps
    the folder to checkpoints."""
    async_save: bool = False
    """Checkpoints of several processes are written in shards (`state_dict_type="SHARDED_STATE_DICT"`) while training
    continues; each is complete before the next begins, and before training ends."""
    resume_after_restart: bool = True
    """After a restart by `torchrun --max-restarts` or a SLURM requeue, the Trainer continues from the last complete
    checkpoint.
    """
    save_on_sigterm: bool = True
    """On SIGTERM at any rank, the Trainer finishes its step, saves a checkpoint and exits."""
    on_oom: str = "raise"
    """If a device runs out of memory in spite of the plan, `raise` reports where, and a safer plan; `replan` lets the
    launcher (`torchrun --max-restarts 3`) restart all ranks with that plan, from the last complete checkpoint."""

    @property
    def wire(self) -> WireFormat | None:
        """The coarsest format that may be sent; None for exact communication."""
        return None if self.communication == EXACT else WireFormat(self.communication)

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
        if self.memory_margin is not None:
            check_margin(self.memory_margin)
        check_simplicity(self.simplicity)
        for field in fields(self):
            name, value, problem = field.name, getattr(self, field.name), None
            if value is None and field.default is None:
                continue
            if name in _ALLOWED_VALUES and value not in _ALLOWED_VALUES[name]:
                problem = f"is not known; use one of {', '.join(_ALLOWED_VALUES[name])}"
            elif (
                str(field.type).startswith("bool")
                and not isinstance(value, bool)
                and (name, value) != ("compile", "auto")
            ):
                problem = f"must be true or false{', or auto' if name == 'compile' else ''}"
            elif field.type == "int | None" and (
                isinstance(value, bool) or not isinstance(value, int) or value < _LEAST.get(name, 1)
            ):
                problem = f"must be a whole number of at least {_LEAST.get(name, 1)}, or left out"
            elif name in _TYPES and not isinstance(value, _TYPES[name][0]):
                problem = f"is of type {type(value).__name__}; use {_TYPES[name][1]}"
            if problem is not None:
                raise ValueError(f"{name}={value!r} {problem}.")

    def _check_combinations(self) -> None:
        """Refuse options that have no effect together with others."""
        problem = None
        if self.plan is not None:
            defaults = {field.name: field.default for field in fields(self)}
            if name := next((name for name in _IGNORED_WITH_PLAN if getattr(self, name) != defaults[name]), None):
                problem = f"plan runs a given plan as it is, so {self._shown(name)} would have no effect"
        elif self.profile is not None and (self.hardware is not None or self.nodes is not None):
            other = self._shown("hardware" if self.hardware is not None else "nodes")
            problem = f"profile already describes the hardware, so {other} would have no effect"
        elif self.recalibrate and self.communication != EXACT:
            problem = f"recalibrate=True measures links by exact communication, but the run has {self._shown('communication')}"  # noqa: E501
        elif self.split_vocabulary and (not self.operator_splitting or self.strategy != "osdp"):
            other = self._shown("strategy" if self.operator_splitting else "operator_splitting")
            problem = f"split_vocabulary=True has no effect with {other}"
        if problem is not None:
            raise ValueError(f"{problem}; leave one of the two out.")
        if self.nodes is not None and isinstance(self.hardware, Hardware):
            raise ValueError(
                f"nodes={self.nodes} was given with a hardware description of {self.hardware.nodes}; leave nodes out."
            )

    def compiling(self) -> OSDPConfig:
        """Return the configuration with compiled blocks, for which something else than `compile` asks; `"auto"`
        stays.
        """
        return replace(self, compile=self.compile or True)

    def _shown(self, name: str) -> str:
        """Return an option for a message, without values that may be long."""
        return name if name in ("hardware", "profile") else f"{name}={getattr(self, name)!r}"

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit in bytes; None for all of the device's memory."""
        return None if self.memory_limit is None else parse_limit(self.memory_limit)

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
                f"osdp: {options['osdp']!r} cannot be combined with other options of OSDP; use osdp: true or leave it"
                " out."
            )
        options = {name: value for name, value in options.items() if name != "osdp"}
        unknown = sorted(str(name) for name in options if name not in known)
        if unknown:
            raise ValueError(
                f"OSDP has no option {', '.join(map(repr, unknown))}; its options are {', '.join(known)}."
            )
        return cls(**options)  # type: ignore[arg-type]

    def options(self) -> dict[str, object]:
        """Return all fields, with defaults filled in: as the first place of `merged_config`, this mapping overrides
        all others.
        """
        return {field.name: getattr(self, field.name) for field in fields(self)}


def stated_options(osdp: OSDPConfig | Mapping[str, object] | None) -> dict[str, object]:
    """Return the options that the caller set: every key of a mapping; the fields of a configuration that differ
    from their default.
    """
    if osdp is not None and not isinstance(osdp, (OSDPConfig, Mapping)):
        raise ValueError(
            f"osdp={osdp!r} is of type {type(osdp).__name__}; use an OSDPConfig or a mapping of its fields."
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
        raise ValueError(f"{option}={names!r} must hold {kind} names, for example {example}.")
    cleaned = tuple(part.strip() for part in parts if part.strip())
    if not cleaned:
        raise ValueError(
            f"{option}={names!r} names no {kind}; give names such as {example.partition(',')[0]}, or leave it out."
        )
    return cleaned
