"""The plan: what each unit does, and the batch it does it with. An immutable value with a JSON form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import PlanError
from .costs import Batch, Choice
from .cut import WHOLE_BLOCKS, Cut
from .description import Activations, ModelDescription
from .files import read_whole, validated, write_whole

PLAN_VERSION = 3


class ShardMode(str, Enum):
    """How a unit's parameters lie on the devices (the paper's DP, ZDP and group sharding)."""

    REPLICATE = "replicate"
    GROUP_SHARD = "group_shard"
    SHARD = "shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitDecision:
    """Layout of one unit: sharded over `shard_size` ranks, replicated over the rest of the world."""

    fqn: str
    shard_size: int
    """Ranks that share one copy: 1 replicates, the world size shards over all, between is HSDP."""
    reshard_after_forward: bool
    """Free the gathered parameters after forward and gather them again in backward (ZeRO-3), or keep them (ZeRO-2)."""
    stage_size: int = 1
    """Ranks of a node where all-gathers and reduce-scatters run in two stages, between nodes and inside; 1 runs them in one."""
    reduce_every_micro_step: bool = True
    """Reduce-scatter gradients in each micro-step, holding shards, or hold whole gradients and reduce their sum in the last.

    The all-reduce between replicas comes in the last micro-step either way.
    """
    activations: Activations = Activations.SAVE
    on_host: bool = False
    """Parameters, gradients and optimizer states live in the host's memory, and the host takes the optimizer step."""

    def __post_init__(self) -> None:
        if self.shard_size < 1:
            raise ValueError(f"Unit {self.fqn or '(root)'!r}: shard_size={self.shard_size} must be at least 1.")
        if self.stage_size != 1 and not (1 < self.stage_size < self.shard_size and self.shard_size % self.stage_size == 0):
            raise ValueError(
                f"Unit {self.fqn or '(root)'!r}: stage_size={self.stage_size} must be 1, or divide shard_size={self.shard_size}"
                " and be less."
            )

    @classmethod
    def of(cls, fqn: str, choice: Choice) -> UnitDecision:
        """What was chosen for the unit of this name."""
        return cls(
            fqn=fqn,
            shard_size=choice.shard_size,
            reshard_after_forward=not choice.keep,
            stage_size=choice.stage_size,
            reduce_every_micro_step=not choice.hold_gradients,
            activations=choice.activations,
            on_host=choice.on_host,
        )

    @property
    def module_names(self) -> tuple[str, ...]:
        """Modules of the unit: its name holds theirs, joined by `+`."""
        return tuple(self.fqn.split("+"))

    @property
    def two_stage(self) -> bool:
        """Whether all-gathers and reduce-scatters run in two stages."""
        return self.stage_size > 1

    def mode(self, world_size: int) -> ShardMode:
        """The layout's name in a world of `world_size` ranks."""
        if self.shard_size == 1:
            return ShardMode.REPLICATE
        return ShardMode.SHARD if self.shard_size == world_size else ShardMode.GROUP_SHARD

    def describe(self, world_size: int) -> str:
        """Short text for tables: `replicate`, `shard 8`, `shard 2 x replicate 4, keep`, `shard 16 in 2 stages (2 x 8)`."""
        match self.mode(world_size):
            case ShardMode.REPLICATE:
                text = "replicate"
            case ShardMode.SHARD:
                text = f"shard {world_size}"
            case ShardMode.GROUP_SHARD:
                text = f"shard {self.shard_size} x replicate {world_size // self.shard_size}"
        if self.two_stage:
            text = f"{text} in 2 stages ({self.shard_size // self.stage_size} x {self.stage_size})"
        more = {
            "keep": not self.reshard_after_forward,
            "hold gradients": not self.reduce_every_micro_step,
            "recompute": self.activations.recomputes,
            "offload activations": self.activations.offloads,
            "on host": self.on_host,
        }
        return ", ".join([text, *(word for word, said in more.items() if said)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one model is trained on one set of devices.

    Every rank runs the same plan; `fingerprint` tells whether it does.
    """

    world_size: int
    strategy: str
    """`osdp` where it was searched for, else the single strategy that was asked for."""
    units: tuple[UnitDecision, ...]
    """One decision a unit, in the order of the description."""
    micro_batch_size: int
    """Samples that one rank runs at once."""
    accumulation_steps: int
    """Micro-batches a rank runs before each optimizer step."""
    model_fingerprint: str
    cut: Cut = WHOLE_BLOCKS
    """What is done to the model before its units are found: the units are those of the model that was cut so."""
    model_name: str = ""
    sequence_length: int = 1
    memory_limit_bytes: int | None = None
    peak_bytes: int | None = None
    """Estimated peak on the fullest rank, in bytes."""
    step_s: float | None = None
    """Estimated time of one optimizer step, in seconds."""
    proven_optimal: bool = False
    """The search proved that no plan of its space is faster under the limit.

    The space holds every layout of every unit where equal units come in rows of up to 8, and the layouts that the rule of
    `planner/stations.py` gives where rows are longer.
    """
    hardware: str = ""
    devices_per_node: int | None = None
    """Ranks of a node that the plan was made for; its groups follow those nodes."""
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        if self.version != PLAN_VERSION:
            raise PlanError(_other_version(self.version))
        for name in ("world_size", "micro_batch_size", "accumulation_steps", "sequence_length"):
            if getattr(self, name) < 1:
                raise PlanError(f"The plan has {name}={getattr(self, name)}; it must be at least 1.")
        for name in ("memory_limit_bytes", "peak_bytes", "step_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise PlanError(f"The plan has {name}={value}; it must be finite and not negative.")
        seen: set[str] = set()
        for unit in self.units:
            if self.world_size % unit.shard_size:
                raise PlanError(
                    f"Unit {unit.fqn or '(root)'!r} is sharded over {unit.shard_size} ranks, which does not divide the"
                    f" world size {self.world_size}; plan again for {self.world_size} processes."
                )
            if unit.fqn in seen:
                raise PlanError(f"Unit {unit.fqn or '(root)'!r} is listed twice in the plan.")
            seen.add(unit.fqn)

    def to_fsdp_plan(self) -> dict[str, str]:
        """This plan as the `fsdp_plan` of transformers' `DistributedConfig`, see `planner/fsdp_plan.py`.

        Raises:
            PlanError: it says more than that can; the message says what.
        """
        from .fsdp_plan import fsdp_plan_of

        return fsdp_plan_of(self)

    @classmethod
    def of(cls, description: ModelDescription, choices: Sequence[Choice], batch: Batch, *, world_size: int, **stated: Any) -> Plan:
        """The plan of these choices.

        Args:
            description: the model.
            choices: one a unit, in the description's order.
            batch: micro-batch size and accumulation.
            world_size: ranks.
            **stated: other fields, such as `strategy` (default `osdp`) and estimates.
        """
        units = (UnitDecision.of(unit.fqn, choice) for unit, choice in zip(description.units, choices, strict=True))
        return cls(
            world_size=world_size,
            strategy=stated.pop("strategy", "osdp"),
            units=tuple(units),
            **asdict(batch),
            model_fingerprint=description.fingerprint,
            cut=description.cut,
            model_name=description.model_name,
            sequence_length=description.sequence_length,
            **stated,
        )

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.world_size * self.micro_batch_size * self.accumulation_steps

    @property
    def samples_per_s(self) -> float | None:
        """Estimated throughput over all ranks."""
        return self.global_batch_size / self.step_s if self.step_s else None

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides how the plan runs; estimates and names are left out."""
        told = {"memory_limit_bytes": None, "peak_bytes": None, "step_s": None, "model_name": "", "hardware": "", "proven_optimal": False}
        run = asdict(replace(self, **told, devices_per_node=None))
        return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]

    def decision(self, fqn: str) -> UnitDecision:
        """The decision for one unit.

        Raises:
            PlanError: the plan has no such unit.
        """
        for unit in self.units:
            if unit.fqn == fqn:
                return unit
        raise PlanError(f"The plan has no unit {fqn or '(root)'!r}; it has {_some(u.fqn or '(root)' for u in self.units)}.")

    def diff(self, other: Plan) -> tuple[str, ...]:
        """One line for each way in which `other` runs differently; empty when the two run the same."""
        lines = [
            f"{name}: {getattr(self, name)} -> {getattr(other, name)}"
            for name in ("world_size", "micro_batch_size", "accumulation_steps", "model_fingerprint")
            if getattr(self, name) != getattr(other, name)
        ]
        if self.cut != other.cut:
            lines.append(f"cut: {self.cut.describe()} -> {other.cut.describe()}")
        mine, theirs = ({u.fqn: u for u in plan.units} for plan in (self, other))
        for fqn in dict.fromkeys([*mine, *theirs]):
            before = mine[fqn].describe(self.world_size) if fqn in mine else "absent"
            after = theirs[fqn].describe(other.world_size) if fqn in theirs else "absent"
            if before != after:
                lines.append(f"{fqn or '(root)'}: {before} -> {after}")
        return tuple(lines)

    def check(self, description: ModelDescription, world_size: int) -> None:
        """Refuse to run on another model or world.

        Raises:
            PlanError: the world size differs, or units are missing, unknown or of another shape.
        """
        if self.world_size != world_size:
            raise PlanError(
                f"The plan is for {self.world_size} processes, but {world_size} are running."
                f" Start {self.world_size} processes, or plan again."
            )
        have, want = {u.fqn for u in description.units}, {u.fqn for u in self.units}
        if unknown := sorted(want - have):
            raise PlanError(f"The plan names {_some(unknown)}, which the model does not have; its units are {_some(sorted(have))}.")
        if missing := sorted(have - want):
            raise PlanError(f"The plan says nothing about {_some(u or '(root)' for u in missing)}. Plan again for this model.")
        if self.model_fingerprint != description.fingerprint:
            raise PlanError(
                f"The plan is for a model with fingerprint {self.model_fingerprint}, but this one has"
                f" {description.fingerprint}: parameter names, shapes or dtypes differ. Plan again."
            )

    def to_json(self) -> str:
        """The plan as JSON text, with its fingerprint."""
        return json.dumps({**asdict(self), "fingerprint": self.fingerprint}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the JSON form to `path`, whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the plan") -> Plan:
        """Read a plan and validate it.

        Args:
            text: JSON as `to_json` writes it, or a report that holds it under `plan`.
            source: what the text is called in errors, for example the file's name.

        Raises:
            PlanError: the text is not JSON, lacks or misnames a field, has a wrong type or range, or was changed.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # not JSON, not text, or nested without end
            raise PlanError(f"{source} is not JSON ({error}). Write it again with Plan.save.") from None
        if not isinstance(data, dict):
            raise PlanError(f"{source} holds a {type(data).__name__}, not a plan. Write it again with Plan.save.")
        if isinstance(data.get("plan"), dict):
            data = data["plan"]
        if isinstance(version := data.get("version"), int) and version != PLAN_VERSION:
            raise PlanError(_other_version(version))
        stated = data.pop("fingerprint", None)
        plan = validated(cls, json.dumps(data), lambda problem: PlanError(f"{source} is not a valid plan: {problem}."))
        if stated is not None and stated != plan.fingerprint:
            raise PlanError(f"{source} was changed or damaged: it states fingerprint {stated!r:.40}, its content has {plan.fingerprint}.")
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: the file is missing, too large, or not a valid plan.
        """
        return cls.from_json(read_whole(path, "plan", PlanError), source=str(path))


def _other_version(version: int) -> str:
    return f"The plan has version {version}; this hf_osdp reads version {PLAN_VERSION}. Plan again."


def _some(names, limit: int = 6) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
