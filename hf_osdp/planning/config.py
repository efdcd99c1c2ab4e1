"""`OSDPConfig`: everything that a user can ask of OSDP, validated when it is written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..distributed.restart import check_on_oom
from ..planner.hardware import Hardware, check_margin
from ..planner.plan import Plan
from ..planner.problem import Strategy
from ..planner.profile import Profile
from ..quantities import parse_bytes

_OPEN_SWITCHES = ("reduce_every_micro_step", "recompute", "host_offload", "offload_activations", "split_vocabulary")
"""Switches that None leaves to the planner."""
_SWITCHES = ("operator_splitting", "recalibrate", "compare", "async_save", "resume_after_restart", "save_on_sigterm")
STRATEGIES = tuple(strategy.value for strategy in Strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class OSDPConfig:
    """What to plan for, and what to leave to the planner.

    Raises:
        ValueError: at construction, where a value cannot be used; the message gives value, limit and remedy.
    """

    memory_limit: int | str | None = None
    """Bytes of each device that training may use, as a number or as text such as `"8GiB"`; None: all that it has."""
    memory_margin: float | None = None
    """Share of the limit that the plan leaves free; None: 0.04 on CUDA, whose allocator holds more than tensors, nothing on the CPU."""
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
    offload_activations: bool | None = None
    """True has what every block saves for backward wait in the host's memory, False of none; None lets the planner decide for each."""
    operator_splitting: bool = True
    """The planner may cut blocks into operator units, and operators into slices, where memory binds and that pays."""
    split_vocabulary: bool | None = None
    """Among these cuts may be the vocabulary projection with its loss, after which `outputs.logits` is None in training with labels.
    None allows it where the Trainer takes the loss from the model, and in no other loop."""
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
    """Out of device memory all the same: `raise` says where and which plan is safer; `replan` starts all ranks again by that plan, from
    the last complete checkpoint."""

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)
        if self.memory_margin is not None:
            check_margin(self.memory_margin)
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is not known; use one of {', '.join(STRATEGIES)}.")
        check_on_oom(self.on_oom, planning=self.plan is None)
        object.__setattr__(self, "block_classes", _class_names(self.block_classes))
        for name in ("sequence_length", "global_batch_size", "micro_batch_size", "nodes"):
            _check_count(name, getattr(self, name))
        for name in (*_OPEN_SWITCHES, *_SWITCHES):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name not in _OPEN_SWITCHES):
                raise ValueError(f"{name}={value!r} is not a switch; use true or false.")
        _check_type("plan", self.plan, (Plan, str, Path), "a Plan or the path of a plan file")
        _check_type("hardware", self.hardware, (Hardware, str), "a Hardware or the name of a preset")
        if self.inputs is not None and not callable(self.inputs):
            raise ValueError(
                f"inputs={self.inputs!r} is of type {type(self.inputs).__name__}; give a function from a number of samples to forward's"
                " keyword arguments, which a file cannot hold: OSDPConfig(inputs=...) in the script."
            )
        _check_type("profile", self.profile, (Profile, str, Path), "a Profile or the path of a profile file")
        left = ("recompute", "host_offload", "offload_activations", "split_vocabulary")
        clashes = {
            f"strategy={self.strategy!r}": self.strategy != "osdp", "hardware": self.hardware, "profile": self.profile,
            f"nodes={self.nodes}": self.nodes, "recalibrate=True": self.recalibrate,
            "operator_splitting=False": not self.operator_splitting, f"memory_margin={self.memory_margin}": self.memory_margin is not None,
            **{f"{name}={getattr(self, name)}": getattr(self, name) is not None for name in left},
        }  # fmt: skip
        if self.plan is not None and (clash := next((name for name, given in clashes.items() if given), None)):
            raise ValueError(f"plan runs a given plan as it is, so {clash} would have no effect; leave one of the two out.")
        if self.profile is not None and (self.hardware is not None or self.nodes is not None):
            beside = "hardware" if self.hardware is not None else f"nodes={self.nodes}"
            raise ValueError(f"profile already says what the hardware is, so {beside} would have no effect; leave one of the two out.")
        if self.split_vocabulary and (not self.operator_splitting or self.strategy != "osdp"):
            beside = f"strategy={self.strategy!r}" if self.operator_splitting else "operator_splitting=False"
            raise ValueError(f"split_vocabulary=True has no effect beside {beside}; leave one of the two out.")
        if self.nodes is not None and isinstance(self.hardware, Hardware):
            raise ValueError(f"nodes={self.nodes} was given beside a hardware description with {self.hardware.nodes}; leave nodes out.")

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit in bytes, or None where the device decides."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> OSDPConfig:
        """Read options as they stand in a YAML file or a dict.

        Args:
            options: field names with their values. `osdp: true` beside them is accepted, as the accelerate file has it.

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


def every_option(config: OSDPConfig) -> dict[str, object]:
    """All fields as stated, defaults too: what nothing can be merged into any more."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def stated_options(asked: OSDPConfig | Mapping[str, object] | None) -> dict[str, object]:
    """What the caller set: every key of a mapping, the fields of a configuration that are not at their default."""
    if asked is not None and not isinstance(asked, (OSDPConfig, Mapping)):
        raise ValueError(f"osdp={asked!r} is of type {type(asked).__name__}; use an OSDPConfig or a mapping of its fields.")
    if isinstance(asked, OSDPConfig):
        return {field.name: value for field in fields(asked) if (value := getattr(asked, field.name)) != field.default}
    return dict(asked or {})


def merged_config(asked: OSDPConfig | Mapping[str, object] | None, *below: OSDPConfig | Mapping[str, object] | None) -> OSDPConfig:
    """One configuration from several places; what the caller set goes before what stands below it.

    Args:
        asked: what the caller gave. A mapping states each key that it has; a configuration states the fields that are not
            at their default.
        *below: the same from other places, the strongest first, and so the accelerate file last.

    Raises:
        ValueError: an option is not known, its value cannot be used, or options of several places exclude each other.
    """
    merged: dict[str, object] = {}
    for place in (*reversed(below), asked):
        merged.update(stated_options(place))
    return OSDPConfig.from_options(merged)


def _class_names(names: tuple[str, ...] | list[str] | str | None) -> tuple[str, ...] | None:
    """`"GPT2Block, BertLayer"` as a tuple of names."""
    if names is None:
        return None
    parts = names.split(",") if isinstance(names, str) else list(names)
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"block_classes={names!r} must hold class names, for example GPT2Block,BertLayer.")
    cleaned = tuple(part.strip() for part in parts if part.strip())
    if not cleaned:
        raise ValueError(f"block_classes={names!r} names no class; give names such as GPT2Block, or leave it out to have them found.")
    return cleaned


def _check_count(name: str, value: object) -> None:
    """Refuse what is not a whole number of at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1, or left out.")


def _check_type(name: str, value: object, types: tuple[type, ...], wanted: str) -> None:
    if value is not None and not isinstance(value, types):
        raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; use {wanted}.")
