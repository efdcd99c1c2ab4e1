"""The plan: the decisions for each unit and the batch. An immutable value with a JSON form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..reading import parse_json, read_bytes
from .block_forms import BlockForms
from .decision import Batch, UnitDecision, UnitLayout, communicators_of
from .description import ModelDescription
from .files import validated, write_whole
from .hardware import MOST_RANKS
from .split import WHOLE_BLOCKS, ModelSplit
from .training_job import EXACT

PLAN_VERSION = 11
_MOST = {"world_size": MOST_RANKS, "micro_batch_size": 2**20, "accumulation_steps": 2**20, "sequence_length": 2**30}
_MOST_UNITS = 2**14
_ESTIMATES = {
    "memory_limit_bytes": None,
    "peak_bytes": None,
    "step_s": None,
    "proven_optimal": False,
    "gap": None,
    "simplified": "",
}
_NAMES = {"model_name": "", "hardware": "", "devices_per_node": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(BlockForms):
    """The sharding plan of one model on one set of devices.

    All ranks run the same plan, and compare `fingerprint` to check this.
    """

    world_size: int
    strategy: str
    """`osdp`, or the single strategy that the user asked for."""
    units: tuple[UnitDecision, ...]
    """One decision per unit, in the order of the description."""
    micro_batch_size: int
    """Samples of one micro-batch on one rank."""
    accumulation_steps: int
    """Micro-batches of a rank before each optimizer step."""
    model_fingerprint: str
    split: ModelSplit = WHOLE_BLOCKS
    """Splits of the model before its units are found; `units` are those of the split model."""
    model_name: str = ""
    sequence_length: int = 1
    memory_limit_bytes: int | None = None
    peak_bytes: int | None = None
    """Estimated peak on the fullest rank."""
    step_s: float | None = None
    """Estimated time of one optimizer step."""
    proven_optimal: bool = False
    """Whether the search proved that no plan of its space is faster under the limit. The space has every layout of
    every unit in rows of up to 8 equal units, and in longer rows the layouts that follow the rule of
    `planner/search/options.py`."""
    gap: float | None = None
    """Share of the step by which a faster plan of the space may be shorter at most, as the search proved."""
    simplified: str = ""
    """What the fastest plan would have gained, if a simpler one was taken (`OSDPConfig.simplicity`)."""
    hardware: str = ""
    devices_per_node: int | None = None
    """Ranks per node; the plan's groups follow the nodes."""
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if not 1 <= (count := getattr(self, name)) <= most:
                raise PlanError(f"The plan has {name}={count}; it must be at least 1 and at most {most}.")
        for name in ("memory_limit_bytes", "peak_bytes", "step_s", "gap"):
            if not 0 <= (value := getattr(self, name) or 0) < float("inf"):
                raise PlanError(f"The plan has {name}={value}; it must be finite and not negative.")
        if len(self.units) > _MOST_UNITS:
            raise PlanError(f"The plan has {len(self.units)} units; it must have at most {_MOST_UNITS}.")
        self._check_units()

    def _check_units(self) -> None:
        world, seen = self.world_size, set[str]()
        for unit in self.units:
            g = unit.shard_size
            if world % g:
                raise PlanError(
                    f"Unit {unit.label!r} is sharded over {g} ranks, which does not divide the world size {world};"
                    f" plan again for {world} processes."
                )
            if "replicas" in unit.formats and g == world:
                raise PlanError(
                    f"Unit {unit.label!r} has a format for its replicas, but is sharded over all ranks, without any;"
                    " plan again."
                )
            if unit.fqn in seen:
                raise PlanError(f"Unit {unit.label!r} is listed twice in the plan.")
            seen.add(unit.fqn)

    @classmethod
    def of(
        cls,
        description: ModelDescription,
        layouts: Sequence[UnitLayout],
        batch: Batch,
        *,
        world_size: int,
        **stated: Any,
    ) -> Plan:
        """Return the plan of these layouts, one per unit in the description's order; `stated` are further fields,
        such as estimates.
        """
        units = (UnitDecision.of(unit.fqn, layout) for unit, layout in zip(description.units, layouts, strict=True))
        return cls(
            world_size=world_size,
            strategy=stated.pop("strategy", "osdp"),
            units=tuple(units),
            **asdict(batch),
            model_fingerprint=description.fingerprint,
            split=description.split,
            compiled_classes=description.compiled_classes,
            model_name=description.model_name,
            sequence_length=description.sequence_length,
            **stated,
        )

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.world_size * self.micro_batch_size * self.accumulation_steps

    @property
    def communication(self) -> str:
        """Coarsest format in which any unit sends, or `exact`."""
        return UnitDecision.coarsest(self.units) or EXACT

    @property
    def communicators(self) -> int:
        """Number of NCCL communicators of each rank."""
        return communicators_of(self.units, self.world_size)

    @property
    def samples_per_rank(self) -> int:
        """Samples of one rank in an optimizer step."""
        return self.micro_batch_size * self.accumulation_steps

    @property
    def samples_per_s(self) -> float | None:
        """Estimated throughput over all ranks."""
        return self.global_batch_size / self.step_s if self.step_s else None

    @property
    def fingerprint(self) -> str:
        """Hash of all fields that change how the plan runs; estimates and names are left out."""
        run = {**asdict(self), **_ESTIMATES, **_NAMES}
        return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def batch(self) -> Batch:
        return Batch(micro_batch_size=self.micro_batch_size, accumulation_steps=self.accumulation_steps)

    def layouts(self, description: ModelDescription) -> tuple[UnitLayout, ...]:
        """Return each unit's layout as it runs, in the description's order: spans can fix resharding, and one
        micro-step always reduces.
        """
        decisions = {decision.fqn: decision.layout for decision in self.units}
        layouts = []
        for unit in description.units:
            layout = decisions[unit.fqn]
            free = unit.span.reshards(layout.reshard_after_forward)
            reduces = layout.reduce_every_micro_step or self.accumulation_steps == 1
            layouts.append(replace(layout, reshard_after_forward=free, reduce_every_micro_step=reduces))
        return tuple(layouts)

    def decision(self, fqn: str) -> UnitDecision:
        """Return the decision for one unit; PlanError if the plan has no such unit."""
        for unit in self.units:
            if unit.fqn == fqn:
                return unit
        raise PlanError(f"The plan has no unit {fqn or '(root)'!r}; it has {_some(u.label for u in self.units)}.")

    def check(self, description: ModelDescription, world_size: int) -> None:
        """Check that the plan is for this model and world size.

        Raises:
            PlanError: the world size differs, or units are missing, unknown or have other parameters.
        """
        if self.world_size != world_size:
            raise PlanError(
                f"The plan is for {self.world_size} processes, but {world_size} are running."
                f" Start {self.world_size} processes, or plan again."
            )
        have, want = {u.fqn for u in description.units}, {u.fqn for u in self.units}
        if unknown := sorted(want - have):
            raise PlanError(
                f"The plan names {_some(unknown)}, which the model does not have; its units are {_some(sorted(have))}."
            )
        if missing := sorted(have - want):
            raise PlanError(
                f"The plan has no unit {_some(u or '(root)' for u in missing)}, but the model has. Plan again for this"
                " model."
            )
        if self.model_fingerprint != description.fingerprint:
            raise PlanError(
                f"The plan is for a model with fingerprint {self.model_fingerprint}, but this one has"
                f" {description.fingerprint}: parameter names, shapes or dtypes differ. Plan again."
            )

    def to_json(self) -> str:
        """Return the plan as JSON text, with its fingerprint."""
        units = [{"fqn": unit.fqn, **asdict(unit)} for unit in self.units]  # the name first
        return json.dumps({**asdict(self), "units": units, "fingerprint": self.fingerprint}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the JSON form to `path`, whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the plan") -> Plan:
        """Read a plan from JSON as `to_json` writes it, or a report that holds it under `plan`; errors call it
        `source`.

        Raises:
            PlanError: the text is not JSON, lacks or misnames a field, has a wrong type or range, or was changed.
        """
        return cls.from_content(plan_content(text, source), source)

    @classmethod
    def from_content(cls, data: object, source: str) -> Plan:
        """Return the plan of a JSON value; `from_json` has the errors."""
        if not isinstance(data, dict):
            raise PlanError(f"{source} holds a {type(data).__name__}, not a plan. Write it again with Plan.save.")
        data = dict(data["plan"] if isinstance(data.get("plan"), dict) else data)
        if isinstance(version := data.get("version"), int) and version != PLAN_VERSION:
            raise PlanError(f"The plan has version {version}; this hf_osdp reads version {PLAN_VERSION}. Plan again.")
        stated = data.pop("fingerprint", None)
        plan = validated(cls, data, lambda problem: PlanError(f"{source} is not a valid plan: {problem}."))
        if stated is not None and stated != plan.fingerprint:
            raise PlanError(
                f"{source} was changed or damaged: it states fingerprint {stated!r:.40}, its content has"
                f" {plan.fingerprint}. Plan again, or"
                " leave the fingerprint out where the change was meant."
            )
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file; PlanError if it is missing, too large, or not a valid plan."""
        return cls.from_json(read_bytes(path, "plan", PlanError), source=str(path))


def plan_content(text: str | bytes, source: str) -> Any:  # noqa: ANN401 - any JSON
    """Return the JSON value of a plan file's text, not validated; PlanError if it is not JSON."""
    return parse_json(text, lambda problem: PlanError(f"{source} {problem}. Write it again with Plan.save."))


def _some(names: Iterable[str]) -> str:
    listed, limit = list(names), 6
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
