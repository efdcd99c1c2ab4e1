"""All checks that apply to what is known of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...planner.cost.timing import TimeEstimate
from ...planner.description import UnitDescription
from ...planner.hardware import Hardware
from ...planner.job import OptimizerSpec, Precision
from ...planner.plan import Plan
from ...planner.search.search import StrategyResult
from .devices import DeviceMemory, fp16_for_bf16, memory_now, slow_link
from .findings import Finding
from .folder import RunFolder, not_writable, too_small
from .model import frozen, no_masters, unused_block_classes, whole_in_one_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a run before it starts; None where it is not."""

    units: Sequence[UnitDescription]
    """Of the model as it will be trained."""
    precision: Precision
    optimizer: OptimizerSpec
    asked_classes: Sequence[str] | None = None
    found_classes: Sequence[str] = ()
    frozen_in_optimizer: int = 0
    plan: Plan | None = None
    chosen: bool = True
    """The search chose the plan, out of everything, for this hardware."""
    hardware: Hardware | None = None
    bf16_on: str | None = None
    """The device's name where it computes bfloat16 as fast as float16."""
    time: TimeEstimate | None = None
    """The plan's."""
    others: Sequence[StrategyResult] = ()
    needed_bytes: int | None = None
    """The plan's highest moment, tensors alone."""
    memory: DeviceMemory | None = None
    folder: RunFolder | None = None


def findings_of(known: Known) -> tuple[Finding, ...]:
    """What is wrong with a run, as far as this process can see.

    Args:
        known: what there is to look at.

    Returns:
        The findings, in the order of the checks; empty where nothing is wrong.
    """
    return tuple(finding for finding in _checked(known) if finding is not None)


def _checked(known: Known) -> Iterator[Finding | None]:
    yield whole_in_one_unit(known.units)
    yield unused_block_classes(known.asked_classes, known.found_classes)
    yield no_masters(known.units, known.precision)
    yield fp16_for_bf16(known.precision, known.bf16_on)
    yield frozen(known.units, in_optimizer=known.frozen_in_optimizer)
    if known.plan is not None and not known.chosen:
        yield slow_link(known.plan, known.hardware, known.time, known.others)
    if known.memory is not None and known.needed_bytes is not None and known.plan is not None:
        yield memory_now(known.memory, known.needed_bytes, known.plan.communicators)
    if known.folder is not None:
        broken = not_writable(known.folder)
        yield broken
        if broken is None:
            yield too_small(known.folder, known.units, known.optimizer)
