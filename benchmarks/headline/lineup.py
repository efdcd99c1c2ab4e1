"""Each contender's best plan under the limit, at an equal batch and at its own best batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.problem import PlanningProblem, Strategy
from hf_osdp.planner.search.search import SearchResult, search
from hf_osdp.planner.training_job import TrainingJob

from .cases import Case

SAMPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Samples per device to try for the own best batch; the largest that fits is then searched between the last that
fits and the next.
"""


class BatchRule(str, Enum):
    """Batch at which contenders are compared."""

    EQUAL = "equal batch"
    """The same global batch for all: that of the case, or the baseline's best."""
    OWN = "own best batch"
    """Each at the samples per device with the most samples per second, in one micro-step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A strategy and its fixed options."""

    name: str
    strategy: Strategy
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the job that are fixed."""
    splits: bool = False
    """Whether split models are searched too, if they are described."""
    baseline: bool = False
    """Whether the rates of the others are relative to this one."""


_ALL_SAVED = {"recompute": False, "offload_activations": False}
_ALL_RECOMPUTED = {"recompute": True, "offload_activations": False}
CONTENDERS = (
    Contender(name="full shard", strategy=Strategy.FSDP, baseline=True),
    Contender(name="full shard, all saved", strategy=Strategy.FSDP, fixed=_ALL_SAVED),
    Contender(name="full shard, all recomputed", strategy=Strategy.FSDP, fixed=_ALL_RECOMPUTED),
    Contender(name="ZeRO-2", strategy=Strategy.ZERO2),
    Contender(name="DDP", strategy=Strategy.DDP),
    Contender(name="OSDP, all saved", strategy=Strategy.OSDP, fixed=_ALL_SAVED),
    Contender(name="OSDP", strategy=Strategy.OSDP, splits=True),
)
"""Contenders on several devices. "All saved" recomputes nothing; the others recompute if it is faster, single
strategies all blocks in one way or none."""
OFFLOADERS = (
    Contender(name="all on the host", strategy=Strategy.FSDP, fixed={"host_offload": True}, baseline=True),
    Contender(name="none on the host", strategy=Strategy.FSDP, fixed={"host_offload": False}),
    Contender(name="OSDP", strategy=Strategy.OSDP),
)
"""Contenders on one device with a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender at one batch."""

    contender: Contender
    rule: BatchRule
    plan: Plan | None
    """The plan; None if none fits."""
    needs_bytes: int | None = None
    """If nothing fits: the least memory that one sample per device needs."""
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineup:
    """All entries of a case."""

    case: Case
    limit_bytes: int
    entries: tuple[Entry, ...]

    def distinct_plans(self) -> dict[str, Plan]:
        """Return each distinct plan by name; several entries may share one plan."""
        return {run_name(entry.plan): entry.plan for entry in self.entries if entry.plan is not None}


def run_name(plan: Plan) -> str:
    """Return a name that is equal for equal plans, whatever their strategy is called."""
    return replace(plan, strategy="osdp").fingerprint


def contenders_of(case: Case) -> tuple[Contender, ...]:
    return CONTENDERS if case.devices > 1 else OFFLOADERS


def line_up(
    case: Case,
    description: ModelDescription,
    hardware: Hardware,
    *,
    samples: tuple[int, ...] | None = None,
    split: Sequence[ModelDescription] = (),
) -> Lineup:
    """Return every contender's plans.

    Args:
        case: model and limit.
        description: description of the model.
        hardware: `case.devices` devices; their reserved memory counts towards the limit.
        samples: samples per device, tried in this order until they no longer fit; None takes `SAMPLES` and values
            between.
        split: the same model in operator units or slices, for contenders that may choose it.
    """
    able = [c for c in contenders_of(case) if description.recomputable or not c.fixed.get("recompute")]
    searches = {
        c.name: _Search(case, c, (description, *(split if c.splits else ())), hardware, case.limit_bytes) for c in able
    }
    own = {name: _at_own_best(one, samples) for name, one in searches.items()}
    order = sorted(own.items(), key=lambda item: not item[1].contender.baseline)
    common = case.equal_batch_size or next(
        (entry.plan.global_batch_size for _, entry in order if entry.plan is not None), None
    )
    equal = [] if common is None else [_at(one, common) for one in searches.values()]
    return Lineup(case=case, limit_bytes=case.limit_bytes, entries=(*equal, *own.values()))


def job_of(case: Case, global_batch_size: int, **fixed: Any) -> TrainingJob:
    return TrainingJob(global_batch_size=global_batch_size, precision=case.compute, **fixed)


@dataclass(frozen=True, slots=True)
class _Search:
    """Search of one contender."""

    case: Case
    contender: Contender
    descriptions: tuple[ModelDescription, ...]
    hardware: Hardware
    limit_bytes: int

    def __call__(self, global_batch_size: int, **fixed: Any) -> SearchResult | InfeasibleError:
        """Return the fastest plan over all descriptions, or the error of the description that needs the least
        memory.
        """
        job = job_of(self.case, global_batch_size, **fixed, **self.contender.fixed)
        found, errors = [], []
        for description in self.descriptions:
            try:
                found.append(
                    search(
                        PlanningProblem(
                            description=description,
                            hardware=self.hardware,
                            job=job,
                            memory_limit_bytes=self.limit_bytes,
                            strategy=self.contender.strategy,
                        )
                    )
                )
            except InfeasibleError as error:
                errors.append(error)
        return (
            min(found, key=lambda result: result.plan.step_s)
            if found
            else min(errors, key=lambda error: error.least_peak_bytes)
        )


def _at(search_for: _Search, global_batch_size: int) -> Entry:
    found = search_for(global_batch_size)
    if isinstance(found, InfeasibleError):
        return Entry(
            contender=search_for.contender, rule=BatchRule.EQUAL, plan=None, needs_bytes=found.least_peak_bytes
        )
    return _entry(search_for.contender, BatchRule.EQUAL, found)


def _at_own_best(search_for: _Search, samples: tuple[int, ...] | None) -> Entry:
    best: SearchResult | None = None
    needs = None
    for found in _by_samples(search_for, samples):
        if isinstance(found, InfeasibleError):
            needs = found.least_peak_bytes
        elif best is None or found.plan.samples_per_s > best.plan.samples_per_s:
            best = found
    if best is None:
        return Entry(contender=search_for.contender, rule=BatchRule.OWN, plan=None, needs_bytes=needs)
    return _entry(search_for.contender, BatchRule.OWN, best)


def _by_samples(search_for: _Search, samples: tuple[int, ...] | None) -> Iterator[SearchResult | InfeasibleError]:
    """Yield plans for rising samples per device, then the error of the first that does not fit."""
    fits, more = 0, None
    for count in samples or SAMPLES:
        result = search_for(search_for.case.devices * count, micro_batch_size=count)
        yield result
        if isinstance(result, InfeasibleError):
            more = count
            break
        fits = count
    while samples is None and more is not None and fits and more - fits > max(1, fits // 16):
        middle = (fits + more) // 2
        result = search_for(search_for.case.devices * middle, micro_batch_size=middle)
        if isinstance(result, InfeasibleError):
            more = middle
        else:
            fits = middle
            yield result


def _entry(contender: Contender, rule: BatchRule, result: SearchResult) -> Entry:
    return Entry(contender=contender, rule=rule, plan=result.plan, host_bytes=result.memory.host_bytes)


def layout_text(plan: Plan) -> str:
    """Return the number of units per layout: `40 shard 8; 8 replicate, keep`."""
    kinds: dict[str, int] = {}
    for unit in plan.units:
        text = unit.describe(plan.world_size)
        kinds[text] = kinds.get(text, 0) + 1
    layouts = "; ".join(f"{number} {text}" for text, number in sorted(kinds.items(), key=lambda item: -item[1]))
    return layouts if plan.split.is_none else f"{split_text(plan)}: {layouts}"


def split_text(plan: Plan) -> str:
    """Return how the model is split: `operator units, 8 operators in 4 slices`."""
    slices: dict[int, int] = {}
    for split in plan.split.sliced:
        slices[split.slices] = slices.get(split.slices, 0) + 1
    parts = [f"{number} operator{'s' if number > 1 else ''} in {count} slices" for count, number in slices.items()]
    return ", ".join([*(["operator units"] if plan.split.operators else []), *parts])


def recomputed(plan: Plan) -> int:
    """Return the number of units whose activations are recomputed."""
    return sum(unit.activations.recomputes for unit in plan.units)
