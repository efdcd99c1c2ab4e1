"""Prepared schedulers after a change of the number of processes.

Accelerate steps a prepared scheduler once for each process in every optimizer step, so that a position stands for G/W samples (G samples
of an optimizer step, W processes). A checkpoint of G and W is at p; a run of G' and W' that was never interrupted would be at
p · (G/W) / (G'/W'), with lengths (`T_max`, milestones) of its own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What schedulers keep in an optimizer's groups."""
_BY_POSITION = (LambdaLR, OneCycleLR, CyclicLR)
"""Their rates follow from the position alone. Others are stepped there: 7 µs a step, and to the bit what a run without a break has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A prepared scheduler as this run made it."""

    scheduler: LRScheduler
    state: dict[str, Any]
    rates: tuple[dict[str, Any], ...]
    """Of each group of its optimizer."""
    position: int
    """-1 where it counts none."""


def position_factor(*, ranks: tuple[int, int], samples: tuple[int | None, int | None]) -> Fraction | None:
    """Return what positions of a checkpoint are to be multiplied by; None where nobody knows.

    Args:
        ranks: when it was saved, and now.
        samples: of an optimizer step over all ranks, then and now; None where no plan says.
    """
    if samples[0] is not None and samples[1] is not None:
        return Fraction(samples[0] * ranks[1], ranks[0] * samples[1])
    return Fraction(1) if ranks[0] == ranks[1] else None


def own_schedule(prepared: object) -> Schedule | None:
    """Return a scheduler that goes by the number of processes, with what loading would overwrite.

    Returns:
        None for one that steps once in an optimizer step, or when the loop says.
    """
    if not isinstance(prepared, AcceleratedScheduler) or not prepared.step_with_optimizer or prepared.split_batches:
        return None
    scheduler = prepared.scheduler
    rates = tuple({key: deepcopy(group[key]) for key in _RATES if key in group} for group in scheduler.optimizer.param_groups)
    return Schedule(scheduler=scheduler, state=deepcopy(scheduler.state_dict()), rates=rates, position=_position(scheduler))


def rescale_schedules(schedules: Sequence[Schedule], factor: Fraction | None, *, ranks: int, uncounted: int) -> list[str]:
    """Set schedulers, and rates of their optimizers, to where this run would have them, after a checkpoint was loaded.

    Returns:
        Of each scheduler that stays as it was saved, which and why.
    """
    if factor == 1:
        return []
    found = [(schedule, _target(schedule, factor)) for schedule in schedules]
    targets = [(schedule, target) for schedule, target in found if isinstance(target, int)]
    for schedule, _ in targets:  # all before the first step: several may change the rates of one optimizer
        for group, rates in zip(schedule.scheduler.optimizer.param_groups, schedule.rates, strict=True):
            group.update(deepcopy(rates))
        schedule.scheduler.load_state_dict(deepcopy(schedule.state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer step went before
        for schedule, target in targets:
            scheduler, steps = schedule.scheduler, target - schedule.position
            if isinstance(scheduler, _BY_POSITION):
                scheduler.last_epoch, steps = target - 1, 1
            for _ in range(steps):
                scheduler.step()
            if hasattr(scheduler, "_step_count"):
                scheduler._step_count = 1 + target + target // ranks * uncounted
    return [f"{type(schedule.scheduler).__name__} ({problem})" for schedule, problem in found if isinstance(problem, str)]


def _target(schedule: Schedule, factor: Fraction | None) -> int | str:
    """Return where a scheduler is to be, or why that cannot be had."""
    saved, step = _position(schedule.scheduler), inspect.signature(schedule.scheduler.step).parameters.values()
    if saved < 0 or any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in step):
        return "it goes by metrics or calls, not by a position"
    if factor is None:
        return "the samples of an optimizer step are not known"
    target = round(saved * factor)
    if isinstance(schedule.scheduler, OneCycleLR):
        target = min(target, schedule.state["total_steps"])  # Accelerate does not step it any further
    if schedule.position > target and not isinstance(schedule.scheduler, _BY_POSITION):
        return f"it begins at {schedule.position}, past {target}"
    return target


def _position(scheduler: LRScheduler) -> int:
    """Return how often a scheduler was stepped; chained ones count for themselves."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    several = getattr(scheduler, "_schedulers", ())
    return _position(several[0]) if several else -1
