"""Prepared schedulers go on on other numbers of processes as in a run never interrupted, to the bit."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import lr_scheduler as schedulers
from transformers import get_cosine_schedule_with_warmup

from hf_osdp.integrations.checkpoints import position_factor, process_schedule, rescale_schedules

STEPS, BREAK = 12, 5

KINDS = {
    "transformers": lambda optimizer, ranks: get_cosine_schedule_with_warmup(optimizer, 3 * ranks, STEPS * ranks),
    "multiplicative": lambda optimizer, ranks: schedulers.MultiplicativeLR(optimizer, lambda _: 0.9 ** (1 / ranks)),
    "step": lambda optimizer, ranks: schedulers.StepLR(optimizer, 2 * ranks, 0.7),
    "milestones": lambda optimizer, ranks: schedulers.MultiStepLR(optimizer, [3 * ranks, 6 * ranks], 0.7),
    "exponential": lambda optimizer, ranks: schedulers.ExponentialLR(optimizer, 0.9 ** (1 / ranks)),
    "cosine": lambda optimizer, ranks: schedulers.CosineAnnealingLR(optimizer, STEPS * ranks, 1e-3),
    "restarts": lambda optimizer, ranks: schedulers.CosineAnnealingWarmRestarts(optimizer, 2 * ranks, 2),
    "polynomial": lambda optimizer, ranks: schedulers.PolynomialLR(optimizer, STEPS * ranks, 2.0),
    "one cycle": lambda optimizer, ranks: schedulers.OneCycleLR(optimizer, 0.3, STEPS * ranks),
    "cyclic": lambda optimizer, ranks: schedulers.CyclicLR(optimizer, 0.01, 0.1, 4 * ranks, cycle_momentum=False),
    "in turn": lambda optimizer, ranks: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, 1.0, 3 * ranks), schedulers.CosineAnnealingLR(optimizer, STEPS * ranks)],
        [3 * ranks],
    ),
    "chained": lambda optimizer, ranks: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 4 * ranks), schedulers.ExponentialLR(optimizer, 0.9 ** (1 / ranks))]
    ),
}


def made(kinds, ranks: int):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [parameters[0]], "lr": 0.1}, {"params": [parameters[1]], "lr": 0.2}])
    return optimizer, [make(optimizer, ranks) for make in kinds]


def own(scheduler, **options):
    return process_schedule(AcceleratedScheduler(scheduler, [], **options))


def rates_of(optimizer) -> list[float]:
    return [value for group in optimizer.param_groups for value in (group["lr"], *group["betas"])]


def stepped(optimizer, several, times: int) -> list[list[float]]:
    seen = []
    for _ in range(times):
        optimizer.step()
        for scheduler in several:
            scheduler.step()
        seen.append(rates_of(optimizer))
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*KINDS, "two on one optimizer"])
@pytest.mark.parametrize("was, now", [(2, 1), (1, 3), (4, 6)])
def test_rescaled_schedule_goes_on_as_if_never_interrupted(kind, was, now):
    """After a checkpoint of `was` processes was loaded by `now`."""
    kinds = [KINDS["step"], KINDS["exponential"]] if kind not in KINDS else [KINDS[kind]]
    want, tolerance = stepped(*made(kinds, now), STEPS * now), 0 if kind in KINDS else 1e-15
    saved, old = made(kinds, was)
    stepped(saved, old, BREAK * was)
    optimizer, new = made(kinds, now)
    before = [own(scheduler) for scheduler in new]
    optimizer.load_state_dict(saved.state_dict())
    for scheduler, other in zip(new, old, strict=True):
        scheduler.load_state_dict(other.state_dict())
    assert rescale_schedules(before, position_factor(ranks=(was, now), samples=(24, 24))) == []
    found = [rates_of(optimizer), *stepped(optimizer, new, (STEPS - BREAK) * now)]
    assert found == [pytest.approx(rates, abs=tolerance) for rates in want[BREAK * now - 1 :]]


@pytest.mark.parametrize(
    "ranks, samples, factor",
    [
        ((2, 1), (8, 8), Fraction(1, 2)),
        ((2, 4), (8, 16), 1),  # batches of one process stay: Accelerate's own way
        ((2, 2), (8, 4), 2),
        ((2, 2), (None, 8), 1),
        ((2, 1), (None, 8), None),
        ((2, 1), (8, None), None),
    ],
)
def test_position_factor_follows_ranks_and_samples(ranks, samples, factor):
    assert position_factor(ranks=ranks, samples=samples) == factor


@pytest.mark.filterwarnings("ignore")
def test_schedules_that_cannot_be_rescaled_are_named_and_stay():
    plateau = made([lambda optimizer, _: schedulers.ReduceLROnPlateau(optimizer, patience=3)], 1)[1]
    assert rescale_schedules([own(*plateau)], Fraction(1, 2)) == ["ReduceLROnPlateau"]
    optimizer, (scheduler,) = made([KINDS["step"]], 1)
    stepped(optimizer, [scheduler], 6)
    before, rates = [own(scheduler)], scheduler.get_last_lr()
    assert rescale_schedules(before, Fraction(1, 2)) == rescale_schedules(before, None) == ["StepLR"]
    assert scheduler.get_last_lr() == rates and scheduler.last_epoch == 6
    optimizer, (scheduler,) = made([KINDS["one cycle"]], 2)
    before = [own(scheduler)]
    stepped(optimizer, [scheduler], 20)
    assert rescale_schedules(before, Fraction(1, 2)) == []
    assert scheduler.last_epoch == 10
    assert rescale_schedules(before, Fraction(10)) == []
    assert scheduler.last_epoch == STEPS * 2
