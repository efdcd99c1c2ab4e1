"""`OSDPConfig`: all options of OSDP, validated at construction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..planner.hardware import Hardware, check_margin
from ..planner.local_steps import LocalSteps
from ..planner.plan import Plan
from ..planner.problem import Strategy
from ..planner.profile import Profile
from ..planner.wire import EXACT, WireFormat
from ..quantities import parse_limit

STRATEGIES = tuple(strategy.value for strategy in Strategy)
COMMUNICATIONS = (EXACT, *(wire.value for wire in WireFormat))
_KNOWN = {"strategy": STRATEGIES, "on_oom": ("raise", "replan"), "communication": COMMUNICATIONS}
_TYPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "plan": ((Plan, str, Path), "a Plan or the path of a plan file"),
    "hardware": ((Hardware, str), "a Hardware or the name of a preset"),
    "profile": ((Profile, str, Path), "a Profile or the path of a profile file"),
    "inputs": (
        (Callable,),
        "a function from a number of samples to forward's keyword arguments, which no file holds: OSDPConfig(inputs=...) in the script",
    ),
}
_WITHOUT_EFFECT_ON_PLAN = (
    "strategy", "operator_splitting", "on_oom", "recalibrate", "hardware", "profile", "nodes", "memory_margin",
    "recompute", "host_offload", "offload_optimizer", "offload_activations", "split_vocabulary", "compile",
    "other_optimizers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OSDPConfig:
    """What to plan for, and what to leave to the planner.

    Raises:
        ValueError: at construction, where a value cannot be used; the message gives value, limit and remedy.
    """

    memory_limit: int | float | str | None = None
    """Bytes of each device that training may use, as a number or as text such as `"8GiB"`; None: all that it has."""
    memory_margin: float | None = None
    """Share of the limit that the plan leaves free; None: 0.06 on CUDA, whose allocator holds more than tensors, nothing on the CPU."""
    strategy: str = "osdp"
    """`osdp` searches unit by unit; `fsdp`, `ddp`, `zero2`, `hsdp` and `two_stage` run that one strategy for every unit."""
    block_classes: tuple[str, ...] | str | None = None
    """Classes that become units, as names or one comma-separated string; None finds them from the model."""
    sequence_length: int | None = None
    """Tokens of one sample; None takes it from the data."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over all processes; None takes it from the training arguments or the DataLoader."""
    micro_batch_size: int | None = None
    """Samples that one process runs at once; None lets the planner decide."""
    reduce_every_micro_step: bool | None = None
    """True reduce-scatters gradients in each micro-step, and replicas all-reduce once, in the last; False reduces all in the
    last; None lets the planner decide."""
    recompute: bool | None = None
    """True recomputes the activations of every block in backward, False of none; None lets the planner decide for each."""
    host_offload: bool | None = None
    """True holds the states of every unit in the host's memory, False of none; None lets the planner decide for each."""
    offload_optimizer: bool | None = None
    """True has the optimizer's states of every unit wait in the host's memory and come to the device for the step, False of none; None lets
    the planner decide for each. Parameters and gradients stay on the device."""
    offload_activations: bool | None = None
    """True has what every block saves for backward wait in the host's memory, False of none; None lets the planner decide for each."""
    step_in_backward: bool | None = None
    """Step each unit within backward, as soon as its gradients are reduced, so that no more than one unit's are there: True wherever the
    layout allows, False nowhere; None where a Trainer neither clips (`max_grad_norm=0`) nor scales the loss, nor has a callback read
    gradients. Between backward and `optimizer.step()` these gradients are None. Plans with accumulation do without."""
    other_optimizers: tuple[str, ...] | str | None = None
    """Values of `TrainingArguments.optim`, as names or one comma-separated string, of which the Trainer may take one in the place of what
    its arguments say, where a step is then faster, or fits at all: `"adamw_torch_8bit"`. That trains with other arithmetic, so None takes
    none. Restarts keep the optimizer that training began with."""
    communication: str = EXACT
    """The coarsest form in which parameters and gradients may be sent where a link is slow: `bf16`, `int8` with a scale for each block, or
    `int4`, of gradients alone, `exact` sends all as it is. The planner takes less than that where it pays, by unit and direction; sums are
    made in float32. Training is then another in its rounding: docs/communication.md has what that did to the loss."""
    local_steps: int | None = None
    """Optimizer steps that each machine takes by itself before the machines average how far they went; None averages gradients in every
    step. This is another algorithm, DiLoCo, for links between machines that are very slow: docs/local_steps.md."""
    outer_learning_rate: float = 0.7
    """Of the outer step of `local_steps`."""
    outer_momentum: float = 0.9
    """Of the outer step of `local_steps`, in Nesterov's form."""
    compile: bool | str = False
    """Compile the forward of each block, with Inductor, before it is sharded: elementwise operators run as one kernel, and less is saved
    for backward. The first steps take longer, seconds to minutes. Blocks that do not compile as one graph run as they are; blocks stay
    whole. `"auto"` compiles where that pays within the run, by the estimate, and says why where it does not."""
    operator_splitting: bool = True
    """The planner may split blocks into operator units, and operators into slices, where memory binds and that pays."""
    split_vocabulary: bool | None = None
    """The loss may be computed in pieces, or the vocabulary projection with it in slices; `outputs.logits` are then computed where they are
    read. None allows it where the Trainer takes the loss from the model, and in no other loop."""
    inputs: Callable[[int], Mapping[str, Any]] | None = None
    """A function from a number of samples to forward's keyword arguments, labels included, for a model whose batch cannot be found
    out; Python only. None makes one."""
    plan: Plan | str | Path | None = None
    """A plan, or the file of one, to run as it is instead of searching."""
    hardware: Hardware | str | None = None
    """A description or the name of a preset; None measures this machine when the run starts."""
    nodes: int | None = None
    """Machines that the processes are spread over; None finds out. A given description, profile or plan already says so."""
    profile: Profile | str | Path | None = None
    """What `hf-osdp profile` measured on this machine, or the file of it: hardware and times of blocks, measured no more."""
    recalibrate: bool = False
    """Before training starts, try the plan for a few steps on a throw-away copy of the model, correct the estimates by what is
    seen, and plan again, until the plan stands (at most 3 rounds). The plan that runs is one that was tried and fits."""
    compare: bool = True
    """Estimate DDP, ZeRO-2, FSDP and HSDP beside the plan."""
    async_save: bool = False
    """Checkpoints of several processes are written in shards (`state_dict_type="SHARDED_STATE_DICT"`) while training goes on; each is
    complete before the next begins, and before training ends."""
    resume_after_restart: bool = True
    """The Trainer, started again by `torchrun --max-restarts` or a SLURM requeue, goes on from the last complete checkpoint."""
    save_on_sigterm: bool = True
    """The Trainer, sent SIGTERM on any rank, finishes its step, saves a checkpoint and ends."""
    on_oom: str = "raise"
    """Out of device memory all the same: `raise` says where and which plan is safer; `replan` has the launcher (`torchrun
    --max-restarts 3`) start all ranks again by that plan, from the last complete checkpoint."""

    @property
    def wire(self) -> WireFormat | None:
        """The coarsest format that may be sent; None where all is sent as it is."""
        return None if self.communication == EXACT else WireFormat(self.communication)

    def outer(self, machines: int = 2) -> LocalSteps | None:
        """Return the local steps that are asked for, on so many machines; None where there are none."""
        if self.local_steps is None:
            return None
        outer = {name: getattr(self, name) for name in ("outer_learning_rate", "outer_momentum")}
        return LocalSteps(steps=self.local_steps, machines=machines, **outer)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_classes", _names("block_classes", self.block_classes, "class", "GPT2Block,BertLayer"))
        object.__setattr__(self, "other_optimizers", _names("other_optimizers", self.other_optimizers, "optimizer", "adamw_torch_8bit"))
        self._check_values()
        self._check_local_steps()
        self._check_combinations()

    def _check_values(self) -> None:
        """Refuse values that are not of their field's kind."""
        if self.memory_limit is not None:
            parse_limit(self.memory_limit)
        if self.memory_margin is not None:
            check_margin(self.memory_margin)
        for field in fields(self):
            name, value, problem = field.name, getattr(self, field.name), None
            if value is None and field.default is None:
                continue
            if name in _KNOWN and value not in _KNOWN[name]:
                problem = f"is not known; use one of {', '.join(_KNOWN[name])}"
            elif str(field.type).startswith("bool") and not isinstance(value, bool) and (name, value) != ("compile", "auto"):
                problem = f"is not a switch; use true or false{', or auto' if name == 'compile' else ''}"
            elif field.type == "int | None" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                problem = "must be a whole number of at least 1, or left out"
            elif name in _TYPES and not isinstance(value, _TYPES[name][0]):
                problem = f"is of type {type(value).__name__}; use {_TYPES[name][1]}"
            if problem is not None:
                raise ValueError(f"{name}={value!r} {problem}.")

    def _check_local_steps(self) -> None:
        """Refuse local steps beside what they are not made for, and options of theirs without them."""
        if self.outer() is None:
            if (self.outer_learning_rate, self.outer_momentum) != (0.7, 0.9):
                raise ValueError("outer_learning_rate and outer_momentum have no effect without local_steps; leave them out.")
            return
        refused = {**dict.fromkeys(("recalibrate", "host_offload", "offload_optimizer", "step_in_backward"), True), "on_oom": "replan"}
        for name, asked in refused.items():
            if getattr(self, name) == asked:
                raise ValueError(f"local_steps={self.local_steps} cannot run beside {self._shown(name)}; leave one of the two out.")

    def _check_combinations(self) -> None:
        """Refuse options that others leave without effect."""
        problem = None
        if self.plan is not None:
            defaults = {field.name: field.default for field in fields(self)}
            if name := next((name for name in _WITHOUT_EFFECT_ON_PLAN if getattr(self, name) != defaults[name]), None):
                problem = f"plan runs a given plan as it is, so {self._shown(name)} would have no effect"
        elif self.profile is not None and (self.hardware is not None or self.nodes is not None):
            beside = self._shown("hardware" if self.hardware is not None else "nodes")
            problem = f"profile already says what the hardware is, so {beside} would have no effect"
        elif self.recalibrate and self.communication != EXACT:
            problem = f"recalibrate=True learns the links' speed from what is sent as it is, beside {self._shown('communication')}"
        elif self.split_vocabulary and (not self.operator_splitting or self.strategy != "osdp"):
            beside = self._shown("strategy" if self.operator_splitting else "operator_splitting")
            problem = f"split_vocabulary=True has no effect beside {beside}"
        if problem is not None:
            raise ValueError(f"{problem}; leave one of the two out.")
        if self.nodes is not None and isinstance(self.hardware, Hardware):
            raise ValueError(f"nodes={self.nodes} was given beside a hardware description with {self.hardware.nodes}; leave nodes out.")

    def _shown(self, name: str) -> str:
        """Return an option as a message quotes it; values and files may be long."""
        return name if name in ("hardware", "profile") else f"{name}={getattr(self, name)!r}"

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit in bytes, or None where the device decides."""
        return None if self.memory_limit is None else parse_limit(self.memory_limit)

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> OSDPConfig:
        """Read options as they stand in a YAML file or a dict; `osdp: true` beside them is accepted, as the accelerate file has it.

        Raises:
            ValueError: an option is not known, or its value cannot be used.
        """
        known = [field.name for field in fields(cls)]
        if options.get("osdp", True) is not True:
            raise ValueError(f"osdp: {options['osdp']!r} stands among the options of OSDP; only osdp: true can.")
        options = {name: value for name, value in options.items() if name != "osdp"}
        unknown = sorted(str(name) for name in options if name not in known)
        if unknown:
            raise ValueError(f"OSDP has no option {', '.join(map(repr, unknown))}; its options are {', '.join(known)}.")
        return cls(**options)  # type: ignore[arg-type]

    def options(self) -> dict[str, object]:
        """Return all fields, with defaults filled in: a mapping that no other place's options can change in `merged_config`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def stated_options(asked: OSDPConfig | Mapping[str, object] | None) -> dict[str, object]:
    """Return what the caller set: every key of a mapping, the fields of a configuration that are not at their default."""
    if asked is not None and not isinstance(asked, (OSDPConfig, Mapping)):
        raise ValueError(f"osdp={asked!r} is of type {type(asked).__name__}; use an OSDPConfig or a mapping of its fields.")
    if isinstance(asked, OSDPConfig):
        return {field.name: value for field in fields(asked) if (value := getattr(asked, field.name)) != field.default}
    return dict(asked or {})


def merged_config(*places: OSDPConfig | Mapping[str, object] | None) -> OSDPConfig:
    """Return one configuration from several places, the strongest first, and so the accelerate file last; errors are `from_options`'.

    A mapping states each key that it has; a configuration states the fields that are not at their default.
    """
    merged: dict[str, object] = {}
    for place in reversed(places):
        merged.update(stated_options(place))
    return OSDPConfig.from_options(merged)


def _names(option: str, names: Iterable[str] | None, kind: str, example: str) -> tuple[str, ...] | None:
    """Return an option's names, given as several or as `"GPT2Block, BertLayer"`, as a tuple."""
    if names is None:
        return None
    parts = names.split(",") if isinstance(names, str) else list(names)
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{option}={names!r} must hold {kind} names, for example {example}.")
    cleaned = tuple(part.strip() for part in parts if part.strip())
    if not cleaned:
        raise ValueError(f"{option}={names!r} names no {kind}; give names such as {example.partition(',')[0]}, or leave it out.")
    return cleaned
